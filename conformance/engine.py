"""Generate, replay, judge, shrink: one loaded tree against the specification.

:func:`check` is plain code and runs where the tree is loaded. The command line, pytest and the
benchmarks are clients of it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from conformance.difference import Cover, Difference
from conformance.record import Record, record
from conformance.replay import Player
from conformance.sut.surface import Surface
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
    def key(self) -> Key:
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
    """What one engine run found and did.

    ``complete`` says that every trace was played to its end: no difference cut one short.
    """

    deviations: list[Deviation] = field(default_factory=list)
    operations: int = 0
    calls: int = 0
    traces: int = 0
    complete: bool = True
    reached: Counter[str] = field(default_factory=Counter)
    recorded: list[tuple[Trace, Record, bool]] = field(default_factory=list)


Progress = Callable[[int, int], None]
"""Called with (operations so far, deviations so far) about once per trace."""


def capabilities_for(surface: Surface, *, wild: bool) -> Capabilities:
    """What the protocol may issue on this tree; in wild mode everything."""
    found = surface.capabilities
    return replace(found, idle=True, defers_prefill=True) if wild else found


def mode_of(surface: Surface, trace: Trace, operation: int) -> str:
    """Whether the scheduler of this tree issues what led to a difference at `operation`.

    Wild uses work on copies, so only one that differs itself is to blame; an idle step on a tree
    without idle batches may show later.
    """
    until = trace.operations[: operation + 1]
    idle = not surface.capabilities.idle and any(entry.op == "idle" for entry in until)
    return "wild" if until[-1].wild or idle else "legal"


Key = tuple[str, str, str]
"""(clause, anomaly, mode): what makes two deviations the same."""


def key_of(surface: Surface, trace: Trace, operation: int, difference: Difference) -> Key:
    """The name of a difference at `operation`."""
    return (difference.clause, difference.anomaly, mode_of(surface, trace, operation))


def check(
    surface: Surface,
    *,
    operations: int,
    seed: int,
    wild: bool = False,
    compiled: bool = False,
    waived: Sequence[Cover] = (),
    progress: Progress | None = None,
    recorder: Callable[[Trace, int], None] | None = None,
    stop_at_first: bool = False,
    capabilities: Capabilities | None = None,
    recording: bool = False,
    given: Iterable[Trace] | None = None,
    shrinking: bool = True,
    kv_pool: bool = False,
) -> Result:
    """Run at least `operations` random operations on the tree and return what deviates.

    Args:
        surface: the loaded tree; its debug mode is the traces'.
        operations: budget.
        seed: of the generated traces; the same seed gives the same result.
        wild: also issue wild operations.
        compiled: whether the process keeps ``torch.compile`` (a property of the process).
        waived: deviations to record without shrinking, by waiver; their traces go on.
        progress: see :data:`Progress`.
        recorder: called before every operation with the trace and its index, for crash reports.
        stop_at_first: stop after the first deviation without waiver (in seeded-fault runs).
        capabilities: what the traces may use, if not all that the tree has: two trees are given the
            same traces.
        recording: play every trace once more, judged by nobody, and keep what it made visible.
            The budget then counts the operations of the traces, not those up to a deviation.
        given: traces to play, all of them, instead of random ones.
        shrinking: whether what deviates is made small.
        kv_pool: whether the random traces have a KV pool.
    """
    result = Result()
    player = Player(surface, reached=result.reached, waived=waived)
    capabilities = capabilities or capabilities_for(surface, wild=wild)
    found: dict[tuple[Key, str | None], Deviation] = {}
    generated = 0

    def consume(trace: Trace) -> None:
        nonlocal generated
        note = (lambda index: recorder(trace, index)) if recorder is not None else None
        replay = player.replay(trace, note)
        result.traces += 1
        result.operations += replay.operations
        result.calls += replay.calls
        result.complete &= replay.difference is None
        seen: list[tuple[int, Difference, Cover | None]] = [*replay.waived]
        seen += [(index, difference, None) for index, difference in replay.differences]
        for index, difference, cover in seen:
            key = key_of(surface, trace, index, difference)
            waiver = cover.name if cover is not None else None
            named = (key, waiver)
            if named in found:
                found[named].count += 1
            elif not shrinking or _lost(surface, difference) or (cover and cover.shown):
                # The witness of what is waived is the waiver's, so nothing is shrunk.
                found[named] = _cut(key, trace, index, difference)
            else:
                found[named] = minimize(surface, trace, index, difference, capabilities, waived)
            found[named].waiver = waiver
        if any(_lost(surface, difference) for _, difference in replay.differences):
            raise Enough
        generated += len(trace.operations)
        if recording:
            # Wild uses work on copies: one that differs leaves the tree as it was. What a waiver
            # covers may end a trace too, where nobody can say any more whose slots are whose.
            ended = replay.operations < len(trace.operations)
            wild_use = replay.difference is not None and trace.operations[replay.operation].wild
            whole = wild_use or not (ended or replay.difference is not None)
            result.recorded.append((trace, record(surface, trace), whole))
        if progress is not None:
            progress(result.operations, len(found))
        done = generated if recording else result.operations
        stop = stop_at_first and any(waiver is None for _, waiver in found)
        if stop or (given is None and done >= operations):
            raise Enough

    if given is not None:
        with contextlib.suppress(Enough):
            for trace in given:
                consume(trace)
    else:
        strategy = traces(
            capabilities, debug=surface.debug, compiled=compiled, wild=wild, kv_pool=kv_pool
        )
        generate(strategy, seed, consume)
    result.deviations = sorted(found.values(), key=lambda d: (d.key, d.waiver or ""))
    return result


def survey(surface: Surface, *, operations: int, seed: int) -> None:
    """Replay random traces without judging what they show: for tracing what they execute."""
    player = Player(surface)
    done = 0

    def consume(trace: Trace) -> None:
        nonlocal done
        done += player.replay(trace).operations
        if done >= operations:
            raise Enough

    generate(traces(surface.capabilities, debug=surface.debug), seed, consume)


def _lost(surface: Surface, difference: Difference) -> bool:
    """Whether a failed assertion took the device from this process: nothing more can run here."""
    device = surface.device
    return not device.survives_assertion and difference.observed.startswith(device.assertion)


def _cut(key: Key, trace: Trace, index: int, difference: Difference) -> Deviation:
    """A deviation with its trace up to the operation that shows it, not shrunk."""
    return Deviation(*key, difference, Trace(trace.header, trace.operations[: index + 1]))


def minimize(
    surface: Surface,
    trace: Trace,
    operation: int,
    difference: Difference,
    capabilities: Capabilities,
    waived: Sequence[Cover] = (),
) -> Deviation:
    """Shrink a failing trace, keeping clause, anomaly and mode, and describe what it shows.

    What no waiver covers is not shrunk into settings for which one does.
    """
    goal = key_of(surface, trace, operation, difference)
    player = Player(surface, waived=waived)

    def covers(found: Difference, by: Trace) -> list[str]:
        return [cover.name for cover in waived if cover.covers(found, by.header)]

    covered = covers(difference, trace)

    def failure(candidate: Trace) -> Difference | None:
        replay = player.replay(candidate)
        seen = [*replay.differences, *((index, other) for index, other, _ in replay.waived)]
        for index, other in seen:
            same = key_of(surface, candidate, index, other) == goal
            if same and covers(other, candidate) == covered:
                return other
        return None

    cut = Trace(trace.header, trace.operations[: operation + 1])
    try:
        small = shrink(cut, lambda candidate: failure(candidate) is not None, capabilities)
    except Exception:
        small = cut  # a finding is worth more than a short one
    # A tree that answers differently from one time to the next keeps its first answer.
    return Deviation(*goal, failure(small) or difference, small)


def replay_one(
    surface: Surface, trace: Trace, note: Callable[[int], None] | None = None
) -> Deviation | None:
    """Replay a trace from a file; the deviation it shows, unshrunk, or None.

    Args:
        note: called with the index of each operation before it is carried out.
    """
    for index, difference in Player(surface).replay(trace, note).differences:
        return _cut(key_of(surface, trace, index, difference), trace, index, difference)
    return None
