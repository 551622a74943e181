"""States worth reaching."""

from __future__ import annotations

from collections.abc import Callable

from generators.operations import (
    Admit,
    Adopt,
    Filter,
    Finish,
    Idle,
    Merge,
    Mixed,
    Operation,
    Preempt,
    Retract,
    Seed,
    Step,
)
from generators.protocol import kv
from generators.protocol.state import State

SITUATIONS: dict[str, str] = {
    "first step": "the first decode of all",
    "one row": "a decode of one row",
    "many rows": "a decode of 16 rows or more",
    "full pool": "a decode with every slot taken",
    "reused slot": "a request is admitted to a slot that another one left",
    "early reuse": "a slot is given away while its former row is still in the running batch",
    "generation": "a retracted request is admitted again",
    "chunk in a batch": "an unfinished prompt shares its batch with others",
    "given up": "a request ends in the middle of its prompt",
    "lagging tail": "a mixed batch takes along a row whose length the host does not know yet",
    "skipped step": "a prefill runs while the running batch waits",
    "emptied batch": "the last row leaves the running batch",
    "all preempted": "no row of the running batch outlives a preemption",
    "emptied prefill": "no row of a prefill batch reaches the running batch",
    "idle first": "an idle step before any other",
}
"""States worth reaching, and what each means."""

KV_SITUATIONS: dict[str, str] = {
    "longest request": "a decode of a request that is as long as it may become",
    "last pages": "a decode leaves the KV pool with fewer free pages than it has rows",
    "pool too small": "requests are retracted because the KV pool has no pages for a decode",
    "stop inside a block": "a request ends with tokens behind the one that it stops at",
}
"""The same where there is a KV pool."""


def situations(state: State, operation: Operation) -> list[str]:
    """Which of :data:`SITUATIONS` the operation is about to reach in `state`."""
    look = _LOOK.get(type(operation))
    return look(state, operation) if look is not None else []


def _at_step(state: State, operation: Operation) -> list[str]:
    rows = len(state.running)
    found = [] if state.decoded else ["first step"]
    if rows == 1:
        found.append("one row")
    elif rows >= 16:
        found.append("many rows")
    if not state.free:
        found.append("full pool")
    if state.header.kv_tokens:
        longest = kv.longest_decoding(state.header)
        if any(request.committed == longest for request in state.running):
            found.append("longest request")
        taken = kv.decode_pages(state)
        if taken and kv.free_pages(state) - taken < rows:
            found.append("last pages")
    return found


def _at_retract(state: State, operation: Operation) -> list[str]:
    return ["pool too small"] if state.header.kv_tokens and not kv.fits(state) else []


def _at_arrival(state: State, operation: Operation) -> list[str]:
    assert isinstance(operation, Admit | Seed)
    found = ["skipped step"] if state.running and not isinstance(operation, Mixed) else []
    fresh = [(number, slot) for number, slot, _ in operation.rows if number not in state.live]
    if any(slot in state.used for _, slot in fresh):
        found.append("reused slot")
    if {slot for _, slot in fresh} & {r.slot for r in state.running if r.finished}:
        found.append("early reuse")
    if any(number in state.generations for number, _ in fresh):
        found.append("generation")
    if isinstance(operation, Admit) and operation.chunk is not None and len(operation.rows) > 1:
        found.append("chunk in a batch")
    if isinstance(operation, Mixed) and any(r.committed != r.length for r in state.running):
        found.append("lagging tail")
    return found


def _at_finish(state: State, operation: Operation) -> list[str]:
    assert isinstance(operation, Finish)
    request = state.live.get(operation.request)
    found = ["given up"] if request is state.chunked else []
    if state.header.kv_tokens and request is not None and request.past_stop:
        found.append("stop inside a block")
    return found


def _at_filter(state: State, operation: Operation) -> list[str]:
    assert isinstance(operation, Filter)
    leave = (r.finished or r.number in operation.leaving for r in state.running)
    return ["emptied batch"] if all(leave) else []


def _at_preempt(state: State, operation: Operation) -> list[str]:
    assert isinstance(operation, Preempt)
    return ["all preempted"] if len(operation.gone) == len(state.running) else []


def _at_absorb(state: State, operation: Operation) -> list[str]:
    leave = all(r.finished or r is state.chunked for r in state.prefill or ())
    return ["emptied prefill"] if leave else []


def _at_idle(state: State, operation: Operation) -> list[str]:
    return [] if state.operations else ["idle first"]


_LOOK: dict[type[Operation], Callable[[State, Operation], list[str]]] = {
    Step: _at_step,
    Admit: _at_arrival,
    Mixed: _at_arrival,
    Seed: _at_arrival,
    Finish: _at_finish,
    Filter: _at_filter,
    Retract: _at_retract,
    Preempt: _at_preempt,
    Adopt: _at_absorb,
    Merge: _at_absorb,
    Idle: _at_idle,
}
