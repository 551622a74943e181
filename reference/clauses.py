"""The numbered clauses: what must be true of the hand-over, one record each.

Numbers are stable: a clause may be retired, never renumbered. ``black_box`` clauses speak of
resolved values, shapes and errors; the others name buffers and fields of the tree, and are skipped
where the tree's are not recognised. ``since`` says what a tree must have for the clause to apply;
the surface probe decides, not a version.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Clause:
    """One statement of the specification.

    Attributes:
        number: stable name, for example ``R1``.
        statement: one sentence that needs no context.
        calls: the calls into the tree that the suite checks it at.
        source: where the statement comes from: functions of upstream, named below ``sglang.srt``
            (kernels below ``sglang``) as the newest release has them, and the public change that
            brought them where it is known; or "the protocol" and which part of it.
        needs: capability of the tree without which it does not apply, or "".
        black_box: whether it is stated without naming the tree's internals.
        wild: what it says of uses no scheduler path issues, or "".
        wild_calls: where the suite checks that.
    """

    number: str
    statement: str
    calls: tuple[str, ...]
    source: str
    needs: str = ""
    black_box: bool = True
    wild: str = ""
    wild_calls: tuple[str, ...] = ()


KERNEL_CALLS = (
    "kernel-prepare",
    "kernel-accept",
    "kernel-correct",
    "kernel-fused",
    "kernel-gather",
    "kernel-selector",
)
"""The calls at which kernels answer."""

_ALL = (
    Clause(
        "I1",
        "An idle draft input has zero rows and the dtype, rank, trailing dimensions and device "
        "of a live one.",
        ("idle-input",),
        source="speculative.dflash_info_v2.DFlashDraftInputV2.create_idle_input",
    ),
    Clause(
        "I2",
        "An idle draft input, as a step leaves it, is neutral for merge on either side.",
        ("law-neutral", "law-merge-idle"),
        source=(
            "the protocol: an idle step leaves a draft input of no rows, which "
            "managers.schedule_batch.ScheduleBatch.merge_batch may be given"
        ),
        wild="A raw idle draft input is neutral too, or merging it is a clear error.",
        wild_calls=("wild-merge-raw-idle-right", "wild-merge-raw-idle-left"),
    ),
    Clause(
        "I3",
        "Publishing or stashing zero rows changes nothing: no buffer, no event, no flag.",
        ("idle-signals",),
        source=(
            "managers.overlap_utils.FutureMap.publish and FutureMap.stash, which return early "
            "for zero rows"
        ),
        needs="idle",
        black_box=False,
    ),
    Clause(
        "I4",
        "Resolving a batch without draft input, or with zero rows, changes nothing and raises "
        "nothing.",
        ("idle-resolve", "admit-resolve", "resolve-nothing"),
        source=(
            "managers.overlap_utils.FutureMap.resolve_seq_lens_cpu and "
            "FutureMap._resolve_spec_extras, which return early"
        ),
        wild="Resolving a draft input without future_indices is a no-op or a clear error.",
        wild_calls=("wild-resolve-without-indices",),
    ),
    Clause(
        "I5",
        "An idle step, the first one included, leaves every other request's observations as they "
        "were.",
        ("idle",),
        source=(
            "the protocol: "
            "managers.scheduler_components.dp_attn.SchedulerDPAttnAdapter.get_idle_batch lets a "
            "rank without work take part in the others' step"
        ),
        needs="idle",
    ),
    Clause(
        "F1",
        "After a filter, row j is the former row keep[j].",
        ("filter", "retract", "absorb-filter", "law-filter", "law-permute", "preempt"),
        source=(
            "speculative.dflash_info_v2.DFlashDraftInputV2.filter_batch, as "
            "managers.schedule_batch.ScheduleBatch.filter_batch calls it"
        ),
        wild=(
            "Indices with duplicates, or none, give those rows in order or a clear error; an "
            "index out of range is a clear error."
        ),
        wild_calls=(
            "wild-filter-duplicates",
            "wild-filter-out-of-range",
            "wild-filter-nothing",
        ),
    ),
    Clause(
        "F2",
        "Host mirrors and their sums follow a filter.",
        ("law-filter", "law-permute"),
        source=(
            "speculative.dflash_info_v2.DFlashDraftInputV2.filter_batch (reserved_seq_lens_cpu, "
            "nxt_kv_lens_cpu and their sums)"
        ),
        black_box=False,
    ),
    Clause(
        "F3",
        "Filtering by a and then by b is filtering by a[b].",
        ("law-compose",),
        source=(
            "the protocol: a batch may be filtered more than once between two steps (results, "
            "retraction)"
        ),
    ),
    Clause(
        "F4",
        "Keeping every row is the identity.",
        ("law-keep-all",),
        source=(
            "managers.schedule_batch.ScheduleBatch.filter_batch, which leaves the draft input "
            "out if every row stays"
        ),
    ),
    Clause(
        "F5",
        "The host-index path of a filter agrees with its device-index path.",
        ("law-host-path",),
        source=(
            "speculative.dflash_info_v2.DFlashDraftInputV2.filter_batch(new_indices_cpu=); "
            "sgl-project/sglang#31468 by its aim"
        ),
        needs="host_index_filter",
    ),
    Clause(
        "F6",
        "A filter leaves the relay alone, and tensors that others hold keep their contents.",
        (
            "filter",
            "retract",
            "absorb-filter",
            "law-filter",
            "law-permute",
            "preempt",
            "mix",
            "copy",
            "results",
        ),
        source=(
            "the protocol: the relay goes by slot, and copies of a batch in the result queue "
            "(managers.schedule_batch.ScheduleBatch.copy) share its tensors"
        ),
        black_box=False,
    ),
    Clause(
        "F7",
        "Every attribute of a draft input, of the relay and of what it is handed, and every batch "
        "field with a value per row, is declared.",
        ("build", "prepare", "relay", "stash", "seed", "batch"),
        source=(
            "the protocol: what is not known to follow its rows through filter and merge may be "
            "lost there"
        ),
        black_box=False,
    ),
    Clause(
        "M1",
        "A merge has the left rows, then the right rows.",
        ("merge", "law-merge"),
        source=(
            "speculative.dflash_info_v2.DFlashDraftInputV2.merge_batch, as "
            "managers.schedule_batch.ScheduleBatch.merge_batch calls it"
        ),
    ),
    Clause(
        "M2",
        "Merging is associative.",
        ("law-associate",),
        source=(
            "the protocol: what a request is given does not depend on the order in which "
            "batches were joined"
        ),
    ),
    Clause(
        "M3",
        "Filtering distributes over merging.",
        ("law-distribute",),
        source="the protocol: a request may leave before or after its batch is joined to another",
    ),
    Clause(
        "M4",
        "Host mirrors and sums follow a merge when both sides have them.",
        ("law-merge",),
        source=(
            "speculative.dflash_info_v2.DFlashDraftInputV2.merge_batch, which refuses a left "
            "mirror without a right one"
        ),
        black_box=False,
        wild="A mirror on one side only never yields a wrong length.",
        wild_calls=("wild-mirror-left-only", "wild-mirror-right-only"),
    ),
    Clause(
        "M5",
        "A merge keeps the dtype of device fields and the values of host mirrors.",
        ("merge", "law-merge"),
        source=(
            "speculative.dflash_info_v2.DFlashDraftInputV2.merge_batch, which joins rows of one "
            "channel; sgl-project/sglang#29118"
        ),
    ),
    Clause(
        "M6",
        "A merge leaves its right operand unchanged and shares no storage with it.",
        ("merge", "law-merge", "mix"),
        source=(
            "the protocol: the result queue still reads the batch that was merged "
            "(managers.schedule_batch.ScheduleBatch.copy)"
        ),
    ),
    Clause(
        "M7",
        "A step never merges a relayed draft input with a stored one.",
        ("merge",),
        source=(
            "speculative.dflash_info_v2.DFlashDraftInputV2.merge_batch, which refuses relayed "
            "rows on the left without relayed rows on the right"
        ),
        wild="Merging a relayed draft input with a stored one is a clear error.",
        wild_calls=("wild-relayed-with-stored", "wild-stored-with-relayed"),
    ),
    Clause(
        "P1",
        "Publish and stash write exactly the addressed rows.",
        ("publish", "stash", "mixed-stash", "seed"),
        source=(
            "managers.overlap_utils.FutureMap.publish and FutureMap.stash; sgl-project/sglang#25879"
        ),
        needs="channels",
        black_box=False,
    ),
    Clause(
        "P2",
        "Publish and stash keep every other row and every other buffer.",
        ("publish", "stash", "mixed-stash", "seed"),
        source=(
            "managers.overlap_utils.FutureMap.publish and FutureMap.stash; sgl-project/sglang#25879"
        ),
        needs="channels",
        black_box=False,
    ),
    Clause(
        "P3",
        "The last write of a row before it is resolved wins.",
        ("publish", "stash", "mixed-stash", "seed"),
        source=(
            "the protocol: a step writes its rows once, behind the step before it on the same "
            "stream"
        ),
        needs="channels",
        black_box=False,
        wild=(
            "A row that one write is given two values for holds one of them, or it is a clear "
            "error."
        ),
        wild_calls=(
            "wild-publish-duplicates",
            "wild-stash-duplicates",
        ),
    ),
    Clause(
        "P4",
        "Token ids survive the relay exactly.",
        ("stash", "mixed-stash", "seed"),
        source=(
            "managers.overlap_utils.FutureMap.stash into output_tokens_buf; "
            "sgl-project/sglang#29118, which widens the channel to int64"
        ),
        needs="channels",
        black_box=False,
    ),
    Clause(
        "P5",
        "Relayed rows are copies: the source may be overwritten afterwards.",
        ("publish", "stash", "seed"),
        source=(
            "the protocol: "
            "speculative.dflash_worker_v2.DFlashWorkerV2._next_accept_bonus_buffers hands out "
            "two sets of buffers in turn"
        ),
        needs="channels",
        black_box=False,
    ),
    Clause(
        "P6",
        "Optional extras may first appear in any order; a partial stash keeps the rest.",
        ("mixed-stash", "seed"),
        source=(
            "managers.overlap_utils.FutureMap.stash_bonus_tokens, and "
            "speculative.dflash_disaggregation.build_dflash_disagg_draft_input, which stash "
            "tokens alone"
        ),
        needs="mixed",
        black_box=False,
    ),
    Clause(
        "P7",
        "Padding never reaches publish or stash.",
        ("publish", "stash", "mixed-stash", "seed"),
        source=(
            "the protocol: managers.scheduler.Scheduler.run_batch hands on the batch's own "
            "req_pool_indices, which the padding of a captured graph never enters"
        ),
        needs="channels",
        black_box=False,
        wild="Duplicates of the padding slot are harmless.",
        wild_calls=("wild-padding",),
    ),
    Clause(
        "P8",
        "The published length is the KV length, and the stashed token's position is that length.",
        ("build", "seed"),
        source=(
            "the protocol: managers.scheduler.Scheduler.run_batch has the worker publish, then "
            "builds on "
            "speculative.dflash_worker_v2.DFlashWorkerV2._make_next_draft_input_prefill and "
            "_make_next_draft_input_decode"
        ),
    ),
    Clause(
        "R1",
        "Every row receives its own request's last token.",
        ("resolve", "law-lookup", "mixed-resolve"),
        source=(
            "managers.overlap_utils.resolve_forward_inputs and FutureMap._resolve_spec_extras; "
            "sgl-project/sglang#29122"
        ),
    ),
    Clause(
        "R2",
        "Every row receives its own request's last length, from the token's step.",
        ("resolve", "law-lookup"),
        source="managers.overlap_utils.FutureMap.resolve_seq_lens_cpu; sgl-project/sglang#25879",
    ),
    Clause(
        "R3",
        "Resolved tokens and lengths have the channel's dtype, shape, device and contiguity.",
        ("resolve", "law-lookup", "mixed-resolve"),
        source=(
            "managers.overlap_utils.FutureMap.output_tokens_buf and new_seq_lens_buf; "
            "sgl-project/sglang#29118"
        ),
    ),
    Clause(
        "R4",
        "Resolved device values share no storage with the relay.",
        ("resolve",),
        source=(
            "the protocol: the next publish and stash may overwrite a row while its value is "
            "still in use"
        ),
        needs="channels",
        black_box=False,
    ),
    Clause(
        "R5",
        "A resolve leaves the relay unchanged; under debug it poisons exactly the consumed rows.",
        ("resolve", "mixed-resolve"),
        source=(
            "managers.overlap_utils._assert_nonneg_and_invalidate; sgl-project/sglang#26108, "
            "for lengths #30471"
        ),
        needs="channels",
        black_box=False,
    ),
    Clause(
        "R6",
        "Under debug, consuming a row twice without a write between raises.",
        ("consume-twice",),
        source=(
            "managers.overlap_utils._assert_nonneg_and_invalidate; sgl-project/sglang#26108, "
            "for lengths #30471"
        ),
        needs="debug",
        wild="A row that nobody ever wrote is refused.",
        wild_calls=("wild-resolve-unwritten",),
    ),
    Clause(
        "R7",
        "Host lengths equal the device's and their sum is right, or both are None; where they lag, "
        "committed <= true <= planning.",
        ("resolve", "prepare"),
        source=(
            "managers.overlap_utils.decide_needs_cpu_seq_lens, FutureMap.resolve_seq_lens_cpu; "
            "sgl-project/sglang#29232; "
            "speculative.dflash_info_v2.DFlashDraftInputV2.prepare_for_decode"
        ),
        wild=(
            "Preparing twice leaves the host's bounds as preparing once does, or is a clear error."
        ),
        wild_calls=("wild-prepare-twice",),
    ),
    Clause(
        "R8",
        "A reused slot never shows its former occupant.",
        ("resolve",),
        source=(
            "the protocol: a slot is given to a new request only after its former occupant's "
            "last step"
        ),
    ),
    Clause(
        "R9",
        "After filters and merges, future_indices, req_pool_indices and the order of requests "
        "agree.",
        ("filter", "retract", "merge", "absorb-filter", "preempt", "mix", "seed"),
        source=(
            "the protocol: managers.scheduler.Scheduler.run_batch sets future_indices to the "
            "batch's req_pool_indices; filter_batch and merge_batch of "
            "managers.schedule_batch.ScheduleBatch change both"
        ),
        wild=(
            "Where they disagree, tokens, device lengths and host lengths follow one order, or it "
            "is a clear error."
        ),
        wild_calls=("wild-permuted-indices",),
    ),
    Clause(
        "R10",
        "A mixed batch's decode tails take length, KV slot and prefix from the published length.",
        ("mix", "mixed-resolve"),
        source=(
            "managers.overlap_utils.FutureMap.resolve_mixed_spec_tails and "
            "managers.schedule_batch.ScheduleBatch.mix_with_running"
        ),
        needs="mixed",
    ),
    Clause(
        "R11",
        "After a step every batch field but spec_info and input_ids has its post-resolve value.",
        ("restore",),
        source="managers.scheduler.Scheduler._forward_isolation",
        needs="isolation",
        black_box=False,
    ),
    Clause(
        "R12",
        "Under debug, publishes and resolves alternate: the freshness assertion never fires.",
        ("resolve",),
        source=(
            "managers.overlap_utils.FutureMap.resolve_seq_lens_cpu and its _publish_fresh; "
            "sgl-project/sglang#30471"
        ),
        needs="freshness",
        black_box=False,
    ),
    Clause(
        "R13",
        "A seed waits for the forwards in flight before it writes its rows.",
        ("seed",),
        source=(
            "disaggregation.decode.SchedulerDisaggregationDecodeMixin.get_new_prebuilt_batch; "
            "sgl-project/sglang#35748"
        ),
        needs="seed",
        black_box=False,
    ),
    # KV lengths, on the tree's own pools and allocators.
    Clause(
        "K1",
        "Of every request, committed <= allocated <= reserved, and at a decode reserved >= "
        "committed + 2 blocks.",
        ("extend", "kv-prepare", "kv"),
        source=(
            "speculative.dflash_info_v2.DFlashDraftInputV2.prepare_for_decode; "
            "managers.scheduler_components.invariant_checker"
        ),
        needs="kv_pool",
        black_box=False,
    ),
    Clause(
        "K2",
        "What is reserved never exceeds the request's row.",
        ("extend", "kv-prepare"),
        source=(
            "mem_cache.allocation_sizing.get_req_to_token_extra_context_len; "
            "managers.scheduler_components.invariant_checker; sgl-project/sglang#33579"
        ),
        needs="kv_pool",
        black_box=False,
    ),
    Clause(
        "K3",
        "Only the newly reserved range of the request's own row changes.",
        ("extend", "kv-prepare", "kv"),
        source="mem_cache.allocation.assign_req_to_token_pool and write_cache_indices",
        needs="kv_pool",
        black_box=False,
    ),
    Clause(
        "K4",
        "The slots of a page follow each other from its start, and what is reserved for a decode "
        "is whole pages.",
        ("extend", "kv-prepare"),
        source=(
            "mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.alloc_extend and "
            "mem_cache.allocation_sizing.page_aligned_decode_alloc_lens; sgl-project/sglang#35265"
        ),
        needs="kv_pool",
        black_box=False,
    ),
    Clause(
        "K5",
        "Every slot and every row is free, or held by one request; what a request held is given "
        "back once.",
        ("extend", "kv-prepare", "release", "kv", "loop-house"),
        source=(
            "mem_cache.common.release_kv_cache; managers.scheduler_components.invariant_checker"
        ),
        needs="kv_pool",
        black_box=False,
    ),
    Clause(
        "K6",
        "No host bound that a decode is planned with is below the true length: planning_seq_lens "
        "(0.5.14), reserved_seq_lens (to 0.5.18), nxt_kv_lens (from 0.5.19).",
        ("kv-prepare",),
        source=(
            "speculative.dflash_worker_v2.DFlashWorkerV2, which plans with the draft input's host "
            "lengths where the batch has none"
        ),
        needs="kv_pool",
        black_box=False,
    ),
    Clause(
        "K7",
        "Preparing a decode does the same bookkeeping as for EAGLE: the eviction hook once, "
        "decode_batch_idx + 1 per request, and the last tokens to the penalizers.",
        ("law-bookkeeping", "law-penalties"),
        source=(
            "speculative.eagle_utils.eagle_prepare_for_decode; sgl-project/sglang#34924 and "
            "sgl-project/sglang#40244"
        ),
        needs="kv_pool",
        black_box=False,
    ),
    Clause(
        "K8",
        "After prepare, max_top_k covers every row and uniform_top_k_value is set only if all "
        "rows agree.",
        ("prepare", "kv-prepare"),
        source="speculative.dflash_info_v2.DFlashDraftInputV2.prepare_for_decode",
        black_box=False,
    ),
    Clause(
        "K9",
        "The scheduler's memory check lets a decode through exactly where its slots are found.",
        ("kv-prepare", "kv-check", "extend"),
        source="managers.schedule_batch.ScheduleBatch.check_decode_mem",
        needs="kv_pool",
    ),
    # The whole loop, greedy and without penalties.
    Clause(
        "L1",
        "Every request's output equals sequential greedy decoding.",
        ("loop-output",),
        source="the protocol: speculative decoding promises the target model's own output",
        needs="loop",
    ),
    Clause(
        "L2",
        "A request's output does not depend on who shares its batches.",
        ("loop-company",),
        source="the protocol: rows of a batch are independent",
        needs="loop",
    ),
    Clause(
        "L3",
        "Outputs are the same with overlap and without.",
        ("loop-overlap",),
        source=(
            "managers.scheduler.Scheduler.event_loop_overlap and event_loop_normal, which serve "
            "the same requests"
        ),
        needs="loop",
    ),
    Clause(
        "L4",
        "Every step accepts the drafts on which the networks agree.",
        ("loop-accept",),
        source=(
            "speculative.dflash_worker_v2.DFlashWorkerV2.forward_batch_generation: what is "
            "proposed depends on bonus token, lengths and what was written of the target's hidden "
            "states"
        ),
        needs="loop",
    ),
    # The kernels, for the arguments that the worker gives them; outside those, wild.
    Clause(
        "B1",
        "A block's ids are the bonus token, then mask tokens.",
        ("kernel-prepare",),
        source=(
            "kernels.ops.speculative.dflash._prepare_dflash_draft_block_unchecked; "
            "sgl-project/sglang#29228"
        ),
        needs="kernel_prepare",
        black_box=False,
    ),
    Clause(
        "B2",
        "A block's positions are prefix + column.",
        ("kernel-prepare",),
        source=(
            "kernels.ops.speculative.dflash._prepare_dflash_draft_block_unchecked; "
            "sgl-project/sglang#29228"
        ),
        needs="kernel_prepare",
        black_box=False,
    ),
    Clause(
        "B3",
        "A block's cache locations come from the request's row; past its width they are 0.",
        ("kernel-prepare",),
        source=(
            "kernels.ops.speculative.dflash._prepare_dflash_draft_block_unchecked; "
            "sgl-project/sglang#29228"
        ),
        needs="kernel_prepare",
        black_box=False,
    ),
    Clause(
        "B4",
        "The longest prefix of drafts that the target predicts is accepted; the bonus token is the "
        "target's next; the committed tokens are those, the new length prefix + commit.",
        ("kernel-accept", "kernel-correct", "kernel-fused"),
        source=(
            "kernels.ops.speculative.dflash.compute_dflash_correct_drafts_and_bonus and "
            "_compute_dflash_accept_bonus_triton_unchecked"
        ),
        needs="kernel_acceptance",
        black_box=False,
    ),
    Clause(
        "B5",
        "A gather returns exactly the addressed rows.",
        ("kernel-gather",),
        source=(
            "kernels.ops.speculative.gather_spec_extras.gather_spec_extras; "
            "sgl-project/sglang#27233"
        ),
        needs="kernel_gather",
        black_box=False,
    ),
    Clause(
        "B6",
        "The selector picks what torch.argmax picks, NaN included, or inverts the CDF; its choice "
        "is always a candidate.",
        ("kernel-selector",),
        source=(
            "kernels.ops.speculative.dflash.selector_walk_triton; sgl-project/sglang#35371, for "
            "NaN #40245"
        ),
        needs="kernel_selector",
        black_box=False,
    ),
    Clause(
        "B7",
        "A kernel writes all of its outputs and nothing else.",
        KERNEL_CALLS,
        source=(
            "the protocol: outputs are uninitialized or reused, and inputs are read again after "
            "the kernel"
        ),
        needs="kernels",
        black_box=False,
        wild="Arguments of a wrong shape or type are rejected before anything is written.",
        wild_calls=("kernel-misuse",),
    ),
    Clause(
        "B8",
        "Any stride and offset that a wrapper accepts gives the same answer.",
        ("kernel-layout",),
        source=(
            "the contiguity checks and stride arguments of the wrappers in "
            "kernels.ops.speculative.dflash"
        ),
        needs="kernels",
        black_box=False,
        wild="A layout that a kernel cannot read is rejected.",
        wild_calls=("kernel-misuse",),
    ),
    Clause(
        "B10",
        "A batch of no rows is a no-op, or a clear error.",
        ("kernel-nothing",),
        source=(
            "the wrappers in kernels.ops.speculative.dflash, which return early for no rows or "
            "refuse them"
        ),
        needs="kernels",
        black_box=False,
    ),
)

CLAUSES: dict[str, Clause] = {clause.number: clause for clause in _ALL}
"""All clauses by number, in declared order."""
