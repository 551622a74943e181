"""Files that users write: TOML arrays of tables."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from conformance.errors import UserError


def read_tables(path: Path, name: str, what: str) -> list[dict[str, Any]]:
    """The ``[[name]]`` tables of a file that holds nothing else.

    Args:
        what: what the file is called in errors.

    Raises:
        UserError: the file is missing or malformed, in one line.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"{what} {path}: {error.strerror}; give a TOML file") from None
    except (ValueError, RecursionError) as error:
        # Beside what is no TOML: no UTF-8, a number of too many digits, too deep a nesting.
        raise UserError(f"{what} {path} is not TOML: {error}") from None
    tables = data.pop(name, [])
    if data or not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        raise UserError(f"{what} {path}: it holds [[{name}]] tables and nothing else")
    return tables
