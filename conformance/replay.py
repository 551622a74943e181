"""Replay one trace on a loaded tree and on the model, call by call, and judge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from conformance.difference import Cover, Difference
from conformance.kv_checks import ledger
from conformance.observation import Observation
from conformance.oracle import Facts, Oracle
from conformance.sut.driver import Driver, table_width
from conformance.sut.host_request import top_k
from conformance.sut.surface import SLOTS_APART, Surface
from conformance.verdict import Context, judge
from generators.operations import Trace
from generators.protocol import State, apply, situations

REPORTED = frozenset({"F7"})
"""Clauses whose differences say nothing about the values: they do not end a trace."""


@dataclass
class Replay:
    """The outcome of one trace.

    Attributes:
        difference: the first difference, or None.
        operation: index of the operation it showed at.
        operations, calls: how much was carried out.
        waived: (operation index, difference, its cover); the trace went on after them.
        reported: the same of clauses in :data:`REPORTED`.
    """

    difference: Difference | None = None
    operation: int = -1
    operations: int = 0
    calls: int = 0
    waived: list[tuple[int, Difference, Cover]] = field(default_factory=list)
    reported: list[tuple[int, Difference]] = field(default_factory=list)

    @property
    def differences(self) -> list[tuple[int, Difference]]:
        """(operation index, difference) of all that is not waived; what ended the trace first."""
        if self.difference is None:
            return self.reported
        return [(self.operation, self.difference), *self.reported]


class _Differs(Exception):
    def __init__(self, difference: Difference) -> None:
        self.difference = difference


def facts_of(surface: Surface) -> Facts:
    """What the oracle must know of the tree."""
    channels = (("tokens", surface.token_channel), ("lengths", surface.length_channel))
    return Facts(
        device=surface.device.device,
        token_dtype=surface.token_dtype,
        channels=tuple(name for name, channel in channels if channel),
        poison_tokens=surface.poison_tokens,
        poison_lengths=surface.poison_lengths,
        host_lengths_lag="host_lengths_lag" in surface.features,
        direct_carry="direct_carry" in surface.features,
        mirrors=tuple((m.name, m.sums) for m in surface.draft_fields("mirror")),
        host_index_filter="host_index_filter" in surface.features,
        kv_slots_apart=SLOTS_APART,
        top_k=top_k,
    )


def _verdict(observed: Observation, difference: Difference | None) -> str:
    """What a wild use came to: ``right``, ``refused (ERROR)`` or its gap, CLAUSE ANOMALY."""
    if difference is not None:
        return f"{difference.clause} {difference.anomaly}"
    refusal = observed.aspects["outcome"]
    return f"refused ({refusal.kind})" if refusal is not None else "right"


@dataclass
class Player:
    """Replays traces on one loaded tree and counts what was reached.

    Attributes:
        surface: the tree.
        reached: how often each call and operation was carried out.
        waived: differences that are recorded instead of ending the trace.
    """

    surface: Surface
    reached: Counter[str] = field(default_factory=Counter)
    waived: Sequence[Cover] = ()

    def __post_init__(self) -> None:
        self.facts = facts_of(self.surface)

    def replay(self, trace: Trace, progress: Any = None) -> Replay:
        """Carry out `trace` until its end or the first difference.

        Args:
            trace: legal on this tree, or with wild operations.
            progress: called with the index of each operation before it is carried out.
        """
        state = State(trace.header)
        outcome = Replay()
        expectations: Iterator[Observation] = iter(())
        context: Context
        previous: dict[str, Any] = {}
        calls = self.reached

        def sink(observed: Observation) -> None:
            nonlocal previous
            expected = next(expectations, None)
            calls[observed.call] += 1
            if expected is None or expected.call != observed.call:
                if "error" not in observed.aspects:
                    raise AssertionError(f"no expectation for {observed.call}, but {expected}")
                expected = Observation(observed.call, {})
            context.previous = previous
            if outcome.waived and outcome.waived[-1][0] == outcome.operations:
                # The rest of this operation may follow from what was waived.
                difference = ledger(expected, observed, context)
            else:
                difference = judge(expected, observed, context)
            if "outcome" in observed.aspects:
                calls[f"outcome {observed.call}: {_verdict(observed, difference)}"] += 1
            if difference is not None:
                if difference.clause in REPORTED:
                    outcome.reported.append((outcome.operations, difference))
                else:
                    covers = (c for c in self.waived if c.covers(difference, trace.header))
                    cover = next(covers, None)
                    if cover is None:
                        raise _Differs(difference)
                    outcome.waived.append((outcome.operations, difference, cover))
            if "relay_lengths" in expected.aspects:
                # After an agreement the model's rows are the tree's rows.
                previous = expected.aspects

        driver = Driver(self.surface, trace.header, sink, width=table_width(trace))
        width = 0 if driver.kv is None else driver.kv.width
        oracle = Oracle(self.facts, trace.header, driver.channels(), width)
        for index, operation in enumerate(trace.operations):
            if progress is not None:
                progress(index)
            for situation in situations(state, operation):
                calls[f"situation {situation}"] += 1
            effect = apply(state, operation)
            context = Context(state, operation, effect, previous)
            expectations = oracle.perform(operation, effect)
            try:
                before = len(outcome.waived)
                driver.perform(operation, effect)
                left = next(expectations, None)
                if len(outcome.waived) > before:
                    if left is not None or (oracle.kv is not None and oracle.kv.ledger.lost):
                        # The tree raised in the middle, or nobody can say any more whose slots are
                        # whose: there is no state to go on from.
                        break
                    oracle.resynchronize(driver.channels(), *driver.rows())
                elif left is not None:
                    raise AssertionError(f"{operation.line()} gave no {left.call}")
            except _Differs as found:
                outcome.difference, outcome.operation = found.difference, index
                break
            finally:
                outcome.operations += 1
                outcome.calls = driver.calls
                calls[f"operation {operation.name}"] += 1
        return outcome
