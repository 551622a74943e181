"""What a real KV cache adds to the rules: it fills up, and requests have a longest length.

Where a trace has a KV pool (``kv_tokens`` of its header), lengths are those of real prompts and
outputs, and every request holds whole pages: those of its prompt, and from its first decode on
those of what is reserved ahead of it. Without one none of this applies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from generators.operations import Header
from generators.protocol.state import Capabilities, Choices, Request, State
from reference.kv_lengths import pages, reserve

UNFINISHED = 3
"""Tokens that an unfinished prompt goes on with, as far as is known."""


def longest_prompt(header: Header) -> int:
    """Tokens of the longest prompt that the argument checks let in.

    A request has at most context - 1 tokens, of which 5 are kept for its output; a prompt is
    shorter than what is left.
    """
    return header.context - 7


def longest_decoding(header: Header) -> int:
    """The longest length, as the host knows it, at which a request is not about to end.

    Prompt and output have at most context - 2 tokens. The last one is not in the KV cache, and of
    one that runs at least one more is to come. One that comes back after it was retracted is
    prefilled with all tokens that are known of it, so it may have one more in the cache; the
    prefill's own token is its last then.
    """
    return header.context - 4


def least_tokens(context: int, block: int, page: int) -> int:
    """Tokens of a KV pool in which one request can always come in and go on."""
    return pages(reserve(context, 0, block, page), page) * page + 2 * page


def free_pages(state: State) -> int:
    """Pages that no request holds."""
    return state.header.kv_tokens // state.header.page - held(state, state.live.values())


def held(state: State, requests: Iterable[Request]) -> int:
    """Pages that the requests hold."""
    return sum(pages(request.allocated, state.header.page) for request in requests)


def reserved(state: State, request: Request) -> int:
    """What the request has allocated once its next decode is prepared."""
    header = state.header
    return reserve(request.committed, request.allocated, header.block, header.page)


def _growth(state: State, requests: Iterable[Request]) -> int:
    """Pages that a decode of the requests takes."""
    page = state.header.page
    return sum(pages(reserved(state, r), page) - pages(r.allocated, page) for r in requests)


def fits(state: State) -> bool:
    """Whether there are pages for a decode of the running batch."""
    return _growth(state, state.running) <= free_pages(state)


def ends_first(state: State) -> list[Request]:
    """Running requests of which the host knows that they have their longest length."""
    if not state.header.kv_tokens:
        return []
    longest = longest_decoding(state.header)
    return [r for r in state.running if not r.finished and r.committed > longest]


def up_to_the_longest(state: State) -> tuple[int, ...]:
    """Drafts to accept so that running requests come to their longest length, not beyond."""
    longest, top = longest_decoding(state.header), state.header.block - 1
    return tuple(min(max(longest - r.length - 1, 0), top) for r in state.running)


def at_the_longest(state: State) -> bool:
    """Whether a running request has its longest length and the host does not know it yet."""
    if not state.header.kv_tokens:
        return False
    longest = longest_decoding(state.header)
    return any(state.in_flight(r) and r.length == longest for r in state.running)


def must_end(state: State) -> list[int]:
    """Numbers of running requests whose result in flight brings them to their longest length."""
    if not state.header.kv_tokens:
        return []
    longest = longest_decoding(state.header)
    return [r.number for r in state.running if state.in_flight(r) and r.length > longest]


def refuse_decode(
    state: State,
    requests: Sequence[Request],
    redundant: Sequence[int],
    capabilities: Capabilities,
    freed: int = 0,
) -> str | None:
    """Why `requests` cannot be decoded, of which `redundant` end with their results in flight.

    Args:
        freed: pages that are given back before.
    """
    header = state.header
    if not header.kv_tokens:
        return None
    longest, full = longest_decoding(header), must_end(state)
    for request in requests:
        if request.committed > longest and not state.in_flight(request):
            return f"r{request.number} has its longest length and ends first"
        if request.number in full and request.number not in redundant:
            return f"the result of r{request.number} in flight is its last: it has no room left"
        skips = capabilities.skips_finishing and header.overlap
        if skips and request.committed >= longest and state.in_flight(request):
            return f"r{request.number} finishes in flight by its length and is left out"
    if _growth(state, requests) > free_pages(state) + freed:
        return "the KV pool has too few pages left for a decode: it retracts first"
    return None


def refuse_prompt(state: State, number: int, length: int, *, last: bool) -> str | None:
    """Why a request cannot be prefilled to `length` tokens, as the `last` of it or not."""
    whole = state.whole.get(number)
    if whole is not None:
        if last and length != whole:
            return f"r{number} comes back with the {whole} tokens that are known of it"
        longest = whole
    else:
        longest = longest_prompt(state.header)
    if length > longest:
        return f"the prompt of r{number} is longer than the context allows"
    if length == longest and not last:
        return f"the prompt of r{number} cannot go on"
    return None


def refuse_rows(state: State, rows: Sequence[tuple[int, int, int]], taken: int = 0) -> str | None:
    """Why the pool cannot hold the prompts of `rows`, next to `taken` pages more."""
    # The scheduler admits what leaves more than a page.
    if taken + _prompt_pages(state, rows) >= free_pages(state):
        return "the KV pool has too few pages left for the prompts"
    return None


def decode_pages(state: State) -> int:
    """Pages that a decode of the running batch takes."""
    return _growth(state, state.running) if state.header.kv_tokens else 0


def _prompt_pages(state: State, rows: Sequence[tuple[int, int, int]]) -> int:
    page, needed = state.header.page, 0
    for number, _, length in rows:
        request = state.live.get(number)
        needed += pages(length, page) - (pages(request.allocated, page) if request else 0)
    return needed


def draw_prompt(state: State, choose: Choices, shortest: int = 1) -> int | None:
    """A length of a prompt of at least `shortest` tokens, often near an end; None without room."""
    longest = longest_prompt(state.header)
    room = longest - shortest + 1
    if room < 1:
        return None
    where = choose.below(4)
    if where == 0:
        return shortest + choose.below(min(room, 8))
    if where == 1:
        return longest - choose.below(min(room, 2 * state.header.block))
    return shortest + choose.below(room)
