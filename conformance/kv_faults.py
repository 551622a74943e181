"""Seeded faults of the KV cache: lengths, pools, allocator and release, on traces with a KV pool.

As those of :mod:`conformance.faults`, whose parts they are made of.
"""

from __future__ import annotations

from conformance.faults import DROP, At, Fault, after, before

_DRAFT = "speculative.dflash_info_v2"
_ALLOCATION = "mem_cache.allocation"
_SIZING = "mem_cache.allocation_sizing"
_COMMON = "mem_cache.common"
_BATCH = "managers.schedule_batch"

_prepare = At(_DRAFT, "DFlashDraftInputV2.prepare_for_decode")
_lengths = At(_SIZING, "page_aligned_decode_alloc_lens")
_headroom = At(_SIZING, "get_req_to_token_extra_context_len")
_kernel = At(_ALLOCATION, "assign_req_to_token_pool")
_reserve = At(_ALLOCATION, "alloc_for_spec_decode")
_extend = At(_ALLOCATION, "alloc_for_extend")
_release = At(_COMMON, "release_kv_cache")
_release_reserve = At(_COMMON, "_release_overallocated_kv_indices")
_estimate = At(_BATCH, "ScheduleBatch._new_tokens_required_next_decode_spec_v2")
_owned = At(_BATCH, "Req.owned_kv_len")
_tokens = At("mem_cache.allocator.token", "TokenToKVPoolAllocator.alloc")
_free = At("mem_cache.allocator.token", "TokenToKVPoolAllocator.free")
_pages = At("mem_cache.allocator.paged", "PagedTokenToKVPoolAllocator.alloc_extend")
_free_pages = At("mem_cache.allocator.paged", "PagedTokenToKVPoolAllocator._release_page_ids")
_rows = At("mem_cache.memory_pool", "ReqToTokenPool.alloc")
_free_rows = At("mem_cache.memory_pool", "ReqToTokenPool.free_rows")
_new_pages = At("utils.common", "get_num_new_pages")

KV_FAULTS: tuple[Fault, ...] = (
    # What a decode reserves.
    Fault(
        "reserve-one-block",
        "A decode reserves one block ahead, which is the one in flight.",
        (_prepare("BinOp", 0, "1 * block_size"),),
        ("K1", "wrong-value"),
    ),
    Fault(
        "reserve-not-rounded",
        "What a decode reserves is not rounded up to a whole page.",
        (_lengths("BinOp", 2, "r.kv.kv_committed_len + reserve"),),
        ("K4", "wrong-value"),
    ),
    Fault(
        "reserve-from-allocated",
        "A decode that is given slots reserves from the allocated length, not the committed one.",
        (_lengths("BinOp", 6, "max(r.kv.kv_committed_len, cur - reserve // 2) + reserve"),),
        ("K2", "overrun"),
        also=(("K9", "unexpected-error"),),
    ),
    Fault(
        "row-without-headroom",
        "A row of the request pool is as long as the context.",
        (_headroom("Return", 0, "return 0"),),
        ("K2", "overrun"),
    ),
    Fault(
        "allocated-not-updated",
        "The allocated length stays what it was before the decode was given slots.",
        (_reserve("For", 0, DROP),),
        ("K1", "wrong-value"),
    ),
    Fault(
        "allocated-one-less",
        "A prefill records one slot less than it was given.",
        (_extend("Assign", 16, "{1} = {2} - 1"),),
        ("K1", "wrong-value"),
    ),
    Fault(
        "bound-lags-from-the-third-decode",
        "From the third decode on the bound that one is planned with is the committed length.",
        (
            _prepare(
                "Assign",
                30,
                "{1} = {2} if batch.reqs[0].decode_batch_idx < 3 else batch_seq_lens_cpu_t",
            ),
        ),
        ("K6", "wrong-value"),
        also=(("K1", "wrong-value"),),
    ),
    Fault(
        "bound-maximum-for-sum",
        "The sum of the bounds that a decode is planned with is their maximum.",
        (_prepare("AugAssign", 1, "nxt_kv_lens_sum = max(nxt_kv_lens_sum, nxt)"),),
        ("K6", "wrong-value"),
    ),
    # What is written to the table.
    Fault(
        "write-one-past",
        "A slot is written one position past the reserved range.",
        (_kernel("Compare", 2, "save_offset <= kv_end"),),
        ("K3", "phantom-row"),
    ),
    Fault(
        "write-neighbour-row",
        "A decode's slots are written to the row below the request's.",
        (_kernel("BinOp", 3, "(tl.load(req_pool_indices + pid) + 1) * pool_len"),),
        ("K3", "phantom-row"),
        also=(("K5", "wrong-owner"),),
    ),
    Fault(
        "write-first-slots-to-all",
        "Every row of a batch is given the slots that are the first row's.",
        (_kernel("BinOp", 8, "out_cache_loc"),),
        ("K5", "wrong-owner"),
        also=(("K4", "torn-page"),),
    ),
    # Pages.
    Fault(
        "page-not-continued",
        "A page that is partly filled goes on one slot too far.",
        (_reserve("Assign", 1, after("last_loc = last_loc + 1")),),
        ("K4", "torn-page"),
    ),
    Fault(
        "pages-not-taken",
        "A new page stays in the list of free pages.",
        (_pages("Assign", 5, "{1} = self.free_pages[max(0, num_new_pages - 1):]"),),
        ("K5", "double-free"),
    ),
    Fault(
        "pages-counted-short",
        "The number of new pages leaves out a last page that is not full.",
        (_new_pages("Assign", 1, "{1} = seq_lens // page_size"),),
        ("K5", "double-free"),
        also=(("K9", "unexpected-error"),),
    ),
    # What is given back.
    Fault(
        "free-twice",
        "What a request reserved ahead is given back twice.",
        (_release("Expr", 6, "{0}\n{0}"),),
        ("K5", "double-free"),
    ),
    Fault(
        "free-one-short",
        "Of what a request reserved ahead the last slot is not given back.",
        (_release_reserve("Tuple", 0, "(start_p, end_p - 1)"),),
        ("K5", "leaked-slot"),
    ),
    Fault(
        "free-without-the-reserve",
        "What a request reserved ahead is not given back.",
        (_release("Expr", 6, DROP),),
        ("K5", "leaked-slot"),
    ),
    Fault(
        "free-from-the-stop-token",
        "What is given back as reserved ahead starts behind the stop token and a page further on.",
        (_release_reserve("If", 1, "start_p = ceil_align(start_p + 1, page_size)"),),
        ("K5", "leaked-slot"),
    ),
    Fault(
        "free-past-the-stop-token-twice",
        "What a request has behind its stop token counts as its own and as reserved ahead.",
        (
            _release(
                "Expr", 4, before("kept = owned_kv_len\nowned_kv_len = req.kv.kv_committed_len")
            ),
            _release("Expr", 5, after("owned_kv_len = kept")),
        ),
        ("K5", "double-free"),
    ),
    Fault(
        "slots-handed-out-twice",
        "The allocator keeps the last slot that it hands out.",
        (_tokens("Assign", 1, "{1} = self.free_pages[max(0, need_size - 1):]"),),
        ("K5", "double-free"),
    ),
    Fault(
        "slots-freed-short",
        "Of the slots that come back one in a batch of several is dropped.",
        (
            _free(
                "Assign",
                1,
                "{1} = torch.cat((self.free_pages, free_index[: max(1, len(free_index) - 1)]))",
            ),
        ),
        ("K5", "leaked-slot"),
    ),
    Fault(
        "page-freed-with-neighbour",
        "The page after the last one that is given back is given back too.",
        (
            _free_pages(
                "Assign",
                0,
                "after = page_ids[-1][-1:] % self.num_pages + 1\n"
                "{1} = torch.cat((*page_ids, after, self.free_pages))",
            ),
        ),
        ("K5", "double-free"),
    ),
    Fault(
        "row-not-freed",
        "The row of a request that has ended is not given back.",
        (_free_rows("Expr", 1, DROP),),
        ("K5", "leaked-slot"),
    ),
    Fault(
        "chunk-takes-a-new-row",
        "A later chunk of a prompt is given a row of its own.",
        (
            _rows("Assign", 0, "{1} = []"),
            _rows(
                "If", 1, "if True:\n    r.kv.req_pool_idx = select_index[offset]\n    offset += 1"
            ),
        ),
        ("K9", "unexpected-error"),
    ),
    # What the scheduler asks before.
    Fault(
        "estimate-half",
        "The memory check counts half of the tokens that a decode takes.",
        (_estimate("Return", 0, "return total // 2"),),
        ("K9", "wrong-value"),
        also=(("K9", "unexpected-error"),),
    ),
    Fault(
        "estimate-a-page-more",
        "The memory check wants a page per request more than a decode takes.",
        (_estimate("Return", 0, "return total + page_size * len(requests)"),),
        ("K9", "wrong-value"),
    ),
    # Bookkeeping.
    Fault(
        "hook-skipped",
        "The sliding-window eviction hook is not called.",
        (_prepare("Expr", 1, DROP),),
        ("K7", "lost-update"),
    ),
    Fault(
        "hook-twice",
        "The sliding-window eviction hook is called twice.",
        (_prepare("Expr", 1, "{0}\n{0}"),),
        ("K7", "lost-update"),
    ),
    Fault(
        "decodes-counted-once-a-batch",
        "A decode is counted for the first request of the batch only.",
        (_prepare("AugAssign", 2, "if req is batch.reqs[0]:\n    {0}"),),
        ("K7", "lost-update"),
    ),
    Fault(
        "penalizers-fed",
        "The last tokens are handed to the penalizers, as they should be.",
        (
            _prepare(
                "Expr",
                1,
                after(
                    "if batch.sampling_info.penalizer_orchestrator.is_required:\n"
                    "    batch.cumulate_penalty_output_tokens()"
                ),
            ),
        ),
        ("K7", "missing-row"),
        mends=True,
    ),
    Fault(
        "top-k-of-the-last",
        "The largest top_k is the last request's.",
        (_prepare("If", 2, "max_top_k = top_k"),),
        ("K8", "wrong-value"),
    ),
    Fault(
        "top-k-uniform-in-spite",
        "The uniform top_k is set although a later request asks for another.",
        (_prepare("Assign", 21, DROP),),
        ("K8", "wrong-value"),
    ),
)
"""Every seeded fault that takes a KV pool to show."""
