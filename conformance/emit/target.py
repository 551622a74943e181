"""Write the emitted test: whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from conformance.errors import UserError


def write(path: Path, text: str) -> None:
    """Replace `path` by `text`.

    Raises:
        UserError: it cannot be written, in one line.
    """
    try:
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=path.name, encoding="utf-8", delete=False
        ) as file:
            try:
                file.write(text)
                file.flush()
                os.chmod(file.name, 0o644)  # a temporary file is its owner's only
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise UserError(
            f"--emit-test {path}: {error.strerror}; give a file that can be written"
        ) from None
