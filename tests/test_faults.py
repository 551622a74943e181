"""Every detector has a twin: a seeded fault that must set it off, and the same run without it."""

from __future__ import annotations

import ast
import functools
import multiprocessing
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from conformance import faults
from conformance.faults import (
    DROP,
    FAULTS,
    KERNEL_FAULTS,
    SWAP,
    WILD_FAULTS,
    Edit,
    Fault,
    InapplicableEdit,
    after,
    before,
)
from conformance.kv_faults import KV_FAULTS
from conformance.loop_faults import LOOP_FAULTS
from conformance.sut.source import locate
from generators.exhaustive import Part, traces
from reference.clauses import CLAUSES

OPERATIONS, SEED = 6000, 1
LONGEST = 6  # operations in a shrunk trace

BY_NAME = {fault.name: fault for fault in FAULTS}
_REGISTRIES = (FAULTS, KERNEL_FAULTS, WILD_FAULTS, KV_FAULTS, LOOP_FAULTS)
EVERY = {fault.name: fault for registry in _REGISTRIES for fault in registry}


# -- the registry against real trees --------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """A deviation of a run: its name, mode and trace."""

    name: tuple[str, str]
    mode: str
    trace: tuple[str, ...]
    refusal: str


def run(
    root: Path, fault: Fault, faulty: bool, whole: bool, part: Part | None = None
) -> list[Found]:
    """Check one tree, with the fault or without, until the first deviation or (`whole`) the end.

    By random traces, or by all those of `part`.
    """
    from conformance.engine import capabilities_for, check
    from conformance.sut.device import PlainDevice
    from conformance.sut.surface import open_tree
    from generators import protocol

    device = PlainDevice()
    device.prepare(compiled=False)
    edits = faults.apply(fault.edits) if faulty else {}
    surface = open_tree(root, device, debug=fault.debug, edits=edits)
    assert edits.keys() <= surface.loader.loaded.keys(), "an edited module was never loaded"
    given = None
    if part is not None:
        found_by, _ = traces(part, surface.capabilities, debug=fault.debug, compiled=False)
        given = found_by
    result = check(surface, operations=OPERATIONS, seed=SEED, stop_at_first=not whole, given=given)
    found = []
    for deviation in result.deviations:
        try:
            protocol.check(deviation.trace, capabilities_for(surface, wild=False))
            refusal = ""
        except protocol.IllegalOperation as error:
            refusal = str(error)
        name = (deviation.clause, deviation.anomaly)
        found.append(Found(name, deviation.mode, tuple(deviation.trace.lines()), refusal))
    return found


def in_process(
    fault: Fault, *, faulty: bool, whole: bool = False, part: Part | None = None
) -> list[Found]:
    """:func:`run` in a process forked from one that has loaded torch and nothing of SGLang."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._inductor.config", "triton", "conformance.engine"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        root = locate(fault.release).root
        return pool.submit(run, root, fault, faulty, whole, part).result(timeout=120)


@functools.cache
def twin(release: str, debug: bool) -> list[Found]:
    """What the same run reports on the tree as it is."""
    return in_process(Fault("twin", "", (), ("", ""), release, debug), faulty=False)


@pytest.mark.parametrize("name", BY_NAME)
def test_fault_is_reported_and_only_with_the_fault(name: str) -> None:
    fault = BY_NAME[name]
    assert not twin(fault.release, fault.debug), "the tree deviates without the fault"
    found = in_process(fault, faulty=True)
    assert found, f"{OPERATIONS} operations did not show it: {fault.summary}"
    if found[0].name in fault.also:
        assert 0 < len(found[0].trace) <= LONGEST
        found = [f for f in in_process(fault, faulty=True, whole=True) if f.name == fault.expect]
        assert found, f"it is only reported as {fault.also}"
    (first,) = found
    assert (first.name, first.mode) == (fault.expect, "legal"), first.trace
    assert not first.refusal
    assert 0 < len(first.trace) <= LONGEST, "\n".join(first.trace)


ALGEBRA = Part(rows=3)
OVERLAP = Part(slots=2, requests=3, arrivals=2)
DECODE_SERVER = Part(slots=2, requests=2, arrivals=2, seeded=True)
EXHAUSTIVELY = {
    "filter-reversed": ALGEBRA,
    "filter-one-leaves": ALGEBRA,
    "filter-host-path": ALGEBRA,
    "merge-order-stored": ALGEBRA,
    "merge-mirror-order": ALGEBRA,
    "filter-keeps-the-ended": OVERLAP,
    "absorb-keeps-the-ended": OVERLAP,
    "leave-ignored": OVERLAP,
    "copy-shares-requests": OVERLAP,
    "mixed-lagging-length": OVERLAP,
    "mixed-unpoisoned": OVERLAP,
    "reused-slot-token": OVERLAP,
    "seed-pads": DECODE_SERVER,
    "seed-early": DECODE_SERVER,
}


@pytest.mark.parametrize("name", EXHAUSTIVELY)
def test_what_is_tried_exhaustively_finds_faults_by_itself(name: str) -> None:
    fault = BY_NAME[name]
    found = in_process(fault, faulty=True, part=EXHAUSTIVELY[name])
    assert found, f"not in {EXHAUSTIVELY[name]}: {fault.summary}"
    (first,) = found
    assert first.name in (fault.expect, *fault.also), first.trace
    assert len(first.trace) <= LONGEST


@pytest.mark.parametrize("part", [ALGEBRA, OVERLAP, DECODE_SERVER])
def test_what_is_tried_exhaustively_is_silent_without_a_fault(part: Part) -> None:
    assert not in_process(Fault("twin", "", (), ("", "")), faulty=False, part=part)


@pytest.mark.parametrize("name", EVERY)
def test_every_edit_applies_exactly_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = EVERY[name]
    root = locate(fault.release).root
    applied: Counter[Edit] = Counter()
    replacement = Edit.replacement

    def counting(self: Edit, node: ast.expr | ast.stmt) -> ast.expr | list[ast.stmt]:
        applied[self] += 1
        return replacement(self, node)

    monkeypatch.setattr(Edit, "replacement", counting)
    for module, transform in faults.apply(fault.edits).items():
        source = root.joinpath(*module.split(".")).with_suffix(".py").read_bytes()
        edited = ast.fix_missing_locations(transform(ast.parse(source)))
        assert ast.dump(edited) != ast.dump(ast.parse(source))
        compile(edited, module, "exec")
    assert applied == Counter(fault.edits)
    assert set(applied.values()) == {1}


def test_every_clause_has_a_fault() -> None:
    assert {fault.expect[0] for fault in EVERY.values()} == CLAUSES.keys()


def test_faults_are_told_apart() -> None:
    assert len(BY_NAME) == len(FAULTS)
    assert len(EVERY) == sum(map(len, _REGISTRIES))
    assert len({(fault.release, fault.edits) for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        assert fault.summary.endswith("."), fault.name


# -- edits ----------------------------------------------------------------------------------------

SOURCE = """
class Relay:
    def stash(self, rows, values):
        both = [rows, values]
        self.buf[rows] = values[0]
        if rows:
            self.count += 1
        return self.buf[rows], both

def free():
    return 0
"""


def edited(*edits: Edit) -> str:
    """:data:`SOURCE` with the edits, as text."""
    (transform,) = faults.apply(edits).values()
    tree = ast.fix_missing_locations(transform(ast.parse(SOURCE)))
    compile(tree, "m", "exec")
    return ast.unparse(tree)


def stash(kind: str, ordinal: int, template: str) -> Edit:
    return Edit("m", "Relay.stash", kind, ordinal, template)


@pytest.mark.parametrize(
    ("edit", "old", "new"),
    [
        (stash("Subscript", 1, "{0} + 1"), "= values[0]", "= values[0] + 1"),
        (stash("Subscript", 0, "{1}[{2} - 1]"), "self.buf[rows] =", "self.buf[rows - 1] ="),
        (stash("List", 0, SWAP), "[rows, values]", "[values, rows]"),
        (stash("AugAssign", 0, DROP), "self.count += 1", "pass"),
        (stash("AugAssign", 0, "{1} = 7"), "self.count += 1", "self.count = 7"),
        (
            stash("AugAssign", 0, "while {1}:\n    {0}"),
            "self.count += 1",
            "while self.count:\n                self.count += 1",
        ),
        (stash("AugAssign", 0, before("go()")), "self.count", "go()\n            self.count"),
        (stash("AugAssign", 0, after("go()")), "+= 1", "+= 1\n            go()"),
        (Edit("m", "free", "Constant", 0, "1"), "return 0", "return 1"),
    ],
)
def test_edit_puts_its_template_in_place_of_the_node(edit: Edit, old: str, new: str) -> None:
    plain = ast.unparse(ast.parse(SOURCE))
    assert plain.count(old) == 1
    assert edited(edit) == plain.replace(old, new)


def test_ordinals_are_of_the_unedited_tree_and_edits_may_nest() -> None:
    text = edited(
        stash("Assign", 1, "{0}\n{0}"),
        stash("Subscript", 1, "other[{0}]"),
        stash("Subscript", 2, "last({0})"),
    )
    assert text.count("self.buf[rows] = other[values[0]]") == 2
    assert "return (last(self.buf[rows]), both)" in text


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        (
            (stash("Subscript", 3, "{0}"),),
            "m:Relay.stash has 3 nodes of kind Subscript, so there is no number 3",
        ),
        ((stash("Subscript", -1, "{0}"),), "there is no number -1"),
        ((Edit("m", "Relay.publish", "If", 0, DROP),), "m has no function Relay.publish"),
        ((Edit("m", "Relay", "If", 0, DROP),), "m:Relay is not a function"),
        ((stash("Subscrip", 0, "{0}"),), "Subscrip is no kind of statement or expression"),
        ((stash("List", 0, "{3}"),), "m:Relay.stash List 0: its template asks for part 3 of 2"),
        ((stash("List", 0, "{0"),), "m:Relay.stash List 0: its template is no code"),
        (
            (stash("List", 0, SWAP), stash("List", 0, "{0}")),
            "m:Relay.stash List 0 and m:Relay.stash List 0 replace the same node",
        ),
    ],
)
def test_inapplicable_edit_says_what_is_wrong(edits: tuple[Edit, ...], message: str) -> None:
    with pytest.raises(InapplicableEdit) as error:
        edited(*edits)
    assert message in str(error.value)
