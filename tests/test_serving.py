"""The engine of the loop, on loops whose services are made by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from test_loop_checks import SCHEDULE, served

from conformance import serving
from conformance.difference import Cover
from conformance.sut.host_request import HarnessGap
from conformance.sut.loop import Service
from generators.schedules import Schedule

PAST_END = Cover("known", "L1", "past-end")


class Loops:
    """Stands for loops; `change` is done to what those with the other settings make of it."""

    def __init__(self, change: Callable[[Service], None], which: str = "other loop") -> None:
        self.change, self.which, self.made = change, which, 0

    def __call__(self, surface: Any, schedule: Schedule) -> Any:
        self.made += 1
        self.schedule = schedule
        return self

    def run(self) -> Service:
        service = served(self.schedule)
        alone = len(self.schedule.requests) == 1
        way = "alone" if alone else "first" if self.schedule.header.overlap else "other loop"
        if way == self.which:
            self.change(service)
        return service


def goes_on(service: Service) -> None:
    """The last request's output has a token too many."""
    service.outputs[1] = [*service.outputs[1], 9]


def found(
    monkeypatch: pytest.MonkeyPatch, loops: Any, waived: tuple[Cover, ...] = ()
) -> list[tuple[str, str]]:
    monkeypatch.setattr(serving, "Loop", loops)
    differences = serving.differences(
        None,  # type: ignore[arg-type]
        SCHEDULE,
        serving.Outcome(),
        compared=True,
        waived=waived,
    )
    return [(difference.clause, difference.anomaly) for difference in differences]


@pytest.mark.parametrize(("which", "clause"), [("other loop", "L3"), ("alone", "L2")])
def test_ways_of_serving_are_compared_and_judged(
    monkeypatch: pytest.MonkeyPatch, which: str, clause: str
) -> None:
    loops = Loops(goes_on, which)
    assert found(monkeypatch, loops) == [(clause, "wrong-value"), ("L1", "past-end")]
    assert loops.made == 3


@pytest.mark.parametrize("which", ["first", "other loop", "alone"])
def test_a_waived_output_is_no_difference_between_ways_of_serving(
    monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    told = found(monkeypatch, Loops(goes_on, which), (PAST_END,))
    assert told == [("L1", "past-end")]


def test_equal_services_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, Loops(goes_on, "nobody")) == []


def test_schedules_that_cannot_be_served_end_the_search_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lacks(surface: Any, schedule: Schedule) -> Any:
        raise HarnessGap("the tree reads Scheduler.something")

    class Surface:
        debug = False

        class capabilities:
            mixed = idle = False

    monkeypatch.setattr(serving, "Loop", lacks)
    outcome = serving.check(Surface, steps=100, seed=0)  # type: ignore[arg-type]
    assert outcome.gap == "the tree reads Scheduler.something"
    assert (outcome.steps, outcome.deviations) == (0, [])
