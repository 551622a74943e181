"""Every state of a small loop, and every pair of operations out of each.

A *scope* bounds how many requests exist at once and how many slots the pool has. Two states are the
same if they differ only in the names of requests and slots, in lengths and in values, which are
data to the hand-over: what counts is who holds a row where, whose end the host knows and what is in
flight. Operations are enumerated with the same eyes: which rows they take, in which order, and not
how many drafts were accepted.

There are finitely many such states, so they are all found. :func:`tours` then walks through them
until every pair of operations that can follow each other in a state has done so, and cuts the walk
into traces. What a pair breaks shows at the latest when its rows are resolved, and every row that
lives on is.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from generators.operations import (
    Admit,
    Adopt,
    Filter,
    Finish,
    Header,
    Idle,
    Merge,
    Mixed,
    Operation,
    Preempt,
    Retract,
    Seed,
    Step,
    Sync,
    Trace,
)
from generators.protocol import Capabilities, Request, State, apply, refusal
from generators.protocol.prefill import unused
from generators.values import STRIDE


@dataclass(frozen=True)
class Scope:
    """What is bounded.

    Attributes:
        slots: slots of the pool, padding apart.
        requests: requests that exist at once: those that hold a slot and those retracted.
        arrivals: rows of one prefill batch.
    """

    slots: int
    requests: int
    arrivals: int = 2


def signature(state: State) -> Hashable:
    """What two states must share to be the same but for names, lengths and values."""
    names: dict[int, int] = {}

    def slot_name(slot: int) -> int:
        return names.setdefault(slot, len(names))

    def row(request: Request) -> Hashable:
        return (
            slot_name(request.slot),
            request.finished,
            state.in_flight(request),
            request.committed != request.length,
            request is state.chunked,
        )

    running = tuple(map(row, state.running))
    prefill = None if state.prefill is None else tuple(map(row, state.prefill))
    parked = None if state.chunked is None else row(state.chunked)
    leaving = tuple(map(row, state.leaving))
    named = tuple((slot in state.free) for slot in names)
    waiting = len(state.retracted)
    return (
        *(running, prefill, parked, leaving, named, len(state.free), waiting),
        *(state.pending, state.retracting),
    )


def operations(state: State, scope: Scope, capabilities: Capabilities) -> Iterator[Operation]:
    """Every operation that is legal in `state` within the scope, one for all that are alike."""
    for operation in _candidates(state, scope):
        if refusal(state, operation, capabilities) is None:
            yield operation


def _candidates(state: State, scope: Scope) -> Iterator[Operation]:
    if state.pending:
        yield Sync()
    for request in {id(r): r for r in (*state.rows(), *filter(None, [state.chunked]))}.values():
        if not request.finished:
            yield Finish(request.number)
    if state.prefill is not None:
        yield Merge() if state.running else Adopt()
        return
    in_flight = [r.number for r in state.running if not r.finished and state.in_flight(r)]
    for rows, chunk in _arrivals(state, scope):
        if state.header.seeded:
            if chunk is None:
                yield Seed(rows)
            continue
        yield Admit(rows, chunk)
        for redundant in ((), *((n,) for n in in_flight)):
            yield Mixed(rows, chunk, redundant)
    for during in ("decode", "prefill"):
        yield Idle(during)
    if not state.running:
        return
    for redundant in ((), *((n,) for n in in_flight)):
        yield Step(_accepted(state), redundant)
    yield Filter()
    for number in in_flight:
        yield Filter((number,))
    numbers = [r.number for r in state.running]
    for count in range(1, len(numbers)):
        for keep in itertools.permutations(numbers, count):
            yield Retract(keep)
    alive = [r.number for r in state.running if not r.finished]
    for count in range(1, len(alive) + 1):
        for gone in itertools.combinations(alive, count):
            yield Preempt(gone)


def _accepted(state: State) -> tuple[int, ...]:
    """Accepted drafts of the next step: data, so they only vary."""
    block = state.header.block
    return tuple((state.operations + row) % block for row in range(len(state.running)))


def _arrivals(
    state: State, scope: Scope
) -> Iterator[tuple[tuple[tuple[int, int, int], ...], int | None]]:
    """Rows of the next prefill batch, and which of them has an unfinished prompt."""
    first: list[tuple[int, int, int]] = []
    if state.chunked is not None:
        request = state.chunked
        first.append((request.number, request.slot, request.length + 1))
    known = len(state.live) + len(state.retracted)
    # A slot that a row which has not left yet names too is of a kind of its own. Nobody's are all
    # alike: any will do, and like lengths they do not only grow.
    ended = {r.slot: row for row, r in enumerate(state.running) if r.finished}
    kinds: dict[int, list[int]] = {}
    for slot in sorted(state.free, reverse=len(state.ranges) % 2 == 0):
        kinds.setdefault(ended.get(slot, -1), []).append(slot)
    most = scope.arrivals - len(first)
    for count in range(0 if first else 1, most + 1):
        for back in sorted({0, min(count, len(state.retracted))}):
            if known + count - back > scope.requests:
                continue
            fresh = range(len(state.generations), len(state.generations) + count - back)
            numbers = [*state.retracted[:back], *fresh]
            for chosen in itertools.combinations_with_replacement(sorted(kinds), count):
                taken = {kind: iter(slots) for kind, slots in kinds.items()}
                slots = [next(taken[kind], None) for kind in chosen]
                if None in slots:
                    continue
                rows = (*first, *_rows(state, numbers, slots))
                yield rows, None
                for number in dict.fromkeys((rows[0][0], rows[-1][0])):
                    if state.chunked is None or number == state.chunked.number:
                        yield rows, number


def _rows(state: State, numbers: list[int], slots: list[int | None]) -> list[tuple[int, int, int]]:
    rows: list[tuple[int, int, int]] = []
    for number, slot in zip(numbers, slots, strict=True):
        assert slot is not None
        base = unused(state, rows, 1 - len(rows) % 2)
        rows.append((number, slot, base * STRIDE + 1 + len(rows)))
    return rows


@dataclass
class Graph:
    """All states of a scope, by number, and where each operation out of them leads.

    Attributes:
        header: of the traces.
        follow: per state, the states that its operations lead to, in the order of
            :func:`operations`; state 0 is the empty loop.
    """

    header: Header
    scope: Scope
    capabilities: Capabilities
    follow: list[list[int]] = field(default_factory=list)

    @property
    def edges(self) -> int:
        """Number of (state, operation)."""
        return sum(map(len, self.follow))

    @property
    def pairs(self) -> int:
        """Number of (state, operation, operation after it)."""
        return sum(len(self.follow[target]) for targets in self.follow for target in targets)


def explore(header: Header, scope: Scope, capabilities: Capabilities) -> Graph:
    """Find every state that can be reached."""
    graph = Graph(header, scope, capabilities)
    numbers = {signature(State(header)): 0}
    # States are carried as the operations that lead to them: replaying a few is cheap.
    queue: deque[tuple[Operation, ...]] = deque([()])
    while queue:
        path = queue.popleft()
        state = _after(header, path)
        follow = []
        for operation in operations(state, scope, capabilities):
            after = _after(header, (*path, operation))
            name = signature(after)
            if name not in numbers:
                numbers[name] = len(numbers)
                queue.append((*path, operation))
            follow.append(numbers[name])
        graph.follow.append(follow)
    return graph


def _after(header: Header, path: tuple[Operation, ...]) -> State:
    state = State(header)
    for operation in path:
        apply(state, operation)
    return state


def tours(graph: Graph, *, longest: int = 200) -> Iterator[Trace]:
    """Traces in which every pair of operations follows each other in every state it can.

    A trace walks along pairs not seen yet, takes the shortest way to the next one when there is
    none, and starts anew at `longest`. It ends with a step, which resolves what the last operations
    left.
    """
    follow = graph.follow
    # To do, per (state, operation): the operations that have not followed it there.
    todo = [[set(range(len(follow[target]))) for target in targets] for targets in follow]
    left = graph.pairs
    while left:
        state, here, came = State(graph.header), 0, None
        walk: list[Operation] = []
        while left and len(walk) < longest:
            way = _way(follow, todo, here, came)
            if not way:
                break  # a slot that was used once never becomes a new one again
            for choice in way:
                if came is not None and choice in todo[came[0]][came[1]]:
                    todo[came[0]][came[1]].discard(choice)
                    left -= 1
                operation = next(
                    itertools.islice(
                        operations(state, graph.scope, graph.capabilities), choice, None
                    )
                )
                apply(state, operation)
                walk.append(operation)
                came, here = (here, choice), follow[here][choice]
        walk += _settled(state, graph.capabilities)
        yield Trace(graph.header, tuple(walk))


def _way(
    follow: list[list[int]], todo: list[list[set[int]]], here: int, came: tuple[int, int] | None
) -> list[int]:
    """Operations from `here` to the end of the nearest pair not seen yet; none if there is none."""

    def best(node: int, choices: set[int]) -> int:
        """The one after which most is left to do, so that the walk does not run dry."""
        return max(choices, key=lambda choice: (len(todo[node][choice]), -choice))

    if came is not None and todo[came[0]][came[1]]:
        return [best(here, todo[came[0]][came[1]])]
    seen = {here}
    queue: deque[tuple[int, list[int]]] = deque([(here, [])])
    while queue:
        node, path = queue.popleft()
        for choice, target in enumerate(follow[node]):
            if todo[node][choice]:
                return [*path, choice, best(target, todo[node][choice])]
            if target not in seen:
                seen.add(target)
                queue.append((target, [*path, choice]))
    return []


def _settled(state: State, capabilities: Capabilities) -> Iterator[Operation]:
    """Operations that bring what a trace left to where its rows are resolved."""
    absorb = Merge() if state.running else Adopt()
    for operation in (absorb, Filter(), None):
        last = operation or Step(_accepted(state))
        if refusal(state, last, capabilities) is None:
            apply(state, last)
            yield last
