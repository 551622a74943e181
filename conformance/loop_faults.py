"""Seeded faults of worker, scheduler, relay and kernels that the loop must find by itself.

As those of :mod:`conformance.faults`, whose parts they are made of; some are faults of that module
again, with what the loop, which never looks into a relay or a kernel, must say of them.
"""

from __future__ import annotations

from conformance import faults
from conformance.faults import DROP, At, Edit, Fault, before

_WORKER = "speculative.dflash_worker_v2"
_SCHEDULER = "managers.scheduler"
_PROCESSOR = "managers.scheduler_components.batch_result_processor"

_forward = At(_WORKER, "DFlashWorkerV2.forward_batch_generation")
_append = At(_WORKER, "DFlashWorkerV2._append_target_hidden_to_draft_kv_by_loc")
_next = At(_WORKER, "DFlashWorkerV2._make_next_draft_input_decode")
_plan = At(_SCHEDULER, "Scheduler.get_next_batch_to_run")
_run = At(_SCHEDULER, "Scheduler.run_batch")
_resolve = At(_PROCESSOR, "SchedulerBatchResultProcessor._resolve_spec_v2_tokens")
_ended = At(_PROCESSOR, "SchedulerBatchResultProcessor._handle_finish_state_updated_req")
_finish = At("managers.schedule_batch", "Req.update_finish_state")
_commit = At("mem_cache.memory_pool", "MHATokenToKVPool.set_kv_buffer_prefix_valid")

_KNOWN = {fault.name: fault for fault in (*faults.FAULTS, *faults.KERNEL_FAULTS)}

_WRONG = ("L1", "wrong-value")
_SLOW = ("L4", "lost-speed")
_TOKENS = (_WRONG, ("L1", "wrong-owner"), ("L1", "stale-read"), _SLOW)
"""What a token of the wrong place may look like, by what comes first."""


def _again(name: str, *expected: tuple[str, str]) -> Fault:
    """A fault of :mod:`conformance.faults`, as the loop sees it."""
    known = _KNOWN[name]
    first, *also = expected
    return Fault(f"loop-{name}", known.summary, known.edits, first, also=tuple(also))


LOOP_FAULTS: tuple[Fault, ...] = (
    # The text stays right, and only accept lengths fall: the worker, and what it writes.
    Fault(
        "draft-kv-not-written",
        "What a step committed is not written into the draft's KV cache.",
        (_forward("Expr", 34, DROP),),
        _SLOW,
    ),
    Fault(
        "draft-kv-lost-once",
        "What the twentieth launch committed is not written into the draft's KV cache.",
        (_forward("Expr", 34, "if batch.forward_iter != 20:\n    {0}"),),
        _SLOW,
    ),
    Fault(
        "prompt-draft-kv-not-written",
        "What a prefill read is not written into the draft's KV cache.",
        (_forward("Expr", 4, DROP),),
        _SLOW,
    ),
    Fault(
        "draft-kv-late",
        "What is written into the draft's KV cache is turned to the position after its own.",
        (_append("If", 0, before("positions = positions + 1")),),
        _SLOW,
    ),
    Fault(
        "draft-kv-one-less",
        "Of what a step committed the last token is not written into the draft's KV cache.",
        (_commit("If", 0, before("commit_lens = commit_lens - 1")),),
        _SLOW,
    ),
    Fault(
        "draft-reads-one-less",
        "The draft attends to one token less than the prefix has.",
        (_forward("Assign", 46, "{1} = {2} - 1"),),
        _SLOW,
    ),
    Fault(
        "draft-planned-short",
        "Where host lengths are known the draft's attention is planned for one token too few.",
        (_forward("Expr", 22, "seq_lens_cpu.sub_(1)"),),
        _SLOW,
    ),
    Fault(
        "drafts-of-the-row-before",
        "Every request's block is filled with the drafts of the request before.",
        (_forward("Expr", 28, "draft_tokens[:, 1:].copy_(draft_next.roll(1, 0))"),),
        _SLOW,
    ),
    Fault(
        "accept-at-most-one",
        "The kernel stops accepting after one draft.",
        (
            Edit(
                "sglang.kernels.ops.speculative.dflash",
                *("_dflash_accept_bonus_contig_kernel", "Assign", 13),
                "{1} = {2} & (col < 1)",
            ),
        ),
        _SLOW,
    ),
    # The worker.
    Fault(
        "verify-planned-short",
        "Where host lengths are known the target's attention is planned for one token too few.",
        (_forward("Assign", 86, "{1} = seq_lens_cpu_backup - 1"),),
        _WRONG,
        also=_TOKENS,
    ),
    Fault(
        "published-one-short",
        "A step publishes a length that is one too short.",
        (_forward("Expr", 33, "on_publish(new_seq_lens - 1)"),),
        _WRONG,
        also=_TOKENS,
    ),
    Fault(
        "bonus-of-the-row-before",
        "Every request goes on with the bonus token of the request before.",
        (
            _next(
                "Call",
                0,
                "make_draft_input_v2(bonus_tokens=bonus_tokens.roll(1), new_seq_lens=new_seq_lens)",
            ),
        ),
        _WRONG,
        also=_TOKENS,
    ),
    Fault(
        "alone-published-short",
        "A prefill of one request publishes a length that is one too short.",
        (_forward("Expr", 3, "on_publish(batch_output.new_seq_lens - int(len(batch.reqs) == 1))"),),
        ("L2", "wrong-value"),
        also=_TOKENS,
    ),
    # The scheduler, and what it makes of results.
    Fault(
        "synchronous-one-short",
        "Without overlap a step leaves a length that is one too short.",
        (_run("Assign", 35, "{1} = {2} - 1"),),
        ("L3", "wrong-value"),
        also=_TOKENS,
    ),
    Fault(
        "chunk-joins-the-decodes",
        "A request whose prompt goes on is decoded with the others.",
        (_plan("Expr", 5, DROP), _plan("Expr", 8, DROP)),
        ("L1", "unexpected-error"),
        also=_TOKENS,
    ),
    Fault(
        "nothing-stashed",
        "A step's tokens are not handed to the relay.",
        (_run("Call", 30, "None"),),
        _WRONG,
        also=_TOKENS,
    ),
    Fault(
        "results-of-the-place-before",
        "The tokens of a result are taken one place too early in the batch's output.",
        (
            _resolve(
                "Assign",
                11,
                "{1} = next_token_ids[max(0, i * stride - 1) : "
                "max(0, i * stride - 1) + accept_lens[i]]",
            ),
        ),
        _WRONG,
        also=_TOKENS,
    ),
    Fault(
        "committed-short",
        "The host counts one committed token less than a step brought.",
        (_resolve("AugAssign", 0, "req.kv.kv_committed_len += num_accept_tokens - 1"),),
        _WRONG,
        also=(*_TOKENS, ("K5", "leaked-slot"), ("L1", "unexpected-error")),
    ),
    Fault(
        "stop-only-at-the-end",
        "Only the last token of a block may end a request.",
        (_finish("Assign", 2, "{1} = self.output_ids[-1:]"),),
        ("L1", "past-end"),
    ),
    Fault(
        "never-released",
        "A request that has ended keeps its slots where it was stopped by a token.",
        (_ended("Expr", 9, "if isinstance(req.finished_reason, FINISH_MATCHED_TOKEN):\n    {0}"),),
        ("K5", "leaked-slot"),
        also=(("L1", "cut-short"), ("L1", "unexpected-error")),
    ),
    # The relay.
    _again("stash-reversed", *_TOKENS),
    _again("publish-reversed", *_TOKENS),
    _again("resolve-stale-token", *_TOKENS),
    _again("resolve-lengths-rolled", *_TOKENS, ("L1", "unexpected-error")),
    _again("merge-order-relayed", *_TOKENS),
    _again("filter-one-leaves", *_TOKENS, ("L1", "unexpected-error")),
    # Kernels.
    _again("prepare-position-late", *_TOKENS),
    _again("prepare-batch-row", *_TOKENS),
    _again("accept-after-mismatch", *_TOKENS),
    _again("accept-bonus-before", *_TOKENS),
)
"""Every fault, found by schedules alone."""
