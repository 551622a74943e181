"""Every detector of the KV clauses has a twin: a seeded fault that must set it off, and none."""

from __future__ import annotations

import functools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from conformance import faults, waivers
from conformance.difference import Cover
from conformance.faults import FAULTS, KERNEL_FAULTS, WILD_FAULTS, Edit
from conformance.kv_faults import KV_FAULTS
from conformance.sut.source import NEWEST, locate
from conformance.waivers import Waiver

OPERATIONS, SEED = 3000, 1
SILENT = 1000  # operations that must show nothing where nothing is to be shown
LONGEST = 6  # operations in a shrunk trace

BY_NAME = {fault.name: fault for fault in KV_FAULTS}
KV_CLAUSES = {"K1", "K2", "K3", "K4", "K5", "K6", "K7", "K8", "K9"}

Name = tuple[str, str]


@dataclass(frozen=True)
class Found:
    """A deviation without a waiver: its name, mode and trace, and what would waive it."""

    name: Name
    mode: str
    trace: tuple[str, ...]
    refusal: str
    covered: tuple[str, ...]


def on_pools() -> list[Waiver]:
    """The packaged waivers whose witness has a KV pool."""
    traced = [w for w in waivers.load() if "operations" in w.trace]
    return [w for w in traced if w.trace["header"]["kv_tokens"]]


def cover(waiver: Waiver) -> Cover:
    return Cover(waiver.name, waiver.clause, waiver.anomaly, waiver.where)


def run(
    root: Path,
    edits: tuple[Edit, ...],
    covers: tuple[str, ...],
    operations: int,
    until: Name | None,
) -> list[Found]:
    """Check one tree on KV pools until the first deviation, or the first one named `until`."""
    from conformance.engine import capabilities_for, check, minimize
    from conformance.sut.device import PlainDevice
    from conformance.sut.surface import open_tree
    from generators import protocol
    from generators.operations import Trace
    from generators.strategies import Enough, generate, traces

    device = PlainDevice()
    device.prepare(compiled=False)
    applied = faults.apply(edits)
    surface = open_tree(root, device, debug=False, edits=applied)
    capabilities = capabilities_for(surface, wild=False)
    waived = tuple(cover(waiver) for waiver in on_pools() if waiver.name in covers)
    deviations = []
    if until is None:
        deviations = check(
            surface,
            operations=operations,
            seed=SEED,
            waived=waived,
            stop_at_first=True,
            kv_pool=True,
        ).deviations
    else:
        played = 0

        def consume(trace: Trace) -> None:
            """The same traces, one by one: what has another name is not made small."""
            nonlocal played
            result = check(
                surface, operations=0, seed=0, waived=waived, given=[trace], shrinking=False
            )
            played += result.operations
            for found in result.deviations:
                if found.waiver is None and (found.clause, found.anomaly) == until:
                    last = len(found.trace.operations) - 1
                    small = minimize(surface, found.trace, last, found.difference, capabilities)
                    deviations.append(small)
                    raise Enough
            if played >= operations:
                raise Enough

        generate(traces(capabilities, debug=False, kv_pool=True), SEED, consume)
    loaded = {module.partition(":")[0] for module in surface.loader.loaded}
    assert applied.keys() <= loaded, "an edited module was never loaded"
    found = []
    for deviation in deviations:
        if deviation.waiver is not None:
            continue
        try:
            protocol.check(deviation.trace, capabilities)
            refusal = ""
        except protocol.IllegalOperation as error:
            refusal = str(error)
        header = deviation.trace.header
        found.append(
            Found(
                (deviation.clause, deviation.anomaly),
                deviation.mode,
                tuple(deviation.trace.lines()),
                refusal,
                tuple(c.name for c in waived if c.covers(deviation.difference, header)),
            )
        )
    return found


def witnessed(root: Path) -> tuple[str, ...]:
    """Names of the waivers whose witness shows on a tree exactly what they cover."""
    from conformance.engine import replay_one
    from conformance.sut.device import PlainDevice
    from conformance.sut.surface import open_tree
    from generators.operations import Trace

    device = PlainDevice()
    device.prepare(compiled=False)
    surface = open_tree(root, device, debug=False)
    names = []
    for waiver in on_pools():
        shown = replay_one(surface, Trace.from_json(waiver.trace))
        if shown is not None and (shown.clause, shown.anomaly) == (waiver.clause, waiver.anomaly):
            names.append(waiver.name)
    return tuple(names)


def forked() -> ProcessPoolExecutor:
    """A process forked from one that has loaded torch and nothing of SGLang."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._inductor.config", "triton", "conformance.engine"])
    return ProcessPoolExecutor(1, mp_context=context)


@functools.cache
def active() -> tuple[str, ...]:
    """Waivers that cover something on the newest release as it is."""
    with forked() as pool:
        return pool.submit(witnessed, locate(NEWEST).root).result(timeout=120)


@functools.cache
def in_process(
    edits: tuple[Edit, ...] = (),
    *,
    without: Name = ("", ""),
    operations: int = OPERATIONS,
    until: Name | None = None,
) -> list[Found]:
    """:func:`run` in a process of its own; what is named `without` is not waived."""
    covers = tuple(
        w.name for w in on_pools() if w.name in active() and (w.clause, w.anomaly) != without
    )
    with forked() as pool:
        submitted = pool.submit(run, locate(NEWEST).root, edits, covers, operations, until)
        return submitted.result(timeout=300)


@pytest.mark.parametrize("name", [name for name, fault in BY_NAME.items() if not fault.mends])
def test_fault_is_reported_and_only_with_the_fault(name: str) -> None:
    fault = BY_NAME[name]
    assert not in_process(operations=SILENT), "the tree deviates without the fault"
    found = in_process(fault.edits)
    assert found, f"{OPERATIONS} operations did not show it: {fault.summary}"
    if found[0].name in fault.also:
        assert 0 < len(found[0].trace) <= LONGEST
        found = in_process(fault.edits, until=fault.expect)
        assert found, f"it is only reported as {fault.also}"
    (first,) = found
    assert (first.name, first.mode) == (fault.expect, "legal"), first.trace
    assert not first.refusal
    assert not first.covered, "its trace shows what the tree shows without the fault"
    assert 0 < len(first.trace) <= LONGEST, "\n".join(first.trace)


@pytest.mark.parametrize("name", [name for name, fault in BY_NAME.items() if fault.mends])
def test_what_is_waived_is_reported_until_it_is_mended(name: str) -> None:
    fault = BY_NAME[name]
    (first,) = in_process(without=fault.expect, operations=SILENT)
    assert (first.name, first.mode, first.refusal) == (fault.expect, "legal", ""), first.trace
    assert 0 < len(first.trace) <= LONGEST, "\n".join(first.trace)
    assert not in_process(fault.edits, without=fault.expect, operations=SILENT)


def test_every_kv_clause_has_a_fault() -> None:
    assert {fault.expect[0] for fault in KV_FAULTS} == KV_CLAUSES


def test_faults_are_told_apart() -> None:
    assert len(BY_NAME) == len(KV_FAULTS)
    assert len({fault.edits for fault in KV_FAULTS}) == len(KV_FAULTS)
    others = {fault.name for fault in (*FAULTS, *KERNEL_FAULTS, *WILD_FAULTS)}
    assert not others & BY_NAME.keys()
    for fault in KV_FAULTS:
        assert fault.release == NEWEST, fault.name
        assert fault.summary.endswith("."), fault.name
