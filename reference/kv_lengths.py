"""Lengths of a request in the KV cache, in tokens.

The host knows three of them: *committed* (what the cache is known to hold; with overlap it lags by
one step), *allocated* (positions of the request's row of ``req_to_token`` that have a KV slot) and
*reserved* (what is allocated for the next decode, ahead of what it needs). Slots come in pages.

Source: DESIGN section 5, "KV lengths"; sglang.srt.mem_cache.allocation_sizing (0.5.19).
"""

from __future__ import annotations

BLOCKS_AHEAD = 2
"""Blocks reserved beyond the committed length: one for the step that the host does not know of
yet, one for the step that is prepared."""


def pages(tokens: int, page: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // page)


def reserve(committed: int, allocated: int, block: int, page: int) -> int:
    """Length to allocate for a decode: `BLOCKS_AHEAD` blocks ahead in whole pages, never less."""
    return max(allocated, pages(committed + BLOCKS_AHEAD * block, page) * page)
