"""The scheduler's view between two operations, and what one operation does to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from generators.operations import Header
from generators.values import TokenTable, Write


@dataclass(frozen=True)
class Capabilities:
    """What a tree can do, as far as the rules depend on it (found by ``conformance.sut.surface``).

    Attributes:
        idle: its argument checks admit DP attention with DFlash on CUDA, so idle batches occur.
        defers_prefill: its scheduler may decode between two chunks of a prompt.
        filters_first: its scheduler filters the running batch before it forms a prefill batch.
        skips_finishing: its scheduler leaves out requests whose last token, by length, is in
            flight.
        mixed: its argument checks leave mixed chunked prefill on for DFlash.
        seed: a DFlash request may arrive prefilled, from a prefill server.
        token_bits: token ids survive below ``2**token_bits`` on the whole path.
        reserves_two_blocks: its memory check counts on two blocks ahead of the committed length, so
            that a KV pool may be as full as that allows.
        survives_assertion: the process can go on after a failed assertion (not on a GPU), so that
            laws may provoke one.
    """

    idle: bool = True
    defers_prefill: bool = True
    filters_first: bool = False
    skips_finishing: bool = True
    mixed: bool = True
    seed: bool = True
    token_bits: int = 63
    reserves_two_blocks: bool = True
    survives_assertion: bool = True


@dataclass(slots=True)
class Request:
    """A request as the scheduler sees it; lengths in tokens of the KV cache.

    Attributes:
        length: its true length, which the host may not know yet.
        limit: one past the last length of its range.
        token: the token it was given last.
        steps: its forwards so far.
        committed: its length as the host knows it.
        learned: tokens of its last result that the host processed.
        known: its tokens that the host knows, prompt and output.
        allocated: positions of its row that have a KV slot, where there is a KV pool.
        finished: whether the host knows that it has ended; its slot is free then.
    """

    number: int
    slot: int
    generation: int
    length: int
    limit: int
    token: int = -1
    steps: int = 0
    committed: int = 0
    learned: int = 1
    known: int = 0
    allocated: int = 0
    finished: bool = False

    @property
    def past_stop(self) -> int:
        """Tokens that its last result has after the one that it stops at: data, but for the end."""
        return (self.number + self.steps) % self.learned

    @property
    def earlier(self) -> int:
        """Tokens that it put out before it was retracted: data, but for coming back with some."""
        return min(2 * self.generation, self.length - 1)


@dataclass(slots=True)
class Effect:
    """What one operation does, row by row, for the players.

    Attributes:
        requests: the batch's requests after the operation, in row order.
        keep: row indices kept, where the operation filters.
        slots, lengths, tokens: per row, what the forward publishes and stashes.
        committed: per row of the running batch, the host's length when a step is prepared.
        before: per row of the running batch, the true length before the step.
        pending: per row of the running batch, the token it was given last.
        left_out: rows that leave a batch though they have not ended.
        ended: requests of which the host learns, after what is launched, that they have ended.
        landed: (number, slot) per row of the launch whose result the host processes, or None.
        learned: requests whose results the host processes, with the lengths that it learns.
        landed_tails: of a mixed launch, the numbers of its decode tails.
        in_flight: whether a forward was in flight when the operation began.
        fits: whether the KV pool had pages for a decode when the operation began.
    """

    requests: list[Request] = field(default_factory=list)
    keep: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)
    landed: list[tuple[int, int]] | None = None
    landed_tails: list[int] | None = None
    learned: list[tuple[Request, int]] = field(default_factory=list)
    in_flight: bool = False
    fits: bool = True

    def rows(self) -> list[int]:
        """Indices of the batch's rows."""
        return list(range(len(self.slots)))


class Choices(Protocol):
    """A source of choices: random, drawn by Hypothesis, or enumerated."""

    def below(self, n: int) -> int:
        """An integer from 0 to n - 1; 0 is the simplest choice."""


class IllegalOperation(ValueError):
    """An operation that the protocol forbids in this state; the message says why."""


@dataclass(slots=True)
class _Launch:
    """A forward whose result the host has not processed: requests, slots, lengths after it.

    The last ``tails`` of them are decode tails of a mixed batch; the prompt of ``chunk`` goes on,
    so its result is nobody's.
    """

    requests: list[Request]
    slots: list[int]
    lengths: list[int]
    tails: int
    chunk: Request | None


class State:
    """The scheduler's view between two operations.

    Attributes:
        running: requests of the running batch in row order. One that has ended keeps its row until
            the next filter, though its slot may be another's by then.
        prefill: requests of the last prefill batch until it is merged or adopted, else None.
        chunked: the request whose prompt is unfinished, if any.
        free: free slots, smallest first.
        live: requests that hold a slot, by number.
        retracted: numbers of requests that lost their slot and will be admitted again.
        whole: by number, the tokens that such a request is prefilled with when it is.
        leaving: requests that left the batch while their last token is in flight.
        ranges: ranges of lengths that were given to somebody, in multiples of ``STRIDE``.
        lowest: the lowest of the ranges that nobody was given.
        retracting: whether a retraction has just made room for a step.
        tokens: the table of token values dealt so far.
        length_writer: published length to its write (ranges are disjoint per generation).
    """

    def __init__(self, header: Header) -> None:
        self.header = header
        self.running: list[Request] = []
        self.prefill: list[Request] | None = None
        self.chunked: Request | None = None
        self.free = list(range(1, header.pool))
        self.tokens = TokenTable(header.seed, header.token_bits)
        self.length_writer: dict[int, Write] = {}
        self.generations: dict[int, int] = {}
        self.ranges: set[int] = set()
        self.lowest = 0
        self.retracting = False
        self.live: dict[int, Request] = {}
        self.retracted: list[int] = []
        self.whole: dict[int, int] = {}
        self.leaving: list[Request] = []
        self.decoded = False
        self.operations = 0
        self.used: set[int] = set()
        self._launch: _Launch | None = None

    # -- values ---------------------------------------------------------------------------------

    def write(self, request: Request, kind: str) -> int:
        """Record one write of (token, length) for `request`; returns the token."""
        write = Write(
            self.operations, request.number, request.generation, request.slot, request.steps, kind
        )
        self.length_writer[request.length] = write
        request.token = self.tokens.deal(write)
        return request.token

    # -- launches and results -------------------------------------------------------------------

    def in_flight(self, request: Request) -> bool:
        """Whether the host has yet to process the result of the request's last forward."""
        launch = self._launch
        return launch is not None and any(request is other for other in launch.requests)

    @property
    def pending(self) -> bool:
        """Whether the host has yet to process a result."""
        return self._launch is not None

    def launch(self, effect: Effect, requests: list[Request], *, tails: int = 0) -> None:
        """A forward starts; then, with overlap, the host processes the result of the one before."""
        slots, lengths = [r.slot for r in requests], [r.length for r in requests]
        launched = _Launch(requests, slots, lengths, tails, self.chunked)
        if not self.header.overlap:
            self._land(effect, launched)
            return
        before, self._launch = self._launch, launched
        if before is not None:
            self._tell(effect, before)

    def land(self, effect: Effect) -> None:
        """The host processes the result in flight before anything else is launched."""
        launch, self._launch = self._launch, None
        assert launch is not None
        self._tell(effect, launch)

    def _tell(self, effect: Effect, launch: _Launch) -> None:
        self._land(effect, launch)
        pairs = zip(launch.requests, launch.slots, strict=True)
        effect.landed = [(request.number, slot) for request, slot in pairs]
        if launch.tails:
            effect.landed_tails = [r.number for r in launch.requests[-launch.tails :]]

    def _land(self, effect: Effect, launch: _Launch) -> None:
        for request, length in zip(launch.requests, launch.lengths, strict=True):
            if request is not launch.chunk:
                effect.learned.append((request, length))
                request.known = max(request.known, length + 1)
            request.learned = max(1, length - request.committed)
            request.committed = max(request.committed, length)  # a chunk may be behind
            if any(request is other for other in self.leaving):
                effect.ended.append(request)
                self.end(request)
        self.leaving = []

    # -- slots ----------------------------------------------------------------------------------

    def release(self, request: Request) -> None:
        """Free the request's slot."""
        self.free.append(request.slot)
        self.free.sort()
        del self.live[request.number]

    def end(self, request: Request) -> None:
        """The host learns that the request has ended: its slot is free at once."""
        request.finished = True
        self.release(request)

    def rows(self) -> list[Request]:
        """Requests that hold rows of the running batch or of the last prefill batch."""
        return self.running + (self.prefill or [])

    @property
    def unfiltered(self) -> bool:
        """Whether the running batch still has rows of requests that have ended."""
        return any(request.finished for request in self.running)


def lengths_of(effect: Effect, requests: Sequence[Request]) -> None:
    """Describe the rows of a batch."""
    effect.slots = [r.slot for r in requests]
    effect.lengths = [r.length for r in requests]
    effect.requests = list(requests)
