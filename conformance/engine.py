"""Generate, replay, judge, shrink: one loaded tree against the specification.

:func:`check` is plain code and runs where the tree is loaded. The command line, pytest and the
benchmarks are clients of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from conformance.replay import Player, Replay
from conformance.sut.surface import Surface
from conformance.verdict import Difference
from generators.operations import Trace
from generators.protocol import Capabilities
from generators.shrink import shrink
from generators.strategies import Enough, generate, traces


@dataclass
class Deviation:
    """A difference with the smallest trace that shows it.

    Attributes:
        clause, anomaly: its name.
        mode: ``legal`` (a defect) or ``wild`` (a contract gap).
        difference: what was seen at the last operation.
        trace: the shrunk trace.
        count: how many generated traces ran into it.
        waiver: name of the waiver that covers it, or None.
    """

    clause: str
    anomaly: str
    mode: str
    difference: Difference
    trace: Trace
    count: int = 1
    waiver: str | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.clause, self.anomaly, self.mode)

    def as_json(self) -> dict[str, Any]:
        return {
            "clause": self.clause,
            "anomaly": self.anomaly,
            "mode": self.mode,
            "waiver": self.waiver,
            "count": self.count,
            "difference": asdict(self.difference),
            "trace": self.trace.as_json(),
        }


@dataclass
class Result:
    """What one engine run found and did."""

    deviations: list[Deviation] = field(default_factory=list)
    operations: int = 0
    calls: int = 0
    traces: int = 0
    reached: Counter[str] = field(default_factory=Counter)


Progress = Callable[[int, int], None]
"""Called with (operations so far, deviations so far) about once per trace."""

Waived = frozenset[tuple[str, str]]
"""(clause, anomaly) pairs that an active waiver covers."""


def capabilities_for(surface: Surface, *, wild: bool) -> Capabilities:
    """What the protocol may issue on this tree; in wild mode everything."""
    found = surface.capabilities
    return Capabilities(idle=True, token_bits=found.token_bits) if wild else found


def mode_of(surface: Surface, trace: Trace, operation: int) -> str:
    """Whether the operation that failed is one the scheduler issues on this tree."""
    entry = trace.operations[operation]
    idle = entry.op == "idle" and not surface.capabilities.idle
    return "wild" if entry.wild or idle else "legal"


def check(
    surface: Surface,
    *,
    operations: int,
    seed: int,
    wild: bool = False,
    compiled: bool = False,
    waived: Waived = frozenset(),
    progress: Progress | None = None,
    recorder: Callable[[Trace, int], None] | None = None,
    stop_at_first: bool = False,
) -> Result:
    """Run at least `operations` random operations on the tree and return what deviates.

    Args:
        surface: the loaded tree; its debug mode is the traces'.
        operations: budget.
        seed: of the generated traces; the same seed gives the same result.
        wild: also issue wild operations.
        compiled: whether the process keeps ``torch.compile`` (a property of the process).
        waived: deviations to record without shrinking; their traces go on.
        progress: see :data:`Progress`.
        recorder: called before every operation with the trace and its index, for crash reports.
        stop_at_first: stop after the first deviation (in seeded-fault runs).
    """
    result = Result()
    player = Player(surface, reached=result.reached, waived=waived)
    capabilities = capabilities_for(surface, wild=wild)
    found: dict[tuple[str, str, str], Deviation] = {}

    def consume(trace: Trace) -> None:
        note = (lambda index: recorder(trace, index)) if recorder is not None else None
        replay = player.replay(trace, note)
        result.traces += 1
        result.operations += replay.operations
        result.calls += replay.calls
        for index, difference in replay.waived:
            _record(found, surface, trace, index, difference)
        if replay.difference is not None:
            key = (
                replay.difference.clause,
                replay.difference.anomaly,
                mode_of(surface, trace, replay.operation),
            )
            if key in found:
                found[key].count += 1
            else:
                found[key] = minimize(surface, trace, replay, capabilities)
        if progress is not None:
            progress(result.operations, len(found))
        if result.operations >= operations or (stop_at_first and found):
            raise Enough

    strategy = traces(capabilities, debug=surface.debug, compiled=compiled, wild=wild)
    generate(strategy, seed, consume)
    result.deviations = sorted(found.values(), key=lambda d: d.key)
    return result


def _record(
    found: dict[tuple[str, str, str], Deviation],
    surface: Surface,
    trace: Trace,
    index: int,
    difference: Difference,
) -> None:
    """Count a waived difference; its witness is the waiver's, so nothing is shrunk."""
    key = (difference.clause, difference.anomaly, mode_of(surface, trace, index))
    if key in found:
        found[key].count += 1
    else:
        cut = Trace(trace.header, trace.operations[: index + 1])
        found[key] = Deviation(*key, difference, cut)


def minimize(
    surface: Surface, trace: Trace, replay: Replay, capabilities: Capabilities
) -> Deviation:
    """Shrink a failing trace, keeping clause, anomaly and mode, and describe what it shows."""
    assert replay.difference is not None
    mode = mode_of(surface, trace, replay.operation)
    goal = (replay.difference.clause, replay.difference.anomaly, mode)
    player = Player(surface)

    def failure(candidate: Trace) -> Difference | None:
        again = player.replay(candidate)
        if again.difference is None:
            return None
        key = (
            again.difference.clause,
            again.difference.anomaly,
            mode_of(surface, candidate, again.operation),
        )
        return again.difference if key == goal else None

    cut = Trace(trace.header, trace.operations[: replay.operation + 1])
    small = shrink(cut, lambda candidate: failure(candidate) is not None, capabilities)
    difference = failure(small)
    if difference is None:  # the tree answers differently from one time to the next
        small, difference = cut, replay.difference
    return Deviation(*goal, difference, small)


def replay_one(surface: Surface, trace: Trace) -> Deviation | None:
    """Replay a trace from a file; the deviation it shows, unshrunk, or None."""
    replay = Player(surface).replay(trace)
    if replay.difference is None:
        return None
    cut = Trace(trace.header, trace.operations[: replay.operation + 1])
    mode = mode_of(surface, trace, replay.operation)
    return Deviation(
        replay.difference.clause, replay.difference.anomaly, mode, replay.difference, cut
    )
