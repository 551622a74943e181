"""A waiver may say for which settings of a trace it is: how that is read, asked and told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conformance import waivers
from conformance.difference import Cover, Difference, holds
from conformance.errors import UserError
from conformance.report import files
from conformance.runner import TreeReport, settle
from conformance.sut.source import Tree
from generators.operations import Admit, Adopt, Header, Step, Trace
from generators.schedules import Schedule

TABLE = """
[[waiver]]
name = "known"
clause = "K2"
anomaly = "overrun"
witness = "witness.json"
link = "https://example.org/1"
releases = "all"
reason = "r"
effect = "e"
expires = 2999-01-01
"""


def read(folder: Path, where: str) -> waivers.Waiver:
    """The waiver of a file with that text behind its other fields."""
    trace = Trace(Header(kv_tokens=99, context=24), (Admit(((0, 1, 5),)), Adopt(), Step((0,))))
    folder.joinpath("witness.json").write_text(json.dumps(trace.as_json()))
    path = folder / "waivers.toml"
    path.write_text(TABLE + where)
    (waiver,) = waivers.load(path)
    return waiver


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", {}),
        ("where = {}", {}),
        ('where = { page = "1", block = ">8" }', {"page": "1", "block": ">8"}),
        ('where = { overlap = "false" }', {"overlap": "false"}),
    ],
)
def test_a_waiver_is_for_the_settings_that_it_names(
    tmp_path: Path, text: str, where: dict[str, str]
) -> None:
    waiver = read(tmp_path, text)
    assert waiver.where == where
    assert waiver.request()["where"] == where


@pytest.mark.parametrize(
    "text",
    [
        'where = { size = "1" }',
        "where = { page = 1 }",
        "where = { overlap = false }",
        'where = { page = "" }',
        'where = { page = "> 1" }',
        'where = { page = ">=1" }',
        'where = { page = "1 or 2" }',
        'where = { block = ">x" }',
        'where = { page = "1", context = ["24"] }',
        'where = "page 1"',
        'where = ["page"]',
        "where = 1",
    ],
)
def test_settings_that_no_trace_has_are_refused_in_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError) as error:
        read(tmp_path, text)
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith(f"waiver file {tmp_path / 'waivers.toml'}: waiver 'known': 'where' ")
    assert 'such as page = "1", block = ">8" or overlap' in message


def test_packaged_waivers_tell_the_paged_row_from_the_other() -> None:
    where = {waiver.name: waiver.where for waiver in waivers.load() if waiver.where}
    assert where == {
        "reserve-beyond-row": {"page": "1", "block": ">7"},
        "reserve-beyond-row-paged": {"page": ">1", "block": ">7"},
    }
    for waiver in waivers.load():
        if waiver.case is None:
            served = "requests" in waiver.trace
            known = Schedule.from_json(waiver.trace) if served else Trace.from_json(waiver.trace)
            header = known.header
            difference = Difference(waiver.clause, waiver.anomaly, "", "", "", "")
            cover = Cover(waiver.name, waiver.clause, waiver.anomaly, waiver.where)
            assert cover.covers(difference, header), f"the witness of {waiver.name} is another's"


# -- what a waiver covers -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value", "said"),
    [
        ("1", 1, True),
        ("1", 16, False),
        ("16", 1, False),
        (">8", 8, False),
        (">8", 9, True),
        (">8", 16, True),
        (">8", 1, False),
        ("True", True, True),
        ("True", False, False),
        (">0", True, True),
        ("DFLASH", "DFLASH", True),
    ],
)
def test_a_setting_is_a_value_or_above_one(text: str, value: Any, said: bool) -> None:
    assert holds(text, value) is said


def overrun(clause: str = "K2", anomaly: str = "overrun") -> Difference:
    return Difference(clause, anomaly, "prepare", "reserved", "<= 29", "33")


@pytest.mark.parametrize(
    ("page", "block", "covered"),
    [(1, 16, True), (1, 9, True), (1, 8, False), (16, 16, False), (16, 8, False)],
)
def test_a_cover_is_for_the_traces_whose_settings_all_hold(
    page: int, block: int, covered: bool
) -> None:
    cover = Cover("w", "K2", "overrun", {"page": "1", "block": ">8"})
    header = Header(page=page, block=block)
    assert cover.covers(overrun(), header) is covered
    assert Cover("w", "K2", "overrun").covers(overrun(), header)
    assert not cover.covers(overrun("K1"), header)
    assert not cover.covers(overrun("K2", "wrong-value"), header)


# -- what a report says of it ---------------------------------------------------------------------


def deviation(waiver: str | None, *, count: int = 1, length: int = 3, **named: str) -> Any:
    """A deviation as a job's answer has it; its trace has so many operations."""
    name = {"clause": "K2", "anomaly": "overrun", "mode": "legal", **named}
    return {**name, "waiver": waiver, "count": count, "trace": {"operations": [{}] * length}}


def settled(states: dict[str, str], *deviations: Any) -> list[tuple[str | None, int, int]]:
    """What is left of the deviations: waiver, count and length of the trace."""
    report = TreeReport(Tree("t", Path("t"), "checkout"))
    report.waivers, report.deviations = states, list(deviations)
    settle(report)
    return [(d["waiver"], d["count"], len(d["trace"]["operations"])) for d in report.deviations]


def test_what_an_active_waiver_covers_stays_apart() -> None:
    found = [deviation("known", count=4, length=2), deviation(None, count=2)]
    assert settled({"known": "active"}, *found) == [("known", 4, 2), (None, 2, 3)]


@pytest.mark.parametrize("states", [{}, {"known": "stale"}, {"other": "active"}])
def test_what_no_active_waiver_covers_counts_with_the_others(states: dict[str, str]) -> None:
    found = [deviation("known", count=4, length=2), deviation(None, count=2)]
    assert settled(states, *found) == [(None, 6, 2)]
    assert settled(states, *reversed(found)) == [(None, 6, 2)]
    assert settled(states, found[0]) == [(None, 4, 2)]


def test_only_deviations_of_one_name_merge() -> None:
    found = [
        deviation("one", count=1),
        deviation("two", count=2),
        deviation(None, count=4, clause="K1"),
        deviation("one", count=8, anomaly="wrong-value"),
        deviation("two", count=16, mode="wild"),
    ]
    assert settled({"two": "active"}, *found) == [
        *((None, 1, 3), ("two", 2, 3), (None, 4, 3), (None, 8, 3), ("two", 16, 3)),
    ]
    assert [count for _, count, _ in settled({}, *found)] == [3, 4, 8, 16]


def test_what_is_waived_and_what_is_not_have_files_of_their_own() -> None:
    waived = {"tree": "0.5.23", "clause": "K2", "anomaly": "overrun", "mode": "legal"}
    names = {files.stem({**waived, "waiver": waiver}) for waiver in (None, "one", "other")}
    assert names == {"0.5.23-K2-overrun", "0.5.23-K2-overrun-one", "0.5.23-K2-overrun-other"}
