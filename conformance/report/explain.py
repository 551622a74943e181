"""Put a deviation into words: clause, trace, what was expected, what was seen, how to replay."""

from __future__ import annotations

from typing import Any

from conformance.anomalies import ANOMALIES
from generators.operations import Trace
from generators.schedules import Schedule
from reference.clauses import CLAUSES

_MOST_ROWS = 6


def headline(deviation: dict[str, Any]) -> str:
    """One line: what deviates, and how serious it is."""
    kind = "deviation" if deviation["mode"] == "legal" else "contract gap (wild use)"
    waived = f", waived: {deviation['waiver']}" if deviation["waiver"] else ""
    return f"{deviation['clause']} {deviation['anomaly']}: {kind}{waived}"


def lines(deviation: dict[str, Any], *, replay: str | None = None) -> list[str]:
    """The whole failure, a handful of lines; `replay` is the command that shows it again."""
    difference = deviation["difference"]
    clause = CLAUSES[deviation["clause"]]
    statement = clause.wild if difference["call"] in clause.wild_calls else clause.statement
    text = [
        f"{clause.number}: {statement}",
        f"  {deviation['anomaly']}: {ANOMALIES[deviation['anomaly']]}",
        *_input(deviation),
        f"  at {_place(deviation)}call {difference['call']}, {difference['aspect']}:",
        f"    expected  {difference['expected']}",
        f"    observed  {difference['observed']}",
    ]
    rows = difference["rows"]
    for row in rows[:_MOST_ROWS]:
        wrote = f", written by {row['observed_writer']}" if row["observed_writer"] else ""
        meant = f" ({row['expected_writer']})" if row["expected_writer"] else ""
        whose = row["request"] or ("nobody" if _is_trace(deviation) else "")
        text.append(
            f"    row {row['row']}{f' ({whose})' if whose else ''}: expected "
            f"{row['expected']}{meant}, observed {row['observed']}{wrote}"
        )
    if len(rows) > _MOST_ROWS:
        text.append(f"    and {len(rows) - _MOST_ROWS} rows more")
    text += [f"    {line}" for line in _to_declare(difference)]
    if replay is not None:
        text.append(f"  replay: {replay}")
    return text


def _to_declare(difference: dict[str, Any]) -> list[str]:
    """The records that would tell the census what is undeclared."""
    records = [entry.split() for entry in difference.get("declare", ())]
    if not records:
        return []
    return [
        "decide what each is, and add its record to conformance/sut/fields.py",
        *(f'  Field("{owner}", "{name}", "{kind}"),' for owner, name, kind in records),
        "(the kind is a guess; the kinds are listed there), or to a file for --declare:",
        *(
            f"  {line}"
            for owner, name, kind in records
            for line in (
                "[[field]]",
                f'owner = "{owner}"',
                f'name = "{name}"',
                f'kind = "{kind}"',
            )
        ),
    ]


def _input(deviation: dict[str, Any]) -> list[str]:
    """What shows the deviation: a trace of the relay, a schedule, or a kernel's arguments."""
    if deviation["trace"] is not None:
        trace = deviation["trace"]
        known = Trace.from_json(trace) if _is_trace(deviation) else Schedule.from_json(trace)
        return [
            f"  {'trace' if _is_trace(deviation) else 'schedule'} ({known.header.line()})",
            *(f"    {line}" for line in known.lines()),
        ]
    arguments = deviation["arguments"].items()
    return [
        f"  case ({deviation['line']})",
        *(f"    {name} = {value}" for name, value in arguments),
    ]


def _place(deviation: dict[str, Any]) -> str:
    return "the last operation, " if _is_trace(deviation) else ""


def _is_trace(deviation: dict[str, Any]) -> bool:
    return deviation["trace"] is not None and "operations" in deviation["trace"]


def exhaustive(tree: dict[str, Any]) -> list[str]:
    """What was tried exhaustively, one line each, with its bound."""
    lines = []
    for size in tree["exhaustive"]:
        debug = "on" if size["debug"] else "off"
        head = f"{size['what']} ({size['setting']}, debug {debug}): "
        if size["what"] == "algebra":
            bound = f"every instance of every law for up to {size['rows']} rows"
        else:
            bound = (
                f"{size['slots']} slots, {size['requests']} requests, up to {size['arrivals']} "
                f"arrivals at once: all {size['states']:,} states, {size['operations']:,} "
                f"operations out of them, {size['pairs']:,} pairs of operations"
            )
        played = f", in {size['traces']:,} traces of {size['played']:,} operations"
        short = "" if size["complete"] else "; deviations cut some short, so not all of it was seen"
        lines.append(head + bound + played + short)
    return lines
