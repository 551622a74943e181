"""Wild uses: each is reached and judged, and has a twin, an edit that opens or closes a gap."""

from __future__ import annotations

import functools
import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from conformance import faults
from conformance.faults import WILD_FAULTS, Edit
from conformance.sut.source import NEWEST, SUPPORTED, locate
from generators.operations import WILD_USES, Admit, Adopt, Header, Operation, Step, Trace, Wild
from generators.protocol import Capabilities, State, apply, refusal
from reference.clauses import CLAUSES

ROOT = Path(__file__).parent.parent
OLDEST = SUPPORTED[0]
PAIR = (Admit(((0, 1, 40), (1, 2, 16440))), Adopt(), Step((1, 0)))
"""Two requests that have decoded once."""

Outcomes = dict[str, set[str]]
"""What each wild use came to."""

ALWAYS = {
    "merge-raw-idle-left": "I2 missing-row",
    "mirror-right-only": "M4 missing-error",
    "stored-with-relayed": "M7 missing-error",
}
"""Contract gaps of every release."""


def run(root: Path, debug: bool, edits: tuple[Edit, ...], overlap: bool) -> Outcomes:
    from conformance.engine import check
    from conformance.sut.device import PlainDevice
    from conformance.sut.surface import open_tree

    device = PlainDevice()
    device.prepare(compiled=False)
    surface = open_tree(root, device, debug=debug, edits=faults.apply(edits))
    bits = surface.capabilities.token_bits
    header = Header(debug=debug, overlap=overlap, token_bits=bits)
    given = [Trace(header, (*PAIR, Wild(use))) for use in WILD_USES]
    result = check(surface, operations=0, seed=0, given=given)
    assert {deviation.mode for deviation in result.deviations} <= {"wild"}
    outcomes: Outcomes = {}
    for key in result.reached:
        if found := re.fullmatch("outcome wild-(.+?): (.+)", key):
            outcomes.setdefault(found[1], set()).add(found[2])
    return outcomes


@functools.cache
def outcomes_of(
    release: str, debug: bool = False, edits: tuple[Edit, ...] = (), overlap: bool = True
) -> Outcomes:
    """:func:`run` in a process forked from one that has loaded torch and nothing of SGLang."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._inductor.config", "triton", "conformance.engine"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        root = locate(release).root
        return pool.submit(run, root, debug, edits, overlap).result(timeout=120)


def is_gap(verdict: str) -> bool:
    return verdict != "right" and not verdict.startswith("refused (")


@pytest.mark.parametrize("overlap", [True, False], ids=["relayed", "synchronous"])
@pytest.mark.parametrize("debug", [False, True], ids=["debug off", "debug on"])
@pytest.mark.parametrize("release", [OLDEST, NEWEST])
def test_every_use_is_reached_and_judged(release: str, debug: bool, overlap: bool) -> None:
    outcomes = outcomes_of(release, debug, overlap=overlap)
    assert outcomes.keys() == WILD_USES.keys()
    known = dict(ALWAYS)
    if release == NEWEST:
        known["resolve-without-indices"] = "I4 unexpected-error"
    if not debug:
        known["resolve-unwritten"] = "R6 missing-error"
    gaps = {use: found for use, found in outcomes.items() if any(map(is_gap, found))}
    assert gaps == {use: {gap} for use, gap in known.items()}
    assert outcomes["filter-out-of-range"] == {"refused (IndexError)"}
    assert outcomes["prepare-twice"] == outcomes["padding"] == {"right"}


@pytest.mark.parametrize("fault", WILD_FAULTS, ids=lambda fault: fault.name)
def test_twin_opens_or_closes_the_gap(fault: faults.Fault) -> None:
    use = fault.name.removeprefix("wild-")
    gap = " ".join(fault.expect)
    plain, edited = (outcomes_of(fault.release, edits=edits)[use] for edits in ((), fault.edits))
    closed, opened = (edited, plain) if fault.mends else (plain, edited)
    assert gap in opened
    assert not any(map(is_gap, closed))


def test_every_use_has_a_clause_and_a_twin() -> None:
    calls = [call for clause in CLAUSES.values() for call in clause.wild_calls]
    assert sorted(f"wild-{use}" for use in WILD_USES) == sorted(
        call for call in calls if call.startswith("wild-")
    )
    clause_of = {call: c.number for c in CLAUSES.values() for call in c.wild_calls}
    assert {fault.name: fault.expect[0] for fault in WILD_FAULTS} == {
        f"wild-{use}": clause_of[f"wild-{use}"] for use in WILD_USES
    }


def state_after(*operations: Operation, debug: bool = False) -> State:
    state = State(Header(debug=debug))
    for operation in operations:
        apply(state, operation)
    return state


def test_a_use_is_refused_where_it_cannot_be_done() -> None:
    fragile = Capabilities(survives_assertion=False)
    one = state_after(Admit(((0, 1, 40),)), Adopt())
    assert refusal(one, Wild("permuted-indices"), Capabilities()) == "it takes 2 rows"
    assert refusal(state_after(*PAIR), Wild("permuted-indices"), fragile) is None
    lost = "a failed assertion ends the process"
    assert refusal(one, Wild("filter-out-of-range"), fragile) == lost
    assert refusal(one, Wild("resolve-unwritten"), fragile) is None
    debug = state_after(*PAIR, debug=True)
    assert refusal(debug, Wild("resolve-unwritten"), fragile) == lost
    assert refusal(debug, Wild("resolve-unwritten"), Capabilities()) is None
    assert "no wild use" in (refusal(one, Wild("merge"), fragile) or "")


def test_the_page_of_contract_gaps_names_every_use_and_release() -> None:
    page = ROOT.joinpath("docs", "contract-gaps.md").read_text(encoding="utf-8")
    table = [line for line in page.splitlines() if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert header == ["use", *SUPPORTED]
    assert [row[0] for row in rows] == list(WILD_USES)
    assert all(len(row) == len(header) and all(row) for row in rows)
    assert re.findall("^### (.+)$", page, re.MULTILINE)[: len(WILD_USES)] == list(WILD_USES)
