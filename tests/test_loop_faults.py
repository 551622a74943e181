"""Every clause of the loop has a twin: a seeded fault that schedules alone must find, and none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.loop_faults import LOOP_FAULTS
from conformance.pool import Job, Pool
from conformance.sut.source import NEWEST, Tree
from conformance.sut.worker import Config
from generators.schedules import Arrival, Schedule, Server

STEPS, SEED = 600, 1
SLOW = ("L4", "lost-speed")
BY_NAME = {fault.name: fault for fault in LOOP_FAULTS}
REQUESTS, TOKENS = 2, 30  # of a schedule that was made small

TOGETHER = (Arrival(0, 1, 5, 8), Arrival(1, 1, 7, 8))
GIVEN = {
    "alone-published-short": Schedule(Server(rows=2), TOGETHER),
    "synchronous-one-short": Schedule(Server(rows=2), TOGETHER),
}
"""For faults that one way of serving shows and the other does not: a schedule of the other."""


def ask(pool: Pool, root: Path, fault: str | None, request: dict[str, Any]) -> dict[str, Any]:
    (answer,) = pool.run([Job(fault or "none", Config(str(root), fault=fault), request)])
    assert answer.result is not None, answer.error or answer.crash
    return answer.result


def name_of(deviation: dict[str, Any]) -> tuple[str, str]:
    return deviation["clause"], deviation["anomaly"]


def first_of_its_kind() -> Iterator[str]:
    """One fault for every name that is expected."""
    seen = set()
    for name, fault in BY_NAME.items():
        if name not in GIVEN and fault.expect not in seen:
            seen.add(fault.expect)
            yield name


def search(pool: Pool, root: Path, name: str, *, shrinking: bool) -> dict[str, Any]:
    request = {"do": "loop", "steps": STEPS, "seed": SEED, "stop_at_first": True}
    return ask(pool, root, name, {**request, "shrinking": shrinking})


@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in GIVEN])
def test_fault_is_found_by_schedules_alone(name: str, pool: Pool, newest: Tree) -> None:
    fault = BY_NAME[name]
    result = search(pool, newest.root, name, shrinking=False)
    assert {edit.module for edit in fault.edits} <= set(result["surface"]["real"])
    assert result["deviations"], f"{STEPS} steps did not show it: {fault.summary}"
    assert name_of(result["deviations"][0]) in (fault.expect, *fault.also)


@pytest.mark.parametrize("name", list(first_of_its_kind()))
def test_what_is_found_is_made_small(name: str, pool: Pool, newest: Tree) -> None:
    first = search(pool, newest.root, name, shrinking=True)["deviations"][0]
    small = Schedule.from_json(first["trace"])
    assert len(small.requests) <= REQUESTS, small.lines()
    assert sum(request.prompt + request.limit for request in small.requests) < TOKENS
    again = ask(pool, newest.root, name, {"do": "replay", "trace": first["trace"]})["deviation"]
    assert name_of(again) == name_of(first)


@pytest.mark.parametrize("name", GIVEN)
def test_fault_of_one_way_of_serving_shows_beside_the_other(
    name: str, pool: Pool, newest: Tree
) -> None:
    request = {"do": "replay", "trace": GIVEN[name].as_json()}
    deviation = ask(pool, newest.root, name, request)["deviation"]
    assert name_of(deviation) == BY_NAME[name].expect
    assert ask(pool, newest.root, None, request)["deviation"] is None


def test_the_tree_is_silent_without_a_fault(pool: Pool, newest: Tree) -> None:
    request = {"do": "loop", "steps": STEPS, "seed": SEED}
    assert not ask(pool, newest.root, None, request)["deviations"]


@pytest.mark.parametrize("name", [f.name for f in LOOP_FAULTS if f.expect == SLOW])
def test_lost_speed_leaves_the_text_right(name: str, pool: Pool, newest: Tree) -> None:
    request = {"do": "loop", "steps": 100, "seed": SEED, "shrinking": False}
    found = {name_of(d) for d in ask(pool, newest.root, name, request)["deviations"]}
    # A draft that has lost its way is sometimes lucky.
    assert SLOW in found
    assert found <= {SLOW, ("L4", "wrong-value")}


def test_faults_are_spread_over_what_the_loop_runs() -> None:
    modules = {edit.module for fault in LOOP_FAULTS for edit in fault.edits}
    for part in ("dflash_worker_v2", "scheduler", "overlap_utils", "ops.speculative.dflash"):
        assert any(module.endswith(part) for module in modules), part
    assert len(LOOP_FAULTS) >= 15
    assert sum(fault.expect == SLOW for fault in LOOP_FAULTS) >= 5
    assert {fault.expect[0] for fault in LOOP_FAULTS} == {"L1", "L2", "L3", "L4", "K5"}
    assert all(fault.release == NEWEST for fault in LOOP_FAULTS)
    assert all(fault.summary.endswith(".") for fault in LOOP_FAULTS)
