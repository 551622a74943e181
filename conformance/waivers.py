"""Known deviations of real trees, each with a witness trace that must reproduce it.

A waiver applies to any tree on which its witness reproduces exactly its clause and anomaly; the
version range it names is documentation. Strictness comes from the witnesses, which every run
replays, never from what the random search happened to find.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from conformance.errors import UserError
from conformance.tables import read_tables
from generators.operations import Header, Trace, TraceError
from generators.schedules import Server, schedule_in
from reference.clauses import CLAUSES

PACKAGED = Path(__file__).with_name("waivers.toml")
_SETTINGS = {"int": re.compile(r">?\d{1,9}"), "bool": re.compile("true|false")}
"""How the settings of a trace are given, by their type."""

_TEXT = ("name", "clause", "anomaly", "witness", "link", "reason", "effect", "releases")


@dataclass(frozen=True)
class Waiver:
    """One accepted deviation.

    Attributes:
        name: short and stable.
        clause, anomaly: exactly what the witness must reproduce.
        trace: the witness, a trace or a schedule, as JSON; empty if it is a kernel case.
        link: where upstream was told, or what public report shows it.
        reason: why it is accepted for now.
        effect: what users of an affected tree would see.
        releases: where it was seen; documentation only.
        expires: the day from which the deviation counts again.
        where: settings of the traces that it is for, such as ``{"page": "1", "block": ">8"}``.
        case: the witness, if it is a kernel case.
    """

    name: str
    clause: str
    anomaly: str
    trace: dict[str, Any]
    link: str
    reason: str
    effect: str
    releases: str
    expires: datetime.date
    where: dict[str, str] = field(default_factory=dict)
    case: dict[str, Any] | None = None

    def request(self) -> dict[str, Any]:
        """What a worker needs of it."""
        kept = ("name", "clause", "anomaly", "where", "trace", "case")
        return {key: value for key, value in asdict(self).items() if key in kept}


def load(path: Path = PACKAGED, *, today: datetime.date | None = None) -> list[Waiver]:
    """Waivers of a TOML file (``[[waiver]]`` tables), expired ones left out.

    Raises:
        UserError: the file or a witness is missing or malformed, in one line.
    """
    today = today or datetime.date.today()
    waivers = [_read(table, path) for table in read_tables(path, "waiver", "waiver file")]
    return [waiver for waiver in waivers if waiver.expires > today]


def _read(table: dict[str, Any], path: Path) -> Waiver:
    where = f"waiver file {path}: waiver {table.get('name', '(without name)')!r}"
    for key in _TEXT:
        if not isinstance(table.get(key), str) or not table[key].strip():
            raise UserError(f"{where}: '{key}' is missing or not a text")
    if table["clause"] not in CLAUSES:
        raise UserError(f"{where}: there is no clause {table['clause']!r}")
    if type(table.get("expires")) is not datetime.date:
        raise UserError(f"{where}: 'expires' must be a date such as 2027-01-31")
    witness = path.parent / table["witness"]
    trace: dict[str, Any] = {}
    try:
        text = witness.read_text(encoding="utf-8")
        case = case_in(text)
        if case is None:
            trace = (schedule_in(text) or Trace.loads(text)).as_json()
    except OSError as error:
        raise UserError(f"{where}: witness {witness}: {error.strerror}") from None
    except TraceError as error:
        raise UserError(f"{where}: witness {witness}: {error}") from None
    values = {key: table[key] for key in _TEXT if key != "witness"}
    settings = table.get("where", {})
    kinds = {
        f.name: _SETTINGS.get(str(f.type))
        for f in (*dataclasses.fields(Server), *dataclasses.fields(Header))
    }
    for name, text in settings.items() if isinstance(settings, dict) else [("where", None)]:
        pattern = kinds.get(name)
        if pattern is None or not isinstance(text, str) or not pattern.fullmatch(text):
            raise UserError(
                f"{where}: 'where' must give settings of a trace as text, such as "
                'page = "1", block = ">8" or overlap = "true"'
            )
    return Waiver(**values, trace=trace, expires=table["expires"], where=settings, case=case)


def case_in(text: str) -> dict[str, Any] | None:
    """The kernel case of a witness or failure file, or None if it has none."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    case = data.get("case") if isinstance(data, dict) else None
    return case if isinstance(case, dict) else None
