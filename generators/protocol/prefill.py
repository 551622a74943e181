"""The rules by which requests come in: prefill, mixed, seed, and joining the running batch.

For each operation: why it is illegal in a state, what it does, how it is drawn.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from generators.operations import Admit, Adopt, Merge, Mixed, Operation, Seed
from generators.protocol import kv
from generators.protocol.state import Capabilities, Choices, Effect, Request, State, lengths_of
from generators.values import STRIDE

_MOST_ROWS = 64
"""The random generator keeps batches to this many rows."""

_LONGEST_MIXED = 512
"""The random generator mixes while lengths are below this many ranges: a tail reads its request's
slot at its length, so the table of slots must reach that far."""

Rows = Sequence[tuple[int, int, int]]


# -- requests that come in -------------------------------------------------------------------


def _refuse_rows(state: State, rows: Rows, chunk: int | None = None) -> str | None:
    """Why `rows` cannot come in, of which that of request `chunk` goes on later."""
    if state.prefill is not None:
        return "the last prefill batch has not been merged yet"
    if not rows:
        return "a prefill batch has at least one request"
    if len(rows) > _room(state):
        return "more requests would run than the pool has slots"
    if len({slot for _, slot, _ in rows}) != len(rows):
        return "a slot is given twice"
    if len({number for number, _, _ in rows}) != len(rows):
        return "a request comes in twice"
    pool = state.header.kv_tokens
    bases = [length // STRIDE for r, _, length in rows if r not in state.live]
    if len(set(bases)) != len(bases) and not pool:
        return "two requests share a length range"
    for number, slot, length in rows:
        if length < 1:
            return f"r{number} has no tokens"
        current = state.live.get(number)
        if current is not None:
            if current is not state.chunked:
                return f"r{number} is already running"
            if slot != current.slot or length <= current.length or length > current.limit - 1:
                return f"r{number} does not continue its chunk"
        elif number in state.generations and number not in state.retracted:
            return f"r{number} has ended"
        elif slot not in state.free:
            return f"slot {slot} is not free"
        elif not pool and (not length % STRIDE or length // STRIDE in state.ranges):
            return f"length {length} of r{number} is in another request's range"
        last = chunk != number
        refused = kv.refuse_prompt(state, number, length, last=last) if pool else None
        if refused is not None:
            return refused
    return None


def _room(state: State) -> int:
    """How many rows a prefill batch may have: rows of requests that have ended still count."""
    return state.header.pool - 1 - len(state.running)


def _come_in(state: State, rows: Rows) -> list[Request]:
    """The requests of a prefill batch, with their slots."""
    batch = []
    for number, slot, length in rows:
        request = state.live.get(number)
        if request is None:
            generation = state.generations.get(number, -1) + 1
            state.generations[number] = generation
            if generation:
                state.retracted.remove(number)
            request = Request(number, slot, generation, length, _limit(state, length))
            state.free.remove(slot)
            state.used.add(slot)
            state.live[number] = request
        request.length = request.committed = length
        request.known = max(request.known, length)
        request.allocated = max(request.allocated, length)
        batch.append(request)
    return batch


def _limit(state: State, length: int) -> int:
    """One past the last length of a new request, whose range nobody else is given."""
    if state.header.kv_tokens:
        return STRIDE
    base = length // STRIDE
    state.ranges.add(base)
    while state.lowest in state.ranges:
        state.lowest += 1
    return (base + 1) * STRIDE


def _draw_rows(state: State, choose: Choices) -> list[tuple[int, int, int]] | None:
    rows: list[tuple[int, int, int]] = []
    free = list(state.free)
    if state.chunked is not None:
        chunked = state.chunked
        length = _draw_continued(state, choose, chunked)
        if length is None:
            return None
        rows.append((chunked.number, chunked.slot, length))
    elif not free:
        return None
    retracted = list(state.retracted)
    # Mostly small batches; now and then all that the pool holds.
    room = min(_room(state) - len(rows), max(0, _MOST_ROWS - len(state.running)))
    if room < 0:
        return None
    most = min(len(free), room if choose.below(8) == 7 else min(room, 4))
    if not rows and not most:
        return None
    count = choose.below(most + 1) if rows else 1 + choose.below(most)
    fresh = len(state.generations)
    for _ in range(count):
        slot = free.pop(choose.below(len(free)))
        if retracted and choose.below(2):
            number = retracted.pop(choose.below(len(retracted)))
        else:
            number, fresh = fresh, fresh + 1
        whole = state.whole.get(number) if state.header.kv_tokens else None
        rows.append((number, slot, whole or _draw_length(state, rows, choose)))
    if state.header.kv_tokens:
        while rows and kv.refuse_rows(state, rows) is not None:
            rows.pop()
        if state.chunked is not None and not rows:
            return None
    return rows or None


def _draw_continued(state: State, choose: Choices, chunked: Request) -> int | None:
    """How long the unfinished prompt is after its next prefill."""
    if state.header.kv_tokens:
        whole = state.whole.get(chunked.number)
        return whole or kv.draw_prompt(state, choose, chunked.length + 1)
    room = chunked.limit - 1 - chunked.length
    return chunked.length + 1 + choose.below(min(room, 64)) if room >= 1 else None


def _draw_length(state: State, rows: Rows, choose: Choices) -> int:
    """How long a new request's prompt is."""
    if state.header.kv_tokens:
        prompt = kv.draw_prompt(state, choose)
        assert prompt is not None
        return prompt
    prompt = 1 + (choose.below(64) if choose.below(4) else 0)
    return unused(state, rows, choose.below(4)) * STRIDE + prompt


def unused(state: State, rows: Rows, place: int) -> int:
    """A range of lengths that nobody has yet, neither in `state` nor among `rows`.

    Ranges do not only grow: a slot's next occupant may be longer or shorter than its last one.
    """
    taken = state.ranges | {length // STRIDE for _, _, length in rows}
    free = (n for n in itertools.count(state.lowest) if n not in taken)
    return next(itertools.islice(free, place, None))


# -- admit and mixed -------------------------------------------------------------------------


def refuse_admit(state: State, operation: Operation, capabilities: Capabilities) -> str | None:
    assert isinstance(operation, Admit)
    if state.header.seeded:
        return "a decode server does not prefill"
    if capabilities.filters_first and state.unfiltered:
        return "requests that have ended have not been filtered out"
    refusal = _refuse_rows(state, operation.rows, operation.chunk)
    if refusal is not None:
        return refusal
    numbers = [number for number, _, _ in operation.rows]
    if operation.chunk is not None and operation.chunk not in numbers:
        return f"r{operation.chunk} is not in the batch"
    if state.chunked is not None and state.chunked.number not in numbers:
        return f"r{state.chunked.number} has an unfinished prompt, which is scheduled first"
    if state.header.kv_tokens:
        # A mixed batch's tails are prepared for a decode before.
        taken = kv.decode_pages(state) if isinstance(operation, Mixed) else 0
        return kv.refuse_rows(state, operation.rows, taken)
    return None


def _prefill(state: State, operation: Admit, effect: Effect) -> list[Request]:
    """The prefill's rows: each is given a token, that of the chunk for nobody."""
    batch = _come_in(state, operation.rows)
    for request in batch:
        kind = "chunk" if request.number == operation.chunk else "prefill"
        effect.tokens.append(state.write(request, kind))
        request.steps += 1
    state.chunked = state.live[operation.chunk] if operation.chunk is not None else None
    return batch


def apply_admit(state: State, operation: Operation) -> Effect:
    assert isinstance(operation, Admit)
    effect = Effect()
    state.prefill = _prefill(state, operation, effect)
    lengths_of(effect, state.prefill)
    state.launch(effect, state.prefill)
    return effect


def draw_admit(state: State, choose: Choices, capabilities: Capabilities) -> Operation | None:
    if state.prefill is not None or state.header.seeded:
        return None
    if capabilities.filters_first and state.unfiltered:
        return None
    rows = _draw_rows(state, choose)
    if rows is None:
        return None
    chunk = None
    if choose.below(5) == 4:
        number, _, _ = rows[choose.below(len(rows))]
        if state.chunked is None or number == state.chunked.number:
            chunk = number
    admit = Admit(tuple(rows), chunk)
    if chunk is not None and refuse_admit(state, admit, capabilities) is not None:
        return Admit(admit.rows)
    return admit


def refuse_mixed(state: State, operation: Operation, capabilities: Capabilities) -> str | None:
    assert isinstance(operation, Mixed)
    if not capabilities.mixed:
        return "the tree turns mixed prefill off for DFlash"
    if not state.running:
        return "there is no running batch to take along"
    if state.unfiltered:
        return "requests that have ended have not been filtered out"
    return (
        refuse_admit(state, operation, capabilities)
        or refuse_redundant(state, operation.redundant)
        or refuse_room(state, 1)
        or kv.refuse_decode(state, state.running, operation.redundant, capabilities)
    )


def refuse_redundant(state: State, numbers: Sequence[int]) -> str | None:
    """Why the last results of `numbers` cannot be in flight while they run once more."""
    for number in numbers:
        request = next((r for r in state.running if r.number == number), None)
        if request is None:
            return f"r{number} does not run"
        if not state.in_flight(request):
            return f"no result of r{number} is in flight that could be its last"
    return None


def refuse_room(state: State, tokens: int) -> str | None:
    """Why the running requests cannot grow by `tokens`."""
    for request in state.running:
        if request.length + tokens >= request.limit:
            return f"r{request.number} is at the end of its length range"
    return None


def describe_running(state: State, effect: Effect) -> None:
    """What a decode finds of the running batch when it is prepared."""
    effect.before = [r.length for r in state.running]
    effect.pending = [r.token for r in state.running]
    effect.committed = [r.committed for r in state.running]


def prepare_running(state: State, effect: Effect) -> None:
    """The running batch is prepared for a decode."""
    describe_running(state, effect)
    if state.header.kv_tokens:
        for request in state.running:
            request.allocated = kv.reserved(state, request)


def apply_mixed(state: State, operation: Operation) -> Effect:
    assert isinstance(operation, Mixed)
    effect = Effect()
    prepare_running(state, effect)
    tails, state.running = state.running, []
    batch = _prefill(state, operation, effect)
    for request in tails:
        request.length += 1
        effect.tokens.append(state.write(request, "mixed step"))
        request.steps += 1
    state.prefill = batch + tails
    lengths_of(effect, state.prefill)
    state.launch(effect, state.prefill, tails=len(tails))
    end_redundant(state, effect, tails, operation.redundant)
    return effect


def end_redundant(
    state: State, effect: Effect, requests: Sequence[Request], numbers: Sequence[int]
) -> None:
    """The results just processed were the last ones of `numbers`."""
    for request in requests:
        if request.number in numbers:
            effect.ended.append(request)
            state.end(request)


def draw_mixed(state: State, choose: Choices, capabilities: Capabilities) -> Operation | None:
    if not capabilities.mixed or not state.running or state.unfiltered:
        return None
    if len(state.ranges) > _LONGEST_MIXED or refuse_room(state, 1):
        return None
    admit = draw_admit(state, choose, capabilities)
    if not isinstance(admit, Admit):
        return None
    mixed = Mixed(admit.rows, admit.chunk, draw_redundant(state, choose))
    return None if refuse_mixed(state, mixed, capabilities) else mixed


def draw_redundant(state: State, choose: Choices) -> tuple[int, ...]:
    """Requests that have no room left, now and then one more whose last result is in flight."""
    full = kv.must_end(state)
    in_flight = [r.number for r in state.running if state.in_flight(r) and r.number not in full]
    if not in_flight or choose.below(6) != 5:
        return tuple(full)
    return (*full, in_flight[choose.below(len(in_flight))])


# -- seed ------------------------------------------------------------------------------------


def refuse_seed(state: State, operation: Operation, capabilities: Capabilities) -> str | None:
    assert isinstance(operation, Seed)
    if not capabilities.seed:
        return "the tree has no draft input for a DFlash request that was prefilled elsewhere"
    if not state.header.seeded:
        return "only a decode server is sent requests that were prefilled elsewhere"
    if state.header.kv_tokens:
        return "a decode server's slots are handed out by what receives a prompt: no pool does here"
    return _refuse_rows(state, operation.rows)


def apply_seed(state: State, operation: Operation) -> Effect:
    assert isinstance(operation, Seed)
    effect = Effect(in_flight=state.pending)
    state.prefill = _come_in(state, operation.rows)
    effect.tokens = [state.write(request, "seed") for request in state.prefill]
    for request in state.prefill:
        request.steps += 1
    lengths_of(effect, state.prefill)
    return effect


def draw_seed(state: State, choose: Choices, capabilities: Capabilities) -> Operation | None:
    if not capabilities.seed or not state.header.seeded or state.prefill is not None:
        return None
    rows = _draw_rows(state, choose)
    return Seed(tuple(rows)) if rows else None


# -- adopt, merge ----------------------------------------------------------------------------


def refuse_absorb(state: State, operation: Operation, _: Capabilities) -> str | None:
    if state.prefill is None:
        return "there is no prefill batch"
    if isinstance(operation, Adopt) and state.running:
        return "the running batch is not empty"
    if isinstance(operation, Merge) and not state.running:
        return "the running batch is empty"
    return None


def apply_absorb(state: State, operation: Operation) -> Effect:
    assert state.prefill is not None
    effect = Effect()
    for row, request in enumerate(state.prefill):
        if request is state.chunked:
            effect.left_out.append(row)  # keeps its slot, leaves the batch
        elif not request.finished:
            effect.keep.append(row)
    state.running = state.running + [state.prefill[row] for row in effect.keep]
    state.prefill = None
    lengths_of(effect, state.running)
    return effect


def draw_absorb(state: State, choose: Choices, _: Capabilities) -> Operation | None:
    if state.prefill is None:
        return None
    return Merge() if state.running else Adopt()
