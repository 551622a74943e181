"""The state machine of the overlapped loop: what may happen next, and what it does.

:class:`State` replays the scheduler's bookkeeping in plain Python. :func:`apply` advances it by one
operation and returns an :class:`Effect`: rows, slots, lengths and token values, which the players
(the tree's driver and the reference model) both carry out. :func:`draw` invents the next operation
from a source of choices; :func:`refusal` says why an operation is not legal. The rules and the code
paths that issue each operation are in :data:`RULES`, one record per operation.

Legal means: some path of the scheduler issues it, with this tree's own argument checks.

With overlap the host processes the result of a launch when the next one has been launched. Until
then it does not know what was accepted, and cannot know that a request has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from generators.operations import Adopt, Finish, Merge, Operation, Sync, Trace
from generators.protocol import checks, decode, kv, prefill
from generators.protocol.situations import KV_SITUATIONS, SITUATIONS, situations
from generators.protocol.state import (
    Capabilities,
    Choices,
    Effect,
    IllegalOperation,
    Request,
    State,
)

__all__ = [
    "KV_SITUATIONS",
    "RULES",
    "SITUATIONS",
    "Capabilities",
    "Choices",
    "Effect",
    "IllegalOperation",
    "Request",
    "Rule",
    "State",
    "apply",
    "check",
    "draw",
    "refusal",
    "situations",
]


@dataclass(frozen=True)
class Rule:
    """One operation's place in the protocol.

    Attributes:
        refuse: why an operation is illegal in a state, or None.
        apply: its effect.
        draw: invents one from choices, or None where it is not enabled.
        weight: how often it is tried by the random generator, relative to the others.
        evidence: the code path that issues it, and the check that forbids it.
    """

    refuse: Callable[[State, Operation, Capabilities], str | None]
    apply: Callable[[State, Operation], Effect]
    draw: Callable[[State, Choices, Capabilities], Operation | None]
    weight: int
    evidence: str


RULES: dict[str, Rule] = {
    "step": Rule(
        decode.refuse_step,
        decode.apply_step,
        decode.draw_step,
        10,
        "Scheduler.update_running_batch -> ScheduleBatch.prepare_for_decode -> run_batch; results "
        "are processed after the next launch, hence the redundant step; between two chunks of a "
        "prompt only where Scheduler._should_defer_prefill exists",
    ),
    "admit": Rule(
        prefill.refuse_admit,
        prefill.apply_admit,
        prefill.draw_admit,
        5,
        "Scheduler.get_new_batch_prefill; an unfinished prompt (chunked_req) is scheduled first "
        "and leaves the batch before the merge; get_num_allocatable_reqs bounds the rows; not on "
        "a decode server "
        "(get_next_disagg_decode_batch_to_run)",
    ),
    "mixed": Rule(
        prefill.refuse_mixed,
        prefill.apply_mixed,
        prefill.draw_mixed,
        3,
        "Scheduler.get_new_batch_prefill -> ScheduleBatch.mix_with_running with mixed chunked "
        "prefill on; forbidden where SpeculativeAlgorithm.supports_mixed_chunk is missing or says "
        "no, because the argument checks then turn it off",
    ),
    "seed": Rule(
        prefill.refuse_seed,
        prefill.apply_seed,
        prefill.draw_seed,
        8,
        "SchedulerDisaggregationDecodeMixin.get_new_prebuilt_batch -> "
        "ScheduleBatch.process_prebuilt; forbidden where "
        "SpeculativeAlgorithm.build_disagg_draft_input makes no draft input for DFlash",
    ),
    "adopt": Rule(
        prefill.refuse_absorb,
        prefill.apply_absorb,
        prefill.draw_absorb,
        12,
        "Scheduler.get_next_batch_to_run: an empty running batch is replaced by the last prefill "
        "batch without a merge call",
    ),
    "merge": Rule(
        prefill.refuse_absorb,
        prefill.apply_absorb,
        prefill.draw_absorb,
        12,
        "Scheduler.get_next_batch_to_run: last_batch.filter_batch, then running.merge_batch",
    ),
    "sync": Rule(
        decode.refuse_sync,
        decode.apply_sync,
        decode.draw_sync,
        2,
        "an iteration of event_loop_overlap in which no batch can run, and pause_generation; with "
        "SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP also Scheduler.is_disable_overlap_for_batch, "
        "though between forming and launching the second of two prefills",
    ),
    "finish": Rule(
        decode.refuse_finish,
        decode.apply_finish,
        decode.draw_finish,
        4,
        "BatchResultProcessor: a request ends, and its slot is freed, when its last result is "
        "processed; process_pending_chunked_abort for one in the middle of its prompt",
    ),
    "filter": Rule(
        decode.refuse_filter,
        decode.apply_filter,
        decode.draw_filter,
        1,
        "Scheduler.update_running_batch, and where get_next_batch_to_run does, every iteration: "
        "running.filter_batch; without requests that finish in flight where "
        "Scheduler._reqs_finishing_inflight exists, in event_loop_overlap only",
    ),
    "retract": Rule(
        decode.refuse_retract,
        decode.apply_retract,
        decode.draw_retract,
        1,
        "ScheduleBatch.retract_decode filters with sorted keep_indices: rows may change order; "
        "update_running_batch then prepares and runs what is left",
    ),
    "preempt": Rule(
        decode.refuse_preempt,
        decode.apply_preempt,
        decode.draw_preempt,
        1,
        "PrefillAdder.preempt_to_schedule filters the running batch while a prefill is formed, "
        "whether or not requests that have ended are still in it",
    ),
    "idle": Rule(
        decode.refuse_idle,
        decode.apply_idle,
        decode.draw_idle,
        2,
        "scheduler_components/dp_attn.py get_idle_batch: a rank without prefill idles while "
        "others prefill, a rank without requests while others decode; forbidden where "
        "speculative_hook._handle_dflash refuses DP attention",
    ),
    "law": Rule(
        checks.refuse_law,
        checks.apply_nothing,
        checks.draw_law,
        4,
        "the contract of DFlashDraftInputV2.filter_batch and merge_batch as ScheduleBatch "
        "calls them, on copies",
    ),
    "wild": Rule(
        checks.refuse_wild,
        checks.apply_nothing,
        checks.draw_wild,
        1,
        "no scheduler path; the API accepts it",
    ),
}


def refusal(state: State, operation: Operation, capabilities: Capabilities) -> str | None:
    """Why `operation` is not legal in `state` on a tree with `capabilities`; None if it is."""
    if state.retracting and operation.op not in ("step", "law", "wild"):
        return "what was not retracted decodes first"
    return RULES[operation.op].refuse(state, operation, capabilities)


def apply(state: State, operation: Operation) -> Effect:
    """Advance `state` by a legal operation. Raises nothing on legal input."""
    effect = RULES[operation.op].apply(state, operation)
    state.operations += 1
    return effect


_WHEEL = [name for name, rule in RULES.items() for _ in range(rule.weight)]
_TRIES = 4


def draw(
    state: State, choose: Choices, capabilities: Capabilities, *, wild: bool = False
) -> Operation:
    """The next operation, legal in `state` (with `wild`, now and then one that is not)."""
    if state.retracting:
        step = decode.draw_step(state, choose, capabilities)
        assert step is not None
        return step
    if state.prefill is not None and choose.below(4):
        return Merge() if state.running else Adopt()
    over = kv.ends_first(state)
    if over and not state.in_flight(over[0]):
        return Finish(over[0].number)
    if kv.at_the_longest(state) and state.prefill is None and choose.below(2):
        return Sync()  # so that it is decoded once more
    if state.header.kv_tokens and state.running and not kv.fits(state) and choose.below(2):
        retract = decode.draw_retract(state, choose, capabilities)
        if retract is not None:
            return retract
    if state.unfiltered and choose.below(2):
        filtered = decode.draw_filter(state, choose, capabilities)
        if filtered is not None:
            return filtered
    for _ in range(_TRIES):
        name = _WHEEL[choose.below(len(_WHEEL))]
        if name == "wild" and not wild:
            continue
        operation = RULES[name].draw(state, choose, capabilities)
        if operation is not None:
            return operation
    for name, rule in RULES.items():
        operation = rule.draw(state, choose, capabilities) if name != "wild" else None
        if operation is not None:
            return operation
    raise AssertionError("no operation is enabled")


def check(trace: Trace, capabilities: Capabilities) -> None:
    """Raise :class:`IllegalOperation` at the first operation the protocol forbids."""
    state = State(trace.header)
    for number, operation in enumerate(trace.operations, 1):
        refused = refusal(state, operation, capabilities)
        if refused is not None:
            raise IllegalOperation(f"operation {number} ({operation.line()}): {refused}")
        apply(state, operation)
