"""The state machine of the overlapped loop: what may happen next, and what it does.

:class:`State` replays the scheduler's bookkeeping in plain Python. :meth:`State.apply` advances it
by one operation and returns an :class:`Effect`: rows, slots, lengths and token values, which the
players (the tree's driver and the reference model) both carry out. :func:`draw` invents the next
operation from a source of choices; :meth:`State.refusal` says why an operation is not legal. The
rules and the code paths that issue each operation are in :data:`RULES`, one record per operation.

Legal means: some path of the scheduler issues it, with this tree's own argument checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from generators.operations import (
    LAWS,
    WILD_USES,
    Admit,
    Adopt,
    Filter,
    Finish,
    Header,
    Idle,
    Law,
    Merge,
    Operation,
    Retract,
    Step,
    Trace,
    Wild,
)
from generators.values import STRIDE, TokenTable, Write

_MOST_ROWS = 64
"""The random generator keeps batches to this many rows."""


@dataclass(frozen=True)
class Capabilities:
    """What a tree can do, as far as the rules depend on it (found by ``conformance.sut.surface``).

    Attributes:
        defers_prefill: its scheduler may decode between two chunks of a prompt.
        idle: its argument checks admit DP attention with DFlash on CUDA, so idle batches occur.
        token_bits: token ids survive below ``2**token_bits`` on the whole path.
        survives_assertion: the process can go on after a failed assertion (not on a GPU), so that
            laws may provoke one.
    """

    idle: bool = True
    defers_prefill: bool = True
    token_bits: int = 63
    survives_assertion: bool = True


@dataclass(slots=True)
class Request:
    """A request as the scheduler sees it; lengths in tokens of the KV cache."""

    number: int
    slot: int
    generation: int
    length: int
    limit: int
    token: int = -1
    steps: int = 0
    committed: int = 0
    finished: bool = False


@dataclass(slots=True)
class Effect:
    """What one operation does, row by row, for the players.

    Attributes:
        requests: the batch's requests after the operation, in row order.
        keep: row indices kept, where the operation filters.
        slots, lengths, tokens: per row, what the forward publishes and stashes.
        committed: per row, the host's committed length when the step is prepared.
        before: per row, the true length before the step.
        stays: for a merge, how many rows the prefill batch still has.
    """

    requests: list[Request] = field(default_factory=list)
    keep: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    stays: int = 0


class Choices(Protocol):
    """A source of choices: random, drawn by Hypothesis, or enumerated."""

    def below(self, n: int) -> int:
        """An integer from 0 to n - 1; 0 is the simplest choice."""


class IllegalOperation(ValueError):
    """An operation that the protocol forbids in this state; the message says why."""


class State:
    """The scheduler's view between two operations.

    Attributes:
        running: requests of the running batch in row order.
        prefill: requests of the last prefill batch until it is merged or adopted, else None.
        chunked: the request whose prompt is unfinished, if any.
        free: free slots, smallest first.
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
        self.admissions = 0
        self.live: dict[int, Request] = {}
        self.decoded = False
        self.operations = 0
        self.used: set[int] = set()

    # -- applying ---------------------------------------------------------------------------

    def refusal(self, operation: Operation, capabilities: Capabilities) -> str | None:
        """Why `operation` is not legal here on a tree with `capabilities`; None if it is."""
        return RULES[operation.op].refusal(self, operation, capabilities)

    def apply(self, operation: Operation) -> Effect:
        """Advance by a legal operation. Raises nothing on legal input."""
        effect = RULES[operation.op].apply(self, operation)
        self.operations += 1
        return effect

    def write(self, request: Request, kind: str) -> int:
        """Record one write of (token, length) for `request`; returns the token."""
        write = Write(
            self.operations, request.number, request.generation, request.slot, request.steps, kind
        )
        self.length_writer[request.length] = write
        request.token = self.tokens.deal(write)
        return request.token

    def release(self, request: Request) -> None:
        """Free the request's slot."""
        self.free.append(request.slot)
        self.free.sort()
        del self.live[request.number]

    def live_rows(self) -> list[Request]:
        """Requests that hold rows of the running batch or of the last prefill batch."""
        return self.running + (self.prefill or [])


def lengths_of(effect: Effect, requests: Sequence[Request]) -> None:
    effect.slots = [r.slot for r in requests]
    effect.lengths = [r.length for r in requests]
    effect.requests = list(requests)


# -- admit ---------------------------------------------------------------------------------


def _refuse_admit(state: State, operation: Operation, _: Capabilities) -> str | None:
    assert isinstance(operation, Admit)
    if state.prefill is not None:
        return "the last prefill batch has not been merged yet"
    if not operation.rows:
        return "a prefill batch has at least one request"
    slots: set[int] = set()
    for number, slot, length in operation.rows:
        if slot in slots:
            return f"slot {slot} is given twice"
        slots.add(slot)
        if length < 1:
            return f"r{number} has no tokens"
        current = state.live.get(number)
        if current is not None:
            if current is not state.chunked:
                return f"r{number} is already running"
            if slot != current.slot or length <= current.length or length > current.limit - 1:
                return f"r{number} does not continue its chunk"
        elif slot not in state.free:
            return f"slot {slot} is not free"
        elif not length % STRIDE or length // STRIDE < state.admissions:
            return f"length {length} of r{number} is in another request's range"
    if operation.chunk is not None and operation.chunk not in [r for r, _, _ in operation.rows]:
        return f"r{operation.chunk} is not in the batch"
    if state.chunked is not None and state.chunked.number not in [r for r, _, _ in operation.rows]:
        return f"r{state.chunked.number} has an unfinished prompt, which is scheduled first"
    bases = [length // STRIDE for r, _, length in operation.rows if r not in state.live]
    if len(set(bases)) != len(bases):
        return "two requests share a length range"
    return None


def _apply_admit(state: State, operation: Operation) -> Effect:
    assert isinstance(operation, Admit)
    effect = Effect()
    batch = []
    for number, slot, length in operation.rows:
        request = state.live.get(number)
        if request is None:
            generation = state.generations.get(number, -1) + 1
            state.generations[number] = generation
            base = length // STRIDE
            state.admissions = max(state.admissions, base + 1)
            request = Request(number, slot, generation, length, (base + 1) * STRIDE)
            state.free.remove(slot)
            state.used.add(slot)
            state.live[number] = request
        request.length = request.committed = length
        kind = "chunk" if number == operation.chunk else "prefill"
        effect.tokens.append(state.write(request, kind))
        request.steps += 1
        batch.append(request)
    state.prefill = batch
    state.chunked = state.live[operation.chunk] if operation.chunk is not None else None
    lengths_of(effect, batch)
    return effect


def _draw_admit(state: State, choose: Choices, capabilities: Capabilities) -> Operation | None:
    if state.prefill is not None:
        return None
    rows: list[tuple[int, int, int]] = []
    base = state.admissions
    free = list(state.free)
    if state.chunked is not None:
        room = state.chunked.limit - 1 - state.chunked.length
        if room < 1:
            return None
        more = 1 + choose.below(min(room, 64))
        rows.append((state.chunked.number, state.chunked.slot, state.chunked.length + more))
    elif not free:
        return None
    retracted = [n for n in state.generations if n not in state.live]
    # Mostly small batches; now and then all that the pool holds.
    room = max(0, _MOST_ROWS - len(state.running))
    most = min(len(free), room if choose.below(8) == 7 else min(room, 4))
    if not rows and not most:
        return None
    count = choose.below(most + 1) if rows else 1 + choose.below(most)
    fresh = len(state.generations)
    for _ in range(count):
        slot = free.pop(choose.below(len(free)))
        if retracted and choose.below(2):
            number = retracted.pop(choose.below(len(retracted)))
        else:
            number, fresh = fresh, fresh + 1
        prompt = 1 + (choose.below(64) if choose.below(4) else 0)
        rows.append((number, slot, base * STRIDE + prompt))
        base += 1
    chunk = None
    if choose.below(5) == 4:
        number, _, _ = rows[choose.below(len(rows))]
        if state.chunked is None or number == state.chunked.number:
            chunk = number
    return Admit(tuple(rows), chunk)


# -- adopt, merge --------------------------------------------------------------------------


def _refuse_absorb(state: State, operation: Operation, _: Capabilities) -> str | None:
    if state.prefill is None:
        return "there is no prefill batch"
    if isinstance(operation, Adopt) and state.running:
        return "the running batch is not empty"
    if isinstance(operation, Merge) and not state.running:
        return "the running batch is empty"
    return None


def _apply_absorb(state: State, operation: Operation) -> Effect:
    assert state.prefill is not None
    effect = Effect()
    for row, request in enumerate(state.prefill):
        if request is state.chunked:
            continue  # keeps its slot, leaves the batch
        if request.finished:
            state.release(request)
        else:
            effect.keep.append(row)
    stay = [state.prefill[row] for row in effect.keep]
    effect.stays = len(stay)
    state.running = state.running + stay
    state.prefill = None
    lengths_of(effect, state.running)
    return effect


def _draw_absorb(state: State, choose: Choices, _: Capabilities) -> Operation | None:
    if state.prefill is None:
        return None
    return Merge() if state.running else Adopt()


# -- step ----------------------------------------------------------------------------------


def _chunk_first(state: State, capabilities: Capabilities) -> bool:
    """Whether an unfinished prompt must be scheduled before anything decodes."""
    return state.chunked is not None and not capabilities.defers_prefill


def _refuse_step(state: State, operation: Operation, capabilities: Capabilities) -> str | None:
    assert isinstance(operation, Step)
    if state.prefill is not None:
        return "the last prefill batch has not been merged yet"
    if _chunk_first(state, capabilities):
        return "an unfinished prompt is scheduled first"
    if not state.running:
        return "the running batch is empty"
    if any(r.finished for r in state.running):
        return "finished requests have not been filtered out"
    if len(operation.accepted) != len(state.running):
        return f"{len(state.running)} rows run, not {len(operation.accepted)}"
    numbers = {r.number for r in state.running}
    if operation.redundant and not state.header.overlap:
        return "without overlap a result is known before the next step"
    for number in operation.redundant:
        if number not in numbers:
            return f"r{number} does not run"
    for request, accepted in zip(state.running, operation.accepted, strict=True):
        if not 0 <= accepted < state.header.block:
            return f"{accepted} accepted drafts do not fit a block of {state.header.block}"
        if request.length + accepted + 1 >= request.limit:
            return f"r{request.number} is at the end of its length range"
    return None


def _apply_step(state: State, operation: Operation) -> Effect:
    assert isinstance(operation, Step)
    effect = Effect()
    overlap = state.header.overlap
    for request, accepted in zip(state.running, operation.accepted, strict=True):
        effect.before.append(request.length)
        # With overlap the host has seen the results up to the step before the last one.
        effect.committed.append(request.committed if overlap else request.length)
        request.committed = request.length
        request.length += accepted + 1
        redundant = request.number in operation.redundant
        effect.tokens.append(state.write(request, "redundant step" if redundant else "step"))
        request.steps += 1
        request.finished = redundant
    state.decoded = True
    lengths_of(effect, state.running)
    return effect


def _draw_step(state: State, choose: Choices, capabilities: Capabilities) -> Operation | None:
    if state.prefill is not None or not state.running or _chunk_first(state, capabilities):
        return None
    if any(r.finished for r in state.running):
        return None
    block = state.header.block
    if any(r.length + block >= r.limit for r in state.running):
        return None
    style = choose.below(4)
    if style == 0:
        accepted = (0,) * len(state.running)
    elif style == 1:
        accepted = (block - 1,) * len(state.running)
    else:
        tape = choose.below(1 << 30)
        accepted = tuple((tape >> (3 * i % 27)) % block for i in range(len(state.running)))
    redundant: tuple[int, ...] = ()
    if state.header.overlap and choose.below(6) == 5:
        redundant = (state.running[choose.below(len(state.running))].number,)
    return Step(accepted, redundant)


# -- finish, filter, retract -----------------------------------------------------------------


def _refuse_finish(state: State, operation: Operation, _: Capabilities) -> str | None:
    assert isinstance(operation, Finish)
    request = state.live.get(operation.request)
    if request is None or request not in state.live_rows():
        return f"r{operation.request} does not run"
    if request.finished:
        return f"r{operation.request} has finished already"
    if request is state.chunked:
        return f"r{operation.request} has an unfinished prompt"
    return None


def _apply_finish(state: State, operation: Operation) -> Effect:
    assert isinstance(operation, Finish)
    state.live[operation.request].finished = True
    return Effect()


def _draw_finish(state: State, choose: Choices, _: Capabilities) -> Operation | None:
    rows = [r for r in state.live_rows() if not r.finished and r is not state.chunked]
    return Finish(rows[choose.below(len(rows))].number) if rows else None


def _refuse_filter(state: State, operation: Operation, _: Capabilities) -> str | None:
    if not state.running:
        return "the running batch is empty"
    if state.prefill is not None:
        return "the last prefill batch has not been merged yet"
    return None


def _apply_filter(state: State, operation: Operation) -> Effect:
    effect = Effect(keep=[i for i, r in enumerate(state.running) if not r.finished])
    for request in state.running:
        if request.finished:
            state.release(request)
    state.running = [state.running[i] for i in effect.keep]
    lengths_of(effect, state.running)
    return effect


def _draw_filter(state: State, choose: Choices, _: Capabilities) -> Operation | None:
    return Filter() if state.running and state.prefill is None else None


def _refuse_retract(state: State, operation: Operation, capabilities: Capabilities) -> str | None:
    assert isinstance(operation, Retract)
    refusal = _refuse_filter(state, operation, capabilities)
    if refusal is not None:
        return refusal
    if _chunk_first(state, capabilities):
        return "an unfinished prompt is scheduled first"
    if any(r.finished for r in state.running):
        return "finished requests have not been filtered out"
    numbers = [r.number for r in state.running]
    if len(set(operation.keep)) != len(operation.keep) or not set(operation.keep) <= set(numbers):
        return "it keeps requests that do not run"
    if not operation.keep or len(operation.keep) == len(numbers):
        return "it keeps at least one request and retracts at least one"
    return None


def _apply_retract(state: State, operation: Operation) -> Effect:
    assert isinstance(operation, Retract)
    rows = {r.number: i for i, r in enumerate(state.running)}
    effect = Effect(keep=[rows[number] for number in operation.keep])
    for request in state.running:
        if request.number not in operation.keep:
            state.release(request)
    state.running = [state.running[i] for i in effect.keep]
    lengths_of(effect, state.running)
    return effect


def _draw_retract(state: State, choose: Choices, capabilities: Capabilities) -> Operation | None:
    if state.prefill is not None or len(state.running) < 2 or _chunk_first(state, capabilities):
        return None
    if any(r.finished for r in state.running):
        return None
    rows = [r.number for r in state.running]
    kept = []
    # The scheduler sorts by progress before it drops from the end: any order can come out.
    for _ in range(1 + choose.below(len(rows) - 1)):
        kept.append(rows.pop(choose.below(len(rows))))
    return Retract(tuple(kept))


# -- idle ------------------------------------------------------------------------------------


def _refuse_idle(state: State, operation: Operation, capabilities: Capabilities) -> str | None:
    assert isinstance(operation, Idle)
    if operation.during not in ("prefill", "decode"):
        return f"idle during {operation.during!r} does not exist"
    if not capabilities.idle:
        return "the tree refuses DP attention with DFlash, so no idle batch occurs"
    if state.prefill is not None:
        return "the last prefill batch has not been merged yet"
    if state.chunked is not None:
        return "an unfinished prompt is scheduled first"
    if operation.during == "decode" and state.running:
        return "a rank with running requests decodes when the others do"
    return None


def _apply_idle(state: State, operation: Operation) -> Effect:
    return Effect()


def _draw_idle(state: State, choose: Choices, capabilities: Capabilities) -> Operation | None:
    if not capabilities.idle or state.prefill is not None or state.chunked is not None:
        return None
    if state.running:
        return Idle("prefill")
    return Idle(("decode", "prefill")[choose.below(2)])


# -- laws and wild uses ------------------------------------------------------------------------


def _refuse_law(state: State, operation: Operation, capabilities: Capabilities) -> str | None:
    assert isinstance(operation, Law)
    rows = len(state.running)
    if operation.law not in LAWS:
        return f"there is no law {operation.law!r}"
    if operation.form not in ("relayed", "stored"):
        return f"there is no form {operation.form!r}"
    if not rows or state.prefill is not None:
        return "there is no running batch to take copies of"
    if operation.law == "consume-twice":
        if not (state.header.debug and state.header.overlap):
            return "nothing is consumed without debug assertions and overlap"
        if not capabilities.survives_assertion and not operation.channel:
            return "a failed assertion ends the process, so it takes one channel at a time"
    if operation.channel not in ("", "tokens", "lengths"):
        return f"there is no channel {operation.channel!r}"
    if any(not 0 <= i < rows for i in operation.keep):
        return "it keeps rows that do not run"
    if any(not 0 <= i < len(operation.keep) for i in operation.then):
        return "its second filter keeps rows that the first one dropped"
    if not 0 <= operation.cut <= rows:
        return "it cuts outside the batch"
    if operation.law == "lookup" and not state.header.overlap:
        return "without overlap nothing is looked up in the relay"
    if operation.law in ("filter", "compose", "distribute", "lookup") and not operation.keep:
        return "at least one row stays"
    if operation.law == "permute" and sorted(operation.keep) != list(range(rows)):
        return "a permutation names every row once"
    if operation.law in ("filter", "compose") and len(operation.keep) >= rows:
        return "a batch that keeps every row is not filtered"
    if operation.law == "compose" and not 0 < len(operation.then) < len(operation.keep):
        return "at least one row stays and at least one leaves"
    if operation.law == "distribute" and not (
        any(i < operation.cut for i in operation.keep)
        and any(i >= operation.cut for i in operation.keep)
        and len(set(operation.keep)) == len(operation.keep)
    ):
        return "each side keeps at least one row"
    return None


def _draw_law(state: State, choose: Choices, capabilities: Capabilities) -> Operation | None:
    rows = len(state.running)
    if not rows or state.prefill is not None:
        return None
    law = LAWS[choose.below(len(LAWS))]
    if law == "consume-twice" and not (
        state.header.debug and state.header.overlap and capabilities.survives_assertion
    ):
        return None
    form = ("relayed", "stored")[choose.below(2)]
    mirrors = bool(choose.below(2))
    cut = choose.below(rows + 1)
    keep: list[int] = []
    then: list[int] = []
    if law in ("filter", "compose"):
        if rows < 2 + (law == "compose"):
            return None
        keep = _subset(rows, choose)[: rows - 1]
        if law == "compose":
            keep = keep if len(keep) > 1 else [*keep, (keep[0] + 1) % rows]
            then = _subset(len(keep), choose)[: len(keep) - 1]
        cut = 0
    elif law == "distribute":
        if rows < 2:
            return None
        cut = 1 + choose.below(rows - 1)
        keep = _subset(cut, choose)
        keep += [cut + i for i in _subset(rows - cut, choose)]
    elif law == "permute":
        keep, cut = _shuffled(rows, choose), 0
    elif law == "lookup":
        if not state.header.overlap:
            return None
        keep = _subset(rows, choose)
    elif law in ("neutral", "keep-all", "idle", "consume-twice", "resolve-nothing"):
        cut = 0
    return Law(law, form, mirrors, tuple(keep), tuple(then), cut)


def _subset(n: int, choose: Choices) -> list[int]:
    """At least one of n indices, in any order."""
    mask = choose.below((1 << min(n, 30)) - 1) + 1
    rows = [i for i in range(n) if mask >> (i % 30) & 1]
    return rows if choose.below(2) else [rows[i] for i in _shuffled(len(rows), choose)]


def _shuffled(n: int, choose: Choices) -> list[int]:
    """All of n indices, in any order."""
    rows = list(range(n))
    return [rows.pop(choose.below(len(rows))) for _ in range(n)]


def _refuse_wild(state: State, operation: Operation, _: Capabilities) -> str | None:
    assert isinstance(operation, Wild)
    if operation.use not in WILD_USES:
        return f"there is no wild use {operation.use!r}"
    if not state.running or state.prefill is not None:
        return "there is no running batch to take copies of"
    return None


def _draw_wild(state: State, choose: Choices, capabilities: Capabilities) -> Operation | None:
    operation = Wild(WILD_USES[choose.below(len(WILD_USES))])
    return None if _refuse_wild(state, operation, capabilities) else operation


def _apply_nothing(state: State, operation: Operation) -> Effect:
    effect = Effect(tokens=[r.token for r in state.running])
    lengths_of(effect, state.running)
    return effect


# -- the rules ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """One operation's place in the protocol.

    Attributes:
        refusal: why an operation is illegal in a state, or None.
        apply: its effect.
        draw: invents one from choices, or None where it is not enabled.
        weight: how often it is tried by the random generator, relative to the others.
        evidence: the code path that issues it, and the check that forbids it.
    """

    refusal: Callable[[State, Operation, Capabilities], str | None]
    apply: Callable[[State, Operation], Effect]
    draw: Callable[[State, Choices, Capabilities], Operation | None]
    weight: int
    evidence: str


RULES: dict[str, Rule] = {
    "step": Rule(
        _refuse_step,
        _apply_step,
        _draw_step,
        10,
        "Scheduler.update_running_batch -> ScheduleBatch.prepare_for_decode -> run_batch; results "
        "are processed after the next launch, hence the redundant step; between two chunks of a "
        "prompt only where Scheduler._should_defer_prefill exists",
    ),
    "admit": Rule(
        _refuse_admit,
        _apply_admit,
        _draw_admit,
        5,
        "Scheduler.get_new_batch_prefill; an unfinished prompt (chunked_req) is scheduled first "
        "and leaves the batch before the merge",
    ),
    "adopt": Rule(
        _refuse_absorb,
        _apply_absorb,
        _draw_absorb,
        12,
        "Scheduler.get_next_batch_to_run: an empty running batch is replaced by the last prefill "
        "batch without a merge call",
    ),
    "merge": Rule(
        _refuse_absorb,
        _apply_absorb,
        _draw_absorb,
        12,
        "Scheduler.get_next_batch_to_run: last_batch.filter_batch, then running.merge_batch",
    ),
    "finish": Rule(
        _refuse_finish,
        _apply_finish,
        _draw_finish,
        3,
        "the batch result processor marks a request finished one launch late",
    ),
    "filter": Rule(
        _refuse_filter,
        _apply_filter,
        _draw_filter,
        1,
        "Scheduler.update_running_batch (and from 0.5.23 every step): running.filter_batch",
    ),
    "retract": Rule(
        _refuse_retract,
        _apply_retract,
        _draw_retract,
        1,
        "ScheduleBatch.retract_decode filters with sorted keep_indices: rows may change order",
    ),
    "idle": Rule(
        _refuse_idle,
        _apply_idle,
        _draw_idle,
        2,
        "scheduler_components/dp_attn.py get_idle_batch: a rank without prefill idles while "
        "others prefill, a rank without requests while others decode; forbidden where "
        "speculative_hook._handle_dflash refuses DP attention",
    ),
    "law": Rule(
        _refuse_law,
        _apply_nothing,
        _draw_law,
        4,
        "the contract of DFlashDraftInputV2.filter_batch and merge_batch as ScheduleBatch "
        "calls them, on copies",
    ),
    "wild": Rule(
        _refuse_wild,
        _apply_nothing,
        _draw_wild,
        1,
        "no scheduler path; the API accepts it",
    ),
}

_WHEEL = [name for name, rule in RULES.items() for _ in range(rule.weight)]
_TRIES = 4


def draw(
    state: State, choose: Choices, capabilities: Capabilities, *, wild: bool = False
) -> Operation:
    """The next operation, legal in `state` (with `wild`, now and then one that is not)."""
    if state.prefill is not None and choose.below(4):
        return Merge() if state.running else Adopt()
    if state.prefill is None and any(r.finished for r in state.running) and choose.below(2):
        return Filter()
    for _ in range(_TRIES):
        name = _WHEEL[choose.below(len(_WHEEL))]
        if name == "wild" and not wild:
            continue
        operation = RULES[name].draw(state, choose, capabilities)
        if operation is not None:
            return operation
    for rule in RULES.values():
        operation = rule.draw(state, choose, capabilities)
        if operation is not None:
            return operation
    raise AssertionError("no operation is enabled")


SITUATIONS: dict[str, str] = {
    "first step": "the first decode of all",
    "one row": "a decode of one row",
    "many rows": "a decode of 16 rows or more",
    "full pool": "a decode with every slot taken",
    "reused slot": "a request is admitted to a slot that another one left",
    "generation": "a retracted request is admitted again",
    "skipped step": "a prefill runs while the running batch waits",
    "emptied batch": "the last row leaves the running batch",
    "emptied prefill": "no row of a prefill batch reaches the running batch",
    "idle first": "an idle step before any other",
}
"""States worth reaching, and what each means."""


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
    return found


def _at_admit(state: State, operation: Operation) -> list[str]:
    assert isinstance(operation, Admit)
    found = ["skipped step"] if state.running else []
    fresh = [(number, slot) for number, slot, _ in operation.rows if number not in state.live]
    if any(slot in state.used for _, slot in fresh):
        found.append("reused slot")
    if any(number in state.generations for number, _ in fresh):
        found.append("generation")
    return found


def _at_filter(state: State, operation: Operation) -> list[str]:
    return ["emptied batch"] if all(r.finished for r in state.running) else []


def _at_absorb(state: State, operation: Operation) -> list[str]:
    leave = all(r.finished or r is state.chunked for r in state.prefill or ())
    return ["emptied prefill"] if leave else []


def _at_idle(state: State, operation: Operation) -> list[str]:
    return [] if state.operations else ["idle first"]


_LOOK: dict[type[Operation], Callable[[State, Operation], list[str]]] = {
    Step: _at_step,
    Admit: _at_admit,
    Filter: _at_filter,
    Adopt: _at_absorb,
    Merge: _at_absorb,
    Idle: _at_idle,
}


def check(trace: Trace, capabilities: Capabilities) -> None:
    """Raise :class:`IllegalOperation` at the first operation the protocol forbids."""
    state = State(trace.header)
    for number, operation in enumerate(trace.operations, 1):
        refusal = state.refusal(operation, capabilities)
        if refusal is not None:
            raise IllegalOperation(f"operation {number} ({operation.line()}): {refusal}")
        state.apply(operation)
