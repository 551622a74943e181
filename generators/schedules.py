"""Schedules: which requests arrive when at a server with certain settings, for its whole loop.

What the loop makes of a schedule is the scheduler's own business: when a prompt is prefilled, in
how many chunks, with whom it shares a batch, who is retracted. A schedule only says what arrives,
and settings under which all of that happens. Like a trace it is self-contained JSON and depends on
no tree; networks and prompts follow from the seed (:class:`reference.decoding.Model`).
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from generators.operations import SCHEMA, TraceError, read_record
from reference.decoding import Model, greedy
from reference.kv_lengths import BLOCKS_AHEAD, pages

PROMPT_MARGIN = 6
"""A prompt is shorter than the context by this at least (upstream's ``max_req_input_len``)."""

OUTPUT_MARGIN = 2
"""Prompt and output together are shorter than the context by this at least
(``Scheduler.init_req_max_new_tokens``)."""

SAFE_BLOCK = 8
"""Up to this block, and without pages, the tokens reserved at the longest length fit the row in
all releases; elsewhere waiver reserve-beyond-row says that they do not, and what a loop puts out
after that is nobody's fault but that one's."""


@dataclass(frozen=True)
class Server:
    """The settings of a schedule.

    Attributes:
        block: draft block size in tokens.
        page: KV page size in tokens.
        rows: requests that can hold KV slots at once.
        kv_tokens: tokens of the KV pool.
        context: longest context of the model, in tokens.
        chunk: prompt tokens of one prefill batch at most.
        mixed: whether a prefill takes the running batch along, where the tree supports that.
        overlap: the overlapped loop, or the synchronous one.
        ratio: part of its output limit that admission reserves for a running request, in percent.
        retract_every: the scheduler's own test of retraction, every so many launches; 0 for never.
        idle: whether a turn without work runs an idle batch, as data parallelism asks for.
        needs_cpu_seq_lens: whether an attention backend wants host lengths.
        plan_stream: whether a decode is prepared on a stream of its own.
        debug: whether the tree runs with its debug assertions (a property of the process).
        agreement: how often drafts are right, in eighths.
        seed: of the networks and the prompts.
    """

    block: int = 4
    page: int = 1
    rows: int = 4
    kv_tokens: int = 512
    context: int = 96
    chunk: int = 64
    mixed: bool = False
    overlap: bool = True
    ratio: int = 50
    retract_every: int = 0
    idle: bool = False
    needs_cpu_seq_lens: bool = True
    plan_stream: bool = False
    debug: bool = False
    agreement: int = 6
    seed: int = 0

    @property
    def model(self) -> Model:
        """The networks."""
        return Model(self.seed, self.agreement)

    def line(self) -> str:
        """The settings as one printed line."""
        switches = ("mixed", "idle", "plan_stream", "debug")
        on = "".join(f"{name.replace('_', ' ')}, " for name in switches if getattr(self, name))
        retract = f", retracting every {self.retract_every} launches" if self.retract_every else ""
        return (
            f"{self.rows} rows, block {self.block}, page {self.page}, KV pool {self.kv_tokens} "
            f"tokens, context {self.context}, prefill {self.chunk} tokens at most, "
            f"overlap {'on' if self.overlap else 'off'}, host lengths "
            f"{'on' if self.needs_cpu_seq_lens else 'off'}{retract}, reserve {self.ratio}%, "
            f"{on}"
            f"agreement {self.agreement}/8, seed {self.seed}"
        )

    def longest(self) -> int:
        """Prompt and output tokens of the longest request, by settings alone."""
        room = self.context - OUTPUT_MARGIN
        if self.block > SAFE_BLOCK or self.page > 1:
            room = self.context - BLOCKS_AHEAD * self.block - self.page
        # A request must fit the pool alone; one that does not is aborted.
        whole = (self.kv_tokens // self.page - 1) * self.page
        return min(room, whole - BLOCKS_AHEAD * self.block - 1)

    def room(self, prompt: int) -> int:
        """Output tokens for which the KV pool has room beside a prompt, as admission counts."""
        return self.kv_tokens - pages(prompt, self.page) * self.page - self.page - 1

    def refusal(self, request: Arrival) -> str | None:
        """Why a request cannot arrive at this server, or None."""
        if request.prompt > self.context - PROMPT_MARGIN:
            return f"a prompt of {request.prompt} tokens is too long for context {self.context}"
        if request.prompt + request.limit > self.longest():
            return (
                f"{request.prompt} prompt tokens and {request.limit} more do not fit: together "
                f"at most {self.longest()}"
            )
        if request.limit > self.room(request.prompt):
            return f"the KV pool has no room for {request.limit} output tokens"
        return None


@dataclass(frozen=True)
class Arrival:
    """One request.

    Attributes:
        number: its name, which decides its prompt's tokens.
        at: turn of the loop in which it arrives, from 1.
        prompt: tokens of its prompt.
        limit: tokens it puts out at most.
        stops: tokens that end it.
    """

    number: int
    at: int
    prompt: int
    limit: int
    stops: tuple[int, ...] = ()


_BOUNDS = {
    "block": (2, 64),
    "page": (1, 64),
    "rows": (1, 32),
    "kv_tokens": (8, 1 << 16),
    "context": (16, 1 << 12),
    "chunk": (1, 1 << 12),
    "ratio": (1, 100),
    "retract_every": (0, 1 << 10),
    "agreement": (0, 8),
    "seed": (0, (1 << 31) - 2),
}
_ARRIVAL_BOUNDS = {
    "number": (0, 1 << 12),
    "at": (1, 1 << 12),
    "prompt": (1, 1 << 12),
    "limit": (1, 1 << 12),
}


@dataclass(frozen=True)
class Schedule:
    """Settings and arrivals."""

    header: Server
    requests: tuple[Arrival, ...] = ()

    def prompt(self, request: Arrival) -> list[int]:
        """The prompt of a request."""
        return self.header.model.prompt(request.number, request.prompt)

    def output(self, request: Arrival) -> list[int]:
        """What a request puts out when it is decoded alone."""
        stops = frozenset(request.stops)
        return greedy(self.header.model, self.prompt(request), request.limit, stops)

    def lines(self) -> list[str]:
        """One line per request."""
        return [
            f"r{request.number} arrives in turn {request.at}: prompt {request.prompt}, up to "
            f"{request.limit} tokens"
            f"{', stops at ' + ' or '.join(map(str, request.stops)) if request.stops else ''}"
            for request in self.requests
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "header": dataclasses.asdict(self.header),
            "requests": [dataclasses.asdict(request) for request in self.requests],
        }

    @classmethod
    def from_json(cls, data: Any) -> Schedule:
        """Read a schedule; raises :class:`TraceError` with one line on anything malformed."""
        if not isinstance(data, dict) or not isinstance(data.get("requests"), list):
            raise TraceError("not a schedule: 'header' and a list of 'requests' are expected")
        if data.get("schema") != SCHEMA:
            raise TraceError(
                f"schedule schema {data.get('schema')!r} is not the supported {SCHEMA}; "
                "use the version of dflash-conformance that wrote it"
            )
        header: Server = read_record(Server, data.get("header"), "header")
        _within(header, _BOUNDS, "header")
        requests = []
        for number, entry in enumerate(data["requests"]):
            request: Arrival = read_record(Arrival, entry, f"request {number}")
            _within(request, _ARRIVAL_BOUNDS, f"request {number}")
            reason = header.refusal(request)
            if reason is not None:
                raise TraceError(f"request {number}: {reason}")
            requests.append(request)
        if not requests:
            raise TraceError("a schedule needs a request")
        if len({request.number for request in requests}) < len(requests):
            raise TraceError("two requests of a schedule have the same number")
        return cls(header, tuple(requests))


def _within(record: Any, bounds: dict[str, tuple[int, int]], where: str) -> None:
    for name, (low, high) in bounds.items():
        if not low <= getattr(record, name) <= high:
            raise TraceError(f"{where}: '{name}' must be between {low} and {high}")


def schedule_in(text: str) -> Schedule | None:
    """The schedule in JSON text, or None where it holds something else, or nothing.

    Raises:
        TraceError: it is one, and malformed.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(data, dict) and isinstance(data.get("trace"), dict):
        data = data["trace"]
    if not isinstance(data, dict) or "requests" not in data:
        return None
    return Schedule.from_json(data)


SITUATIONS = (
    "loop prefill",
    "loop decode",
    "loop chunk",
    "loop redundant step",
    "loop retraction",
    "loop starved pool",
    "loop reused row",
    "loop longest request",
    "loop stop inside a block",
    "loop limit inside a block",
    "loop without overlap",
    "loop with a large block",
    *(f"loop accepts {drafts}" for drafts in range(4)),
)
"""Situations that schedules must lead to."""


# -- inventing -------------------------------------------------------------------------------------

SAMPLED_BLOCKS = (16, 5, 16, 8)
"""The other block sizes, in turn, of one schedule in :data:`SAMPLED`."""
SAMPLED = 10
THEMES = 5
"""Of so many schedules one mixes, one idles and one crowds its pool, so that a few do all of it."""
_MIXING, _IDLING, _LARGE, _CROWDED = range(4)


def schedules(seed: int, *, mixed: bool, idle: bool, debug: bool) -> Iterator[Schedule]:
    """Schedules without end, the same for the same arguments.

    Args:
        mixed, idle: whether the tree's scheduler issues those batches.
        debug: of the process that will run them.
    """
    dice = random.Random(seed)
    number = 0
    while True:
        yield _schedule(dice, number, mixed=mixed, idle=idle, debug=debug)
        number += 1


def _schedule(
    dice: random.Random, number: int, *, mixed: bool, idle: bool, debug: bool
) -> Schedule:
    theme = number % THEMES
    large, crowded = number % SAMPLED == _LARGE, theme == _CROWDED
    page = 1 if crowded else dice.choice((1, 1, 1, 16, 64))
    rows = dice.choice((1, 2, 3, 3, 4, 4))
    header = Server(
        block=SAMPLED_BLOCKS[number // SAMPLED % len(SAMPLED_BLOCKS)] if large else 4,
        page=page,
        rows=rows,
        context=(40 if crowded else dice.choice((40, 64, 96)))
        + (2 * page if page > 1 else 0)
        + 32 * large,
        mixed=mixed and (theme == _MIXING or dice.random() < 0.2),
        overlap=dice.random() < 0.7,
        ratio=dice.choice((10, 30, 100)),
        idle=idle and (theme == _IDLING or dice.random() < 0.2),
        needs_cpu_seq_lens=dice.random() < 0.6,
        plan_stream=dice.random() < 0.3,
        debug=debug,
        agreement=dice.choice((2, 4, 5, 6, 7, 8)),
        seed=dice.randrange(1 << 20),
    )
    # Pools from nearly empty to one in which two long requests are one too many.
    alone = pages(header.context + BLOCKS_AHEAD * header.block + 2, page) + 1
    spare = pages(dice.choice((0, 8, 24, rows * header.context)), page)
    header = replace(
        header,
        kv_tokens=(alone + spare) * page,
        chunk=max(page, dice.choice((8, 16, 64, 64))),
        retract_every=dice.choice((0, 0, 0, 3, 5, 7)),
    )
    if crowded:
        header = replace(header, rows=3, kv_tokens=alone + 8, ratio=10, chunk=64, retract_every=0)
        crowd = (Arrival(name, 1, dice.randint(2, 9), header.longest() - 12) for name in range(4))
        return Schedule(header, tuple(crowd))
    requests = []
    turn = 1
    for name in range(dice.randint(2, 6)):
        requests.append(_arrival(dice, header, name, turn))
        turn += dice.choice((0, 0, 1, 1, 2, 5, 12))
    if theme == _IDLING:
        requests.append(_arrival(dice, header, len(requests), turn + 60))
    return Schedule(header, tuple(requests))


def _arrival(dice: random.Random, header: Server, number: int, turn: int) -> Arrival:
    room = header.longest()
    prompt = dice.choice((1, dice.randint(1, 12), dice.randint(1, 12), dice.randint(12, 40)))
    prompt = max(1, min(prompt, room - 8, header.context - PROMPT_MARGIN))
    limit = dice.choice((1, dice.randint(2, 12), dice.randint(12, 30), room))
    limit = max(1, min(limit, room - prompt, header.room(prompt)))
    stops: tuple[int, ...] = ()
    if dice.random() < 0.4:
        output = greedy(header.model, header.model.prompt(number, prompt), limit)
        stops = tuple(dice.choices(output[len(output) // 3 :], k=dice.choice((1, 1, 2))))
    return Arrival(number, turn, prompt, limit, stops)


# -- making small ----------------------------------------------------------------------------------


def simpler(schedule: Schedule) -> Iterator[Schedule]:
    """Schedules that say less, the boldest first; all of them legal."""
    header, requests = schedule.header, schedule.requests
    plain = replace(header, **{n: v for n, v in _SIMPLE.items() if n not in _DICE})
    if plain != header and all(plain.refusal(request) is None for request in requests):
        yield replace(schedule, header=plain)
    if len(requests) > 2:
        half = len(requests) // 2
        yield replace(schedule, requests=requests[:half])
        yield replace(schedule, requests=requests[half:])
    for number in reversed(range(len(requests))):
        if len(requests) > 1:
            yield replace(schedule, requests=requests[:number] + requests[number + 1 :])
    for number, request in enumerate(requests):
        for change in _simpler_request(request):
            changed = (*requests[:number], change, *requests[number + 1 :])
            yield replace(schedule, requests=changed)
    for name, value in _SIMPLE.items():
        if getattr(header, name) != value:
            other = replace(header, **{name: value})
            if all(other.refusal(request) is None for request in requests):
                yield replace(schedule, header=other)
    if header.rows > len(requests):
        yield replace(schedule, header=replace(header, rows=len(requests)))


_SIMPLE: dict[str, Any] = {
    "mixed": False,
    "idle": False,
    "plan_stream": False,
    "retract_every": 0,
    "page": 1,
    "block": 4,
    "chunk": 64,
    "kv_tokens": 512,
    "context": 96,
    "ratio": 50,
    "overlap": True,
    "needs_cpu_seq_lens": True,
    "agreement": 8,
    "seed": 0,
}
"""Values of settings that say nothing special."""

_DICE = ("agreement", "seed")
"""Settings that decide tokens and accept lengths."""


def _simpler_request(request: Arrival) -> Iterator[Arrival]:
    if request.at > 1:
        yield replace(request, at=1)
        yield replace(request, at=request.at - 1)
    if request.stops:
        yield replace(request, stops=())
    for name in ("limit", "prompt"):
        value = getattr(request, name)
        for less in sorted({1, value // 2, value - 1}):
            if 0 < less < value:
                yield replace(request, **{name: less})
