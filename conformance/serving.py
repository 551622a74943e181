"""Run schedules on one loaded tree's loop, judge what it makes of them, make failures small."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from conformance.difference import Cover, Difference
from conformance.loop_checks import compare, judge, situations
from conformance.sut.host_request import HarnessGap
from conformance.sut.isolation import StandInUsed
from conformance.sut.loop import Loop
from conformance.sut.surface import Surface
from generators.schedules import Schedule, schedules, simpler

COMPARED = 6
"""One schedule in this many is also served by the other loop, and one request of it alone."""

_GAPS = 20
"""Schedules that the harness may be unable to run before nothing more is tried."""

_SHRINKS = 120
"""Runs of the loop that making one failure small may take."""

Note = Callable[[Schedule], None]
"""Called with each schedule before it runs, for crash reports."""


@dataclass
class Deviation:
    """A difference with the smallest schedule that shows it."""

    difference: Difference
    schedule: Schedule
    count: int = 1
    waiver: str | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.difference.clause, self.difference.anomaly

    def as_json(self) -> dict[str, Any]:
        """As reports have deviations; a schedule is in the place of the trace."""
        return {
            "clause": self.difference.clause,
            "anomaly": self.difference.anomaly,
            "mode": "legal",
            "waiver": self.waiver,
            "count": self.count,
            "difference": asdict(self.difference),
            "trace": self.schedule.as_json(),
        }


@dataclass
class Outcome:
    """What running schedules found and did.

    Attributes:
        steps: decode steps.
        requests: requests that were served.
        schedules: schedules that were run.
        reached: how often each call was judged and each situation occurred.
        gap: what the harness lacked for one of the schedules, which was left out; or None.
    """

    deviations: list[Deviation] = field(default_factory=list)
    steps: int = 0
    requests: int = 0
    schedules: int = 0
    reached: Counter[str] = field(default_factory=Counter)
    gap: str | None = None


def differences(
    surface: Surface,
    schedule: Schedule,
    outcome: Outcome,
    *,
    compared: bool,
    waived: Sequence[Cover] = (),
) -> Iterator[Difference]:
    """Run one schedule and yield what differs.

    Args:
        compared: also serve it by the other loop, and its last request alone.
        waived: outputs that are wrong as these say may be so in one way of serving and not in the
            other, which is no difference of its own.
    """

    def excused(found: Sequence[Difference]) -> bool:
        outputs = [difference for difference in found if difference.clause == "L1"]
        return any(cover.covers(d, schedule.header) for cover in waived for d in outputs)

    service = Loop(surface, schedule).run()
    outcome.schedules += 1
    outcome.requests += len(schedule.requests)
    outcome.steps += service.decodes
    for situation in situations(schedule, service):
        outcome.reached[f"situation {situation}"] += 1
    found = list(judge(schedule, service, outcome.reached))
    yield from found
    if not compared:
        return
    header = schedule.header
    last = schedule.requests[-1:]
    for clause, call, other in (
        (
            "L3",
            "loop-overlap",
            replace(schedule, header=replace(header, overlap=not header.overlap)),
        ),
        ("L2", "loop-company", replace(schedule, requests=last)),
    ):
        second = Loop(surface, other).run()
        outcome.steps += second.decodes
        numbers = [request.number for request in other.requests]
        outcome.reached[call] += len(numbers)
        judged = list(judge(other, second, outcome.reached))
        if not excused([*found, *judged]):
            yield from compare(clause, call, service, second, numbers)
        yield from judged


def check(
    surface: Surface,
    *,
    steps: int,
    seed: int,
    waived: Sequence[Cover] = (),
    note: Note | None = None,
    stop_at_first: bool = False,
    shrinking: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Outcome:
    """Serve random schedules until the loop has made `steps` decode steps.

    Args:
        seed: of the schedules; the same seed gives the same result.
        waived: deviations to record without making them small.
        stop_at_first: stop after the first deviation without waiver (in seeded-fault runs).
        shrinking: whether what deviates is made small.
    """
    outcome = Outcome()
    found: dict[tuple[tuple[str, str], str | None], Deviation] = {}
    invented = schedules(
        seed,
        mixed=surface.capabilities.mixed,
        idle=surface.capabilities.idle,
        debug=surface.debug,
    )
    gaps = 0
    for number, schedule in enumerate(invented):
        if note is not None:
            note(schedule)
        compared = number % COMPARED == 0
        try:
            seen = list(differences(surface, schedule, outcome, compared=compared, waived=waived))
        except (StandInUsed, HarnessGap) as error:
            outcome.gap, gaps = str(error), gaps + 1
            if gaps >= _GAPS:
                break
            continue
        met: set[tuple[tuple[str, str], str | None]] = set()
        for difference in seen:
            cover = next((c for c in waived if c.covers(difference, schedule.header)), None)
            key = (difference.clause, difference.anomaly)
            name = (key, cover.name if cover else None)
            entry = found.get(name)
            if entry is not None:
                entry.count += name not in met
            elif cover is not None:
                found[name] = Deviation(difference, schedule, 1, cover.name)
            elif shrinking:
                found[name] = minimize(surface, schedule, difference, waived, note)
            else:
                found[name] = Deviation(difference, schedule)
            met.add(name)
            if cover is None and difference.clause != "L4":
                break  # what follows may follow from it; lost speed leaves the text as it is
        if progress is not None:
            progress(outcome.steps, len(found))
        if outcome.steps >= steps or (stop_at_first and any(w is None for _, w in found)):
            break
    outcome.deviations = list(found.values())
    return outcome


def first(
    surface: Surface,
    schedule: Schedule,
    waived: Sequence[Cover] = (),
    note: Note | None = None,
    *,
    compared: bool = True,
) -> Difference | None:
    """The first difference of a schedule that no waiver covers, or None."""
    if note is not None:
        note(schedule)
    found = differences(surface, schedule, Outcome(), compared=compared, waived=waived)
    covered = (
        difference
        for difference in found
        if not any(cover.covers(difference, schedule.header) for cover in waived)
    )
    return next(covered, None)


def minimize(
    surface: Surface,
    schedule: Schedule,
    difference: Difference,
    waived: Sequence[Cover] = (),
    note: Note | None = None,
) -> Deviation:
    """The smallest schedule found that still shows a difference of the same name."""
    best, shown = schedule, difference
    key = (difference.clause, difference.anomaly)
    compared = difference.clause in ("L2", "L3")
    place, smaller = 0, False
    for _ in range(_SHRINKS):
        candidates = list(simpler(best))
        if place >= len(candidates):
            if not smaller:
                break
            place, smaller = 0, False
        candidate = candidates[place]
        seen = first(surface, candidate, waived, note, compared=compared)
        if seen is not None and (seen.clause, seen.anomaly) == key:
            best, shown, smaller = candidate, seen, True
        else:
            place += 1
    return Deviation(shown, best)
