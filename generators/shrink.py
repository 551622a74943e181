"""Make a failing trace small without losing the failure.

Works on traces, whatever made them. A candidate leaves something out; :func:`repair` turns it into
a legal trace again (rows of requests that are gone are dropped, a merge into nothing becomes an
adoption); the caller's predicate says whether it still fails in the same way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

from generators.operations import (
    Admit,
    Adopt,
    Filter,
    Finish,
    Header,
    Law,
    Merge,
    Mixed,
    Operation,
    Preempt,
    Retract,
    Seed,
    Step,
    Trace,
)
from generators.protocol import Capabilities, State, apply, refusal
from generators.values import STRIDE

Rows = tuple[tuple[int, int, int], ...]


def _by_request(trace: Trace) -> list[dict[int, int]]:
    """For every step, the accepted drafts by request; for every law, the rows by request."""
    state = State(trace.header)
    result = []
    for operation in trace.operations:
        accepted: dict[int, int] = {}
        if isinstance(operation, Step):
            numbers = [r.number for r in state.running]
            accepted = dict(zip(numbers, operation.accepted, strict=True))
        elif isinstance(operation, Law):
            accepted = {r.number: row for row, r in enumerate(state.running)}
        result.append(accepted)
        apply(state, operation)
    return result


def repair(
    header: Header,
    operations: list[tuple[Operation, dict[int, int]]],
    capabilities: Capabilities,
) -> Trace:
    """The operations as a legal trace: each is adapted to what is left, or dropped."""
    state = State(header)
    kept: list[Operation] = []
    for operation, accepted in operations:
        adapted = _adapt(operation, accepted, state)
        if adapted is not None and refusal(state, adapted, capabilities) is None:
            apply(state, adapted)
            kept.append(adapted)
    return Trace(header, tuple(kept))


def _adapt(operation: Operation, accepted: dict[int, int], state: State) -> Operation | None:
    running = [r.number for r in state.running]
    if isinstance(operation, Step):
        top = state.header.block - 1
        return Step(
            tuple(min(accepted.get(number, 0), top) for number in running),
            tuple(n for n in operation.redundant if n in running),
        )
    if isinstance(operation, Admit | Seed):
        if isinstance(operation, Seed) != state.header.seeded:
            operation = (Seed if state.header.seeded else Admit)(operation.rows)
        rows = tuple(
            (row[0], row[1], _length(state, operation, row))
            for row in operation.rows
            if (row[0] in state.live and state.live[row[0]] is state.chunked)
            or (row[0] not in state.live and row[1] in state.free)
        )
        adapted = with_rows(operation, rows) if rows else None
        if isinstance(adapted, Mixed):
            if not running:  # nothing to take along: a prefill like any other
                return Admit(adapted.rows, adapted.chunk)
            left = tuple(n for n in adapted.redundant if n in running)
            return replace(adapted, redundant=left)
        return adapted
    if isinstance(operation, Merge | Adopt):
        return Merge() if running else Adopt()
    if isinstance(operation, Filter):
        return Filter(tuple(n for n in operation.leaving if n in running))
    if isinstance(operation, Preempt):
        return Preempt(tuple(n for n in operation.gone if n in running))
    if isinstance(operation, Retract):
        return Retract(tuple(n for n in operation.keep if n in running))
    if isinstance(operation, Law):
        # Its rows are meant by request: those that are gone leave every index that names them.
        now = {accepted[number]: row for row, number in enumerate(running) if number in accepted}
        kept = [i for i in operation.keep if i in now]
        then = (operation.keep[i] for i in operation.then if i < len(operation.keep))
        stay = [kept.index(row) for row in then if row in now]
        cut = sum(row < operation.cut for row in now)
        return replace(operation, keep=tuple(now[i] for i in kept), then=tuple(stay), cut=cut)
    return operation


def _length(state: State, operation: Admit | Seed, row: tuple[int, int, int]) -> int:
    """A row's length; with a KV pool what comes back is as long as it is known to be by then."""
    number, _, length = row
    whole = state.whole.get(number) if state.header.kv_tokens else None
    chunk = isinstance(operation, Admit) and operation.chunk == number
    return length if whole is None else min(length, whole - 1) if chunk else whole


def with_rows(operation: Admit | Seed, rows: Rows) -> Admit | Seed:
    """The arrival with other rows; its chunk goes with its row."""
    if isinstance(operation, Seed):
        return Seed(rows)
    chunk = operation.chunk if operation.chunk in [r for r, _, _ in rows] else None
    return replace(operation, rows=rows, chunk=chunk)


def shrink(
    trace: Trace,
    fails: Callable[[Trace], bool],
    capabilities: Capabilities,
    *,
    attempts: int = 2000,
) -> Trace:
    """The smallest trace found that still fails; deterministic.

    Args:
        trace: legal, failing.
        fails: whether a trace fails in the same way; called at most `attempts` times.
    """
    tried: set[Trace] = {trace}
    progress = True
    while progress and len(tried) < attempts:
        progress = False
        for candidate in _candidates(trace, capabilities):
            if candidate in tried or _size(candidate) >= _size(trace):
                continue
            tried.add(candidate)
            if fails(candidate):
                trace, progress = candidate, True
                break
            if len(tried) >= attempts:
                break
    return trace


def _size(trace: Trace) -> tuple[int, ...]:
    """Order of traces: fewer operations, fewer rows, then simpler settings."""
    header = trace.header
    rows = sum(len(o.rows) for o in trace.operations if isinstance(o, Admit | Seed))
    detail = sum(map(_detail, trace.operations))
    settings = (
        header.pool
        + header.block
        + header.page
        + header.seed
        + 2 * (not header.overlap)
        + 2 * header.seeded
        + (not header.needs_cpu_seq_lens)
    )
    return (len(trace.operations), rows, detail, settings)


def _detail(operation: Operation) -> int:
    """How much there is to read in one operation, apart from its number of rows."""
    if isinstance(operation, Step):
        return sum(operation.accepted) + 4 * len(operation.redundant)
    if isinstance(operation, Law):
        rows = len(operation.keep) + len(operation.then) + operation.cut
        return rows + 2 * operation.mirrors + (operation.form != "relayed")
    if isinstance(operation, Filter):
        return 4 * len(operation.leaving)
    if isinstance(operation, Preempt):
        return len(operation.gone)
    detail = 0
    if isinstance(operation, Admit | Seed):
        detail += sum(n % STRIDE + n // STRIDE + slot + r for r, slot, n in operation.rows)
    if isinstance(operation, Admit):
        detail += 8 * (operation.chunk is not None)
    if isinstance(operation, Mixed):
        detail += 8 + 4 * len(operation.redundant)
    return detail


def _candidates(trace: Trace, capabilities: Capabilities) -> Iterator[Trace]:
    """Simpler traces, the boldest first."""
    header = trace.header
    pairs = list(zip(trace.operations, _by_request(trace), strict=True))
    n = len(pairs)

    # Leave out runs of operations, from long to short.
    width = n // 2
    while width:
        for start in range(n - width, -1, -1):
            yield repair(header, pairs[:start] + pairs[start + width :], capabilities)
        width //= 2

    # Leave out one request everywhere.
    arrivals = [o for o in trace.operations if isinstance(o, Admit | Seed)]
    numbers = sorted({request for o in arrivals for request, _, _ in o.rows})
    for number in numbers:
        yield repair(header, _without(pairs, number), capabilities)

    yield from _earlier_finishes(header, pairs, capabilities)
    yield from _redundant_steps(header, pairs, capabilities)
    yield from _joined_arrivals(header, pairs, capabilities)
    yield from _preempted(header, pairs, capabilities)
    yield from _simpler_operations(header, pairs, capabilities)
    yield from _simpler_headers(header, pairs, capabilities)
    yield _renumbered(trace, capabilities)


Pairs = list[tuple[Operation, dict[int, int]]]


def _without(pairs: Pairs, number: int) -> Pairs:
    left: Pairs = []
    for operation, accepted in pairs:
        if isinstance(operation, Admit | Seed):
            rows = tuple(row for row in operation.rows if row[0] != number)
            if not rows:
                continue
            operation = with_rows(operation, rows)
        elif isinstance(operation, Finish) and operation.request == number:
            continue
        left.append((operation, accepted))
    return left


def _earlier_finishes(header: Header, pairs: Pairs, capabilities: Capabilities) -> Iterator[Trace]:
    """A request that ends before its batch is merged leaves with the merge: no filter is needed."""
    filters = [i for i, (operation, _) in enumerate(pairs) if isinstance(operation, Filter)]
    for end, (operation, accepted) in enumerate(pairs):
        if isinstance(operation, Finish):
            for leave in filters:
                rest = [p for i, p in enumerate(pairs) if i not in (end, leave)]
                for start in range(min(end, len(rest))):
                    moved = [*rest[:start], (operation, accepted), *rest[start:]]
                    yield repair(header, moved, capabilities)


def _joined_arrivals(header: Header, pairs: Pairs, capabilities: Capabilities) -> Iterator[Trace]:
    """Two batches that come in one after the other may as well come in as one."""
    arrivals = [i for i, (operation, _) in enumerate(pairs) if isinstance(operation, Admit | Seed)]
    for first, second in itertools.pairwise(arrivals):
        one, other = pairs[first][0], pairs[second][0]
        assert isinstance(one, Admit | Seed)
        assert isinstance(other, Admit | Seed)
        # A mixed batch has its own rows first.
        rows = other.rows + one.rows if isinstance(other, Mixed) else one.rows + other.rows
        joined = with_rows(one, rows)
        rest = pairs[second + 1 :]
        if rest and isinstance(rest[0][0], Merge | Adopt):
            rest = rest[1:]
        yield repair(
            header, [*pairs[:first], (joined, {}), *pairs[first + 1 : second], *rest], capabilities
        )


def _redundant_steps(header: Header, pairs: Pairs, capabilities: Capabilities) -> Iterator[Trace]:
    """A request that runs once more needs no processed result to end."""
    for end, (operation, _) in enumerate(pairs):
        if not isinstance(operation, Finish):
            continue
        for index, (step, accepted) in enumerate(pairs[:end]):
            if isinstance(step, Step):
                redundant = replace(step, redundant=(*step.redundant, operation.request))
                rest = [*pairs[index + 1 : end], *pairs[end + 1 :]]
                yield repair(header, [*pairs[:index], (redundant, accepted), *rest], capabilities)


def _preempted(header: Header, pairs: Pairs, capabilities: Capabilities) -> Iterator[Trace]:
    """A request that is preempted leaves at once: it need not end first."""
    for end, (operation, accepted) in enumerate(pairs):
        filters = [i for i in range(end + 1, len(pairs)) if isinstance(pairs[i][0], Filter)]
        if not filters:
            return
        ends: tuple[int, ...] = ()
        kept: Pairs = []
        if isinstance(operation, Finish):
            ends = (operation.request,)
        elif isinstance(operation, Step) and operation.redundant:
            ends, kept = operation.redundant, [(replace(operation, redundant=()), accepted)]
        leave = filters[0]
        for number in ends:
            middle: Pairs = [*pairs[end + 1 : leave], (Preempt((number,)), {})]
            yield repair(header, [*pairs[:end], *kept, *middle, *pairs[leave + 1 :]], capabilities)


def _simpler_operations(
    header: Header, pairs: Pairs, capabilities: Capabilities
) -> Iterator[Trace]:
    for index, (operation, accepted) in enumerate(pairs):
        for simpler, drafts in _simpler(operation, accepted):
            changed = [*pairs[:index], (simpler, drafts), *pairs[index + 1 :]]
            yield repair(header, changed, capabilities)


def _simpler(
    operation: Operation, accepted: dict[int, int]
) -> Iterator[tuple[Operation, dict[int, int]]]:
    if isinstance(operation, Step):
        if any(accepted.values()):
            yield operation, {}
            for number in accepted:
                yield operation, {**accepted, number: 0}
        if operation.redundant:
            yield replace(operation, redundant=()), accepted
    elif isinstance(operation, Admit | Seed):
        if isinstance(operation, Mixed):
            yield Admit(operation.rows, operation.chunk), accepted
            yield replace(operation, redundant=()), accepted
        if isinstance(operation, Admit) and operation.chunk is not None:
            yield replace(operation, chunk=None), accepted
        for i in range(len(operation.rows)):
            if len(operation.rows) > 1:
                rows = operation.rows[:i] + operation.rows[i + 1 :]
                yield with_rows(operation, rows), accepted
        short = tuple(
            (request, slot, length - length % STRIDE + min(length % STRIDE, 1 + i))
            for i, (request, slot, length) in enumerate(operation.rows)
        )
        yield with_rows(operation, short), accepted
    elif isinstance(operation, Filter) and operation.leaving:
        yield Filter(), accepted
    elif isinstance(operation, Preempt):
        for number in operation.gone:
            yield Preempt(tuple(n for n in operation.gone if n != number)), accepted
    elif isinstance(operation, Law):
        if operation.law in ("compose", "distribute"):
            yield replace(operation, law="filter", then=(), cut=0), accepted
        if operation.law in ("associate", "distribute"):
            yield replace(operation, law="merge", keep=()), accepted
        yield replace(operation, mirrors=False), accepted
        yield replace(operation, form="relayed"), accepted
        for i in range(len(operation.keep)):
            yield replace(operation, keep=operation.keep[:i] + operation.keep[i + 1 :]), accepted
        for i in range(len(operation.then)):
            yield replace(operation, then=operation.then[:i] + operation.then[i + 1 :]), accepted
        if operation.cut:
            yield replace(operation, cut=operation.cut - 1), accepted
    elif isinstance(operation, Retract) and len(operation.keep) > 1:
        for i in range(len(operation.keep)):
            yield replace(operation, keep=operation.keep[:i] + operation.keep[i + 1 :]), accepted


def _simpler_headers(header: Header, pairs: Pairs, capabilities: Capabilities) -> Iterator[Trace]:
    rows = [row for o, _ in pairs if isinstance(o, Admit | Seed) for row in o.rows]
    top = max((slot for _, slot, _ in rows), default=1)
    for change in (
        {"overlap": True},
        {"seeded": False},
        {"needs_cpu_seq_lens": True},
        {"page": 1},
        {"seed": 0},
        {"block": 1},
        {"block": 2},
        {"block": max(1, header.block // 2)},
        {"pool": max(2, top + 1)},
    ):
        simpler = replace(header, **change)
        if simpler != header:
            yield repair(simpler, pairs, capabilities)


def _renumbered(trace: Trace, capabilities: Capabilities) -> Trace:
    """Requests, slots and length ranges counted from the start, in order of appearance."""
    requests: dict[int, int] = {}
    slots: dict[int, int] = {}
    ranges: dict[int, int] = {}
    renamed: Pairs = []

    def new_numbers(numbers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(requests.get(n, 0) for n in numbers)

    for operation, accepted in zip(trace.operations, _by_request(trace), strict=True):
        if isinstance(operation, Admit | Seed):
            rows = tuple(
                (
                    requests.setdefault(request, len(requests)),
                    slots.setdefault(slot, len(slots) + 1),
                    ranges.setdefault(length // STRIDE, len(ranges)) * STRIDE + length % STRIDE,
                )
                for request, slot, length in operation.rows
            )
            operation = replace(operation, rows=rows)
            if isinstance(operation, Admit) and operation.chunk is not None:
                operation = replace(operation, chunk=requests[operation.chunk])
            if isinstance(operation, Mixed):
                operation = replace(operation, redundant=new_numbers(operation.redundant))
        elif isinstance(operation, Finish):
            operation = Finish(requests.get(operation.request, 0))
        elif isinstance(operation, Retract):
            operation = Retract(new_numbers(operation.keep))
        elif isinstance(operation, Filter):
            operation = Filter(new_numbers(operation.leaving))
        elif isinstance(operation, Preempt):
            operation = Preempt(new_numbers(operation.gone))
        elif isinstance(operation, Step):
            accepted = {requests.get(n, 0): k for n, k in accepted.items()}
            operation = Step(operation.accepted, new_numbers(operation.redundant))
        elif isinstance(operation, Law):
            accepted = {requests.get(n, 0): row for n, row in accepted.items()}
        renamed.append((operation, accepted))
    return repair(trace.header, renamed, capabilities)
