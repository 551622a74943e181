"""The same traces on two trees: where their records differ, and the smallest trace that shows it.

Runs in the parent and never imports torch; what a record is, :mod:`conformance.record` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

from conformance import words
from conformance.pool import Answer, Pool, Session
from conformance.runner import result_of
from conformance.sut.worker import Config
from generators.operations import Trace
from generators.protocol import Capabilities
from generators.shrink import shrink

_ATTEMPTS = 400
"""Traces tried to make one change's example small."""


class Cell(NamedTuple):
    """What one trace showed at one place: the forms it took, how often, and a checksum of values.

    Where the trace never came by the place, that is 0 times and there are no forms.
    """

    forms: tuple[str, ...] = ()
    times: int = 0
    value: int = 0


def facets(place: str, one: Cell, other: Cell) -> tuple[str, ...]:
    """In what two trees differ at a place: ``presence``, ``form``, ``value``; nothing if equal."""
    if one == other:
        return ()
    thing = place.partition(": ")[2]
    if not one.times or not other.times:
        if thing.startswith("twice."):
            return ()  # a channel that one tree does not consume: its capabilities say so
        if thing.startswith(("draft.", "relay.", "payload.")):
            # Whoever reads an attribute by a default of None sees no more than that default.
            shown = one.forms or other.forms
            return () if shown == (words.NONE,) else ("form",)
    if one.times != other.times:
        # When a channel is created, its rows show.
        return () if thing.startswith("home.") else ("presence",)
    if (words.NONE in one.forms) != (words.NONE in other.forms):
        return ("form",)  # other values follow
    found = []
    if one.forms != other.forms:
        found.append("form")
    if one.value != other.value:
        found.append("value")
    return tuple(found)


class Table:
    """The records of many traces on one tree (``conformance.record.as_table``)."""

    def __init__(self, data: dict[str, Any]) -> None:
        self._data = data
        self.places: list[str] = data["places"]
        self.traces: list[dict[str, Any]] = data["traces"]
        self.whole: list[bool] = data["whole"]
        self._forms = [tuple(forms) for forms in data["forms"]]
        self._columns = {place: column for column, place in enumerate(self.places)}

    def cell(self, place: str, index: int) -> Cell:
        """What trace `index` showed at a place."""
        column = self._columns.get(place)
        if column is None:
            return Cell()
        kind, count, value = (self._data[k][index][column] for k in ("kinds", "counts", "values"))
        return Cell(self._forms[kind], count, value)


@dataclass
class Shard:
    """The records of the same traces on both trees."""

    base_config: Config
    head_config: Config
    base: Table
    head: Table

    @property
    def traces(self) -> int:
        return min(len(self.base.traces), len(self.head.traces))

    @property
    def comparable(self) -> list[int]:
        """Indices of traces that no deviation ended on either tree.

        After a deviation a tree is in a state that the specification does not know, and the
        deviation is told as such.
        """
        return [i for i in range(self.traces) if self.base.whole[i] and self.head.whole[i]]

    def cells(self) -> Iterator[tuple[str, int, Cell, Cell]]:
        """(place, index of the trace, base, head) for all that can be compared.

        A call that only one of the trees has is no difference but a capability of that tree; and
        where only one of them raised, the rest of the trace follows from that.
        """
        calls = [{place.partition(": ")[0] for place in t.places} for t in (self.base, self.head)]
        both = calls[0] & calls[1]
        every = dict.fromkeys([*self.base.places, *self.head.places])
        places = [place for place in every if place.partition(": ")[0] in both]
        errors = [place for place in places if place.endswith(": error")]
        for index in self.comparable:
            raised = [p for p in errors if self.base.cell(p, index) != self.head.cell(p, index)]
            for place in raised or places:
                yield place, index, self.base.cell(place, index), self.head.cell(place, index)


class Examples:
    """Makes traces small and says what both trees show on them."""

    def __init__(self, pool: Pool, common: dict[str, Any]) -> None:
        self._pool = pool
        self._capabilities = Capabilities(**common)
        self._stack = ExitStack()
        self._sessions: dict[tuple[int, bool, bool], Session] = {}
        self._seen: dict[Trace, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._small: list[Trace] = []

    def __enter__(self) -> Examples:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def smallest(self, shard: Shard, index: int, place: str, facet: str) -> Trace | None:
        """The smallest trace found, from one of the shard's, on which the place still differs.

        Returns:
            None if the trees show the same when they are asked again: one of them is not steady.
        """

        def differs(candidate: Trace) -> bool:
            one, two = (_cell_of(record, place) for record in self.play(shard, candidate))
            return facet in facets(place, one, two)

        trace = Trace.from_json(shard.base.traces[index])
        if not differs(trace):
            return None
        until = self.first(shard, trace, place)[0]
        cut = Trace(trace.header, trace.operations[: until + 1])
        # Differences have few causes: often an earlier example shows this one too, and what is
        # smaller than that has been played already.
        header = (trace.header.debug, trace.header.compiled)
        earlier = [t for t in self._small if (t.header.debug, t.header.compiled) == header]
        start = min([*filter(differs, earlier), cut], key=lambda t: len(t.operations))
        if not differs(start):
            start = trace
        small = shrink(start, differs, self._capabilities, attempts=_ATTEMPTS)
        self._small.append(small)
        return small

    def play(
        self, shard: Shard, trace: Trace, wanted: Sequence[str] = ()
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The trace's record on the base and on the head."""
        if trace in self._seen and not wanted:
            return self._seen[trace]
        configs = (shard.base_config, shard.head_config)
        sessions = [self._session(side, config) for side, config in enumerate(configs)]
        for session in sessions:
            session.send({"do": "record", "trace": trace.as_json(), "wanted": list(wanted)})
        one, two = (_record_of(session.receive()) for session in sessions)
        self._seen[trace] = (one, two)
        return one, two

    def first(self, shard: Shard, trace: Trace, place: str) -> tuple[int, str, str]:
        """(operation, base, head) where the two trees first show something else at the place."""
        before, after = (one["seen"].get(place, []) for one in self.play(shard, trace, [place]))
        for number in range(max(len(before), len(after))):
            mine = before[number] if number < len(before) else None
            theirs = after[number] if number < len(after) else None
            if mine != theirs:
                operation = (theirs or mine or [0])[0]
                return int(operation), _shown(mine), _shown(theirs)
        return len(trace.operations) - 1, "", ""

    def _session(self, side: int, config: Config) -> Session:
        # Base and head may be the same tree, and still each has a worker of its own.
        key = (side, config.debug, config.compiled)
        if key not in self._sessions:
            session = self._pool.session("example", config)
            self._sessions[key] = self._stack.enter_context(session)
        return self._sessions[key]


def _shown(seen: list[Any] | None) -> str:
    if seen is None:
        return "nothing"
    _, form, text = seen
    return text if form in ("None", "bool", "list", "str", "event") else f"{form} {text}"


def _record_of(answer: Answer) -> dict[str, Any]:
    """A record; of a worker that died, one with nothing but that."""
    if answer.crash is not None:
        place, form = "process: error", f"the process ends: {answer.crash.how}"
        return {"values": {place: 0}, "forms": {place: [form]}, "counts": {place: 1}, "seen": {}}
    return result_of(answer)


def _cell_of(record: dict[str, Any], place: str) -> Cell:
    if place not in record["counts"]:
        return Cell()
    return Cell(tuple(record["forms"][place]), record["counts"][place], record["values"][place])
