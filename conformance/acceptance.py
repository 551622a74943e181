"""Records that accept a change of behaviour: what changed, why, until when.

A TOML file of ``[[accept]]`` tables with ``changes`` (the lines of the changes, exactly as a gate
prints them), ``link``, ``reason`` and ``expires``. A record never covers a deviation from the
specification; for those there are waivers (:mod:`conformance.waivers`).
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

from conformance.errors import UserError
from conformance.tables import read_tables

_TEXT = ("link", "reason")


@dataclass(frozen=True)
class Acceptance:
    """Changes that were decided together.

    Attributes:
        changes: their lines in a gate's report.
        link: the pull request or discussion that decided it.
        reason: why it is right.
        expires: the day from which the change counts again.
        expired: whether that day has come.
    """

    changes: tuple[str, ...]
    link: str
    reason: str
    expires: datetime.date
    expired: bool = False


def load(path: Path, *, today: datetime.date | None = None) -> list[Acceptance]:
    """The records of a file, expired ones marked.

    Raises:
        UserError: the file is missing or malformed, in one line.
    """
    today = today or datetime.date.today()
    tables = read_tables(path, "accept", "acceptance file")
    records = []
    for number, table in enumerate(tables, 1):
        where = f"acceptance file {path}: record {number}"
        for key in _TEXT:
            if not isinstance(table.get(key), str) or not table[key].strip():
                raise UserError(f"{where}: '{key}' is missing or not a text")
        lines = table.get("changes")
        if not isinstance(lines, list) or not lines or not all(isinstance(x, str) for x in lines):
            raise UserError(f"{where}: 'changes' must be a list of lines that a gate printed")
        unknown = sorted(table.keys() - {*_TEXT, "changes", "expires"})
        if unknown:
            raise UserError(f"{where}: '{unknown[0]}' is not known")
        expires = table.get("expires")
        if type(expires) is not datetime.date:
            raise UserError(f"{where}: 'expires' must be a date such as 2027-01-31")
        texts = {key: table[key].strip() for key in _TEXT}
        records.append(Acceptance(tuple(lines), **texts, expires=expires, expired=expires <= today))
    return records
