"""Every kernel detector has a twin: a seeded fault that must set it off, and the true kernel."""

from __future__ import annotations

import functools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from conformance import faults
from conformance.faults import KERNEL_FAULTS, Edit, Fault
from conformance.sut.source import NEWEST, locate

SMALL = 8  # columns of a case made small
KERNEL_CLAUSES = {"B1", "B2", "B3", "B4", "B5", "B6", "B7", "B8", "B10"}
BY_NAME = {fault.name: fault for fault in KERNEL_FAULTS}


Name = tuple[str, str]


def run(
    root: Path, kernel: str, edits: tuple[Edit, ...], until: Name | None
) -> list[dict[str, Any]]:
    """What the list shows of one kernel, at most until there is a deviation of that name."""
    from conformance.kernels.session import Kernels
    from conformance.sut.device import PlainDevice
    from conformance.sut.surface import open_tree

    device = PlainDevice()
    device.prepare(compiled=False)
    surface = open_tree(root, device, debug=False, edits=faults.apply(edits))
    return Kernels(surface).check(kernel, until=until).deviations


def in_process(
    kernel: str, edits: tuple[Edit, ...] = (), until: Name | None = None
) -> list[dict[str, Any]]:
    """:func:`run` in a process forked from one that has loaded torch and nothing of SGLang."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._inductor.config", "triton", "conformance.engine"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(run, locate(NEWEST).root, kernel, edits, until).result(timeout=120)


twin = functools.cache(in_process)


def named(deviation: dict[str, Any]) -> Name:
    return deviation["clause"], deviation["anomaly"]


@pytest.mark.parametrize("name", BY_NAME)
def test_fault_is_reported_and_only_with_the_fault(name: str) -> None:
    fault: Fault = BY_NAME[name]
    assert not twin(fault.kernel), "the kernel deviates without the fault"
    found = in_process(fault.kernel, fault.edits, fault.expect)
    assert fault.expect in map(named, found), [(named(d), d["line"]) for d in found]
    deviation = next(d for d in found if named(d) == fault.expect)
    assert deviation["mode"] == "legal"
    # A layout that a wrapper may refuse is tried on three rows and not made smaller.
    assert deviation["case"]["batch"] <= 2 + bool(deviation["case"]["misuse"]), deviation["line"]
    # A fault of a second column block takes a row that has one.
    assert deviation["case"]["block"] <= SMALL or fault.kernel == "gather", deviation["line"]


def test_every_kernel_clause_has_a_fault() -> None:
    assert {fault.expect[0] for fault in KERNEL_FAULTS} == KERNEL_CLAUSES


def test_faults_are_told_apart() -> None:
    assert len(BY_NAME) == len(KERNEL_FAULTS)
    assert len({fault.edits for fault in KERNEL_FAULTS}) == len(KERNEL_FAULTS)
    for fault in KERNEL_FAULTS:
        assert fault.summary.endswith("."), fault.name
