"""What the last run reached, kept in the cache for ``dflash-conformance clauses``.

The file is a convenience: it appears whole or not at all, the last of several processes wins, and
whoever cannot write or read it goes on without it.
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SCHEMA = 1
FILE = "last-run.json"


@dataclass(frozen=True)
class LastRun:
    """One run or matrix.

    Attributes:
        command: ``run`` or ``matrix``.
        profile, seed: as they were given.
        trees: by label, how often each clause was checked; None where it does not apply.
    """

    command: str
    profile: str
    seed: int
    trees: dict[str, dict[str, int | None]]

    def line(self) -> str:
        """What ran, in one line."""
        ran = ", ".join(self.trees) or "no tree that could be tested"
        return f"{self.command}, profile {self.profile}, seed {self.seed}: {ran}"

    def reached(self, number: str) -> str:
        """How often a clause was checked, in words."""
        counts = [counts[number] for counts in self.trees.values() if number in counts]
        applies = [count for count in counts if count is not None]
        if not counts:
            return "not part of the last run"
        if len(self.trees) == 1:
            return f"{applies[0]:,} times" if applies else "does not apply"
        return f"{sum(applies):,} times, applies to {len(applies)} of {len(self.trees)} trees"


def save(cache: Path, run: LastRun) -> None:
    """Replace the file in the folder `cache`, which is made if need be; or leave it as it is."""
    text = json.dumps({"schema": SCHEMA, **asdict(run)}, indent=1) + "\n"
    with suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=cache, prefix=FILE, encoding="utf-8", delete=False
        ) as file:
            try:
                file.write(text)
                file.flush()
                os.replace(file.name, cache / FILE)
            except BaseException:
                os.unlink(file.name)
                raise


def load(cache: Path) -> LastRun | None:
    """The last run; None if there is none that this version can read."""
    try:
        data = json.loads((cache / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA or not _sound(data):
        return None
    return LastRun(**data)


def _sound(data: dict[str, Any]) -> bool:
    """Whether the values are of a :class:`LastRun`."""
    types = {key: type(value) for key, value in data.items()}
    if types != {"command": str, "profile": str, "seed": int, "trees": dict}:
        return False
    return all(
        isinstance(counts, dict) and all(c is None or type(c) is int for c in counts.values())
        for counts in data["trees"].values()
    )
