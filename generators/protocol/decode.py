"""The rules by which requests run and leave: step, results, filter, retract, preempt, idle.

For each operation: why it is illegal in a state, what it does, how it is drawn.
"""

from __future__ import annotations

from generators.operations import Filter, Finish, Idle, Operation, Preempt, Retract, Step, Sync
from generators.protocol import kv
from generators.protocol.prefill import (
    draw_redundant,
    end_redundant,
    prepare_running,
    refuse_redundant,
)
from generators.protocol.state import Capabilities, Choices, Effect, Request, State, lengths_of

_UNMERGED = "the last prefill batch has not been merged yet"
_UNFILTERED = "requests that have ended have not been filtered out"
_EMPTY = "the running batch is empty"
_CHUNK_FIRST = "an unfinished prompt is scheduled first"


# -- step ------------------------------------------------------------------------------------


def _chunk_first(state: State, capabilities: Capabilities) -> bool:
    """Whether an unfinished prompt must be scheduled before anything decodes."""
    return state.chunked is not None and not capabilities.defers_prefill


def refuse_step(state: State, operation: Operation, capabilities: Capabilities) -> str | None:
    assert isinstance(operation, Step)
    if state.prefill is not None:
        return _UNMERGED
    if _chunk_first(state, capabilities):
        return _CHUNK_FIRST
    if not state.running:
        return _EMPTY
    if state.unfiltered:
        return _UNFILTERED
    if len(operation.accepted) != len(state.running):
        return f"{len(state.running)} rows run, not {len(operation.accepted)}"
    for request, accepted in zip(state.running, operation.accepted, strict=True):
        if not 0 <= accepted < state.header.block:
            return f"{accepted} accepted drafts do not fit a block of {state.header.block}"
        if request.length + accepted + 1 >= request.limit:
            return f"r{request.number} is at the end of its length range"
    return refuse_redundant(state, operation.redundant) or kv.refuse_decode(
        state, state.running, operation.redundant, capabilities
    )


def apply_step(state: State, operation: Operation) -> Effect:
    assert isinstance(operation, Step)
    effect = Effect()
    prepare_running(state, effect)
    for request, accepted in zip(state.running, operation.accepted, strict=True):
        request.length += accepted + 1
        redundant = request.number in operation.redundant
        effect.tokens.append(state.write(request, "redundant step" if redundant else "step"))
        request.steps += 1
    state.decoded, state.retracting = True, False
    lengths_of(effect, state.running)
    state.launch(effect, list(state.running))
    end_redundant(state, effect, state.running, operation.redundant)
    return effect


def _may_grow(state: State) -> bool:
    """Whether every running request has room for a whole block in its length range."""
    return all(r.length + state.header.block < r.limit for r in state.running)


def draw_step(state: State, choose: Choices, capabilities: Capabilities) -> Operation | None:
    if state.prefill is not None or not state.running or _chunk_first(state, capabilities):
        return None
    block = state.header.block
    if state.unfiltered or not _may_grow(state):
        return None
    style = choose.below(4)
    if style == 3 and state.header.kv_tokens:
        accepted = kv.up_to_the_longest(state)
    elif style == 0:
        accepted = (0,) * len(state.running)
    elif style == 1:
        accepted = (block - 1,) * len(state.running)
    else:
        tape = choose.below(1 << 30)
        accepted = tuple((tape >> (3 * i % 27)) % block for i in range(len(state.running)))
    step = Step(accepted, draw_redundant(state, choose))
    return None if kv.refuse_decode(state, state.running, step.redundant, capabilities) else step


# -- results: sync, finish -------------------------------------------------------------------


def refuse_sync(state: State, operation: Operation, _: Capabilities) -> str | None:
    if state.prefill is not None:
        return _UNMERGED
    return None if state.pending else "no result is in flight"


def apply_sync(state: State, operation: Operation) -> Effect:
    effect = Effect()
    state.land(effect)
    return effect


def draw_sync(state: State, choose: Choices, _: Capabilities) -> Operation | None:
    return Sync() if state.pending and state.prefill is None else None


def refuse_finish(state: State, operation: Operation, _: Capabilities) -> str | None:
    assert isinstance(operation, Finish)
    request = state.live.get(operation.request)
    if request is None:
        return f"r{operation.request} does not run"
    if request is state.chunked:
        return None  # its client gave up
    if not any(request is other for other in state.rows()):
        return f"r{operation.request} does not run"
    if state.in_flight(request):
        return f"the host has yet to process the last result of r{operation.request}"
    return None


def apply_finish(state: State, operation: Operation) -> Effect:
    assert isinstance(operation, Finish)
    request = state.live[operation.request]
    if request is state.chunked:
        state.chunked = None
    state.end(request)
    return Effect(ended=[request])


def draw_finish(state: State, choose: Choices, _: Capabilities) -> Operation | None:
    rows = [r for r in state.rows() if not r.finished and not state.in_flight(r)]
    if state.chunked is not None and not choose.below(4):
        rows = [state.chunked]
    return Finish(rows[choose.below(len(rows))].number) if rows else None


# -- filter, retract, preempt ----------------------------------------------------------------


def _refuse_filtering(
    state: State, capabilities: Capabilities, *, always: bool = False
) -> str | None:
    """Why the running batch is not filtered; `always` where a scheduler does before anything."""
    if not state.running:
        return _EMPTY
    if state.prefill is not None:
        return _UNMERGED
    if _chunk_first(state, capabilities) and not always:
        return _CHUNK_FIRST
    return None


def refuse_filter(state: State, operation: Operation, capabilities: Capabilities) -> str | None:
    assert isinstance(operation, Filter)
    if operation.leaving:
        if not capabilities.skips_finishing or state.header.seeded:
            return "the loop decodes a request until it knows that it has ended"
        running = {r.number: r for r in state.running if not r.finished}
        for number in operation.leaving:
            if number not in running or not state.in_flight(running[number]):
                return f"no result of r{number} is in flight that could be its last"
    return _refuse_filtering(state, capabilities, always=capabilities.filters_first)


def _keep(state: State, effect: Effect) -> Effect:
    """The running batch keeps the effect's rows."""
    state.running = [state.running[i] for i in effect.keep]
    lengths_of(effect, state.running)
    return effect


def apply_filter(state: State, operation: Operation) -> Effect:
    assert isinstance(operation, Filter)
    effect = Effect()
    for row, request in enumerate(state.running):
        if request.finished:
            continue
        if request.number in operation.leaving:
            state.leaving.append(request)
            effect.left_out.append(row)
        else:
            effect.keep.append(row)
    return _keep(state, effect)


def draw_filter(state: State, choose: Choices, capabilities: Capabilities) -> Operation | None:
    if refuse_filter(state, Filter(), capabilities) is not None:
        return None
    leaving: tuple[int, ...] = ()
    if capabilities.skips_finishing and not state.header.seeded and choose.below(2):
        rows = [r.number for r in state.running if not r.finished and state.in_flight(r)]
        leaving = (rows[choose.below(len(rows))],) if rows else ()
    return Filter(leaving)


def _retract(state: State, request: Request) -> None:
    state.retracted.append(request.number)
    state.whole[request.number] = request.known
    state.release(request)


def refuse_retract(state: State, operation: Operation, capabilities: Capabilities) -> str | None:
    assert isinstance(operation, Retract)
    refusal = _refuse_filtering(state, capabilities)
    if refusal is not None:
        return refusal
    if state.unfiltered:
        return _UNFILTERED
    numbers = [r.number for r in state.running]
    if len(set(operation.keep)) != len(operation.keep) or not set(operation.keep) <= set(numbers):
        return "it keeps requests that do not run"
    if not operation.keep or len(operation.keep) == len(numbers):
        return "it keeps at least one request and retracts at least one"
    if state.header.kv_tokens and state.leaving:
        return "requests finish in flight, and what they hold is waited for"
    kept = [r for r in state.running if r.number in operation.keep]
    gone = [r for r in state.running if r.number not in operation.keep]
    return kv.refuse_decode(state, kept, kv.must_end(state), capabilities, kv.held(state, gone))


def apply_retract(state: State, operation: Operation) -> Effect:
    assert isinstance(operation, Retract)
    rows = {r.number: i for i, r in enumerate(state.running)}
    fits = not state.header.kv_tokens or kv.fits(state)
    for request in state.running:
        if request.number not in operation.keep:
            _retract(state, request)
    state.retracting = True
    return _keep(state, Effect(keep=[rows[number] for number in operation.keep], fits=fits))


def draw_retract(state: State, choose: Choices, capabilities: Capabilities) -> Operation | None:
    if _refuse_filtering(state, capabilities) is not None or state.unfiltered:
        return None
    if len(state.running) < 2 or not _may_grow(state):
        return None
    rows = [r.number for r in state.running]
    kept = []
    # The scheduler sorts by progress before it drops from the end: any order can come out.
    for _ in range(1 + choose.below(len(rows) - 1)):
        kept.append(rows.pop(choose.below(len(rows))))
    while len(kept) > 1 and refuse_retract(state, Retract(tuple(kept)), capabilities):
        kept.pop()
    retract = Retract(tuple(kept))
    return None if refuse_retract(state, retract, capabilities) else retract


def refuse_preempt(state: State, operation: Operation, capabilities: Capabilities) -> str | None:
    assert isinstance(operation, Preempt)
    if state.header.seeded:
        return "a decode server does not prefill, so nothing is preempted"
    if not state.running:
        return _EMPTY
    if state.prefill is not None:
        return _UNMERGED
    if capabilities.filters_first and state.unfiltered:
        return _UNFILTERED
    running = {r.number for r in state.running if not r.finished}
    if not operation.gone or len(set(operation.gone)) != len(operation.gone):
        return "it preempts at least one request, each once"
    if not set(operation.gone) <= running:
        return "it preempts requests that do not run"
    return None


def apply_preempt(state: State, operation: Operation) -> Effect:
    assert isinstance(operation, Preempt)
    effect = Effect()
    for row, request in enumerate(state.running):
        if request.number in operation.gone and not request.finished:
            _retract(state, request)
        else:
            effect.keep.append(row)
    return _keep(state, effect)


def draw_preempt(state: State, choose: Choices, capabilities: Capabilities) -> Operation | None:
    running = [r.number for r in state.running if not r.finished]
    if not running or state.prefill is not None or state.header.seeded:
        return None
    if capabilities.filters_first and state.unfiltered:
        return None
    gone = {running[choose.below(len(running))] for _ in range(1 + choose.below(3))}
    return Preempt(tuple(sorted(gone)))


# -- idle ------------------------------------------------------------------------------------


def refuse_idle(state: State, operation: Operation, capabilities: Capabilities) -> str | None:
    assert isinstance(operation, Idle)
    if operation.during not in ("prefill", "decode"):
        return f"idle during {operation.during!r} does not exist"
    if not capabilities.idle:
        return "the tree refuses DP attention with DFlash, so no idle batch occurs"
    if state.prefill is not None:
        return _UNMERGED
    if state.chunked is not None:
        return _CHUNK_FIRST
    if operation.during == "decode" and state.running:
        return "a rank with running requests decodes when the others do"
    if operation.during == "prefill" and state.header.seeded:
        return "a decode server does not prefill"
    return None


def apply_idle(state: State, operation: Operation) -> Effect:
    effect = Effect()
    state.launch(effect, [])
    return effect


def draw_idle(state: State, choose: Choices, capabilities: Capabilities) -> Operation | None:
    if not capabilities.idle or state.prefill is not None or state.chunked is not None:
        return None
    if state.running:
        return None if state.header.seeded else Idle("prefill")
    return Idle("decode" if state.header.seeded else ("decode", "prefill")[choose.below(2)])
