"""A trace as straight-line calls on a tree's own classes, call for call what the driver makes.

The text names what the tree it is written for has: its fields, its payload class, the arguments of
its builders and of ``filter_batch``. Nothing in it probes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from conformance.observation import merge_call
from conformance.sut.surface import SLOTS_APART, Surface
from generators.operations import (
    Admit,
    Adopt,
    Filter,
    Finish,
    Header,
    Idle,
    Law,
    Merge,
    Mixed,
    Operation,
    Preempt,
    Retract,
    Seed,
    Step,
    Sync,
)
from generators.protocol import Effect, Request

CARRIED = "cur_allocated_seq_lens_cpu"
"""Argument by which the builders of old trees carry what is allocated from step to step."""


@dataclass
class Call:
    """The lines of one call, and what is looked at after it.

    Attributes:
        name: as the driver observes it; "" where nothing is observed.
        lines: statements.
        batch, draft, right: the batch, the draft input and the right operand, as expressions.
        holder: the batch whose tensors others hold, where it is not `batch`.
        operands: statements that make operands of its own, which stand before `lines`.
    """

    name: str
    lines: list[str]
    batch: str = ""
    draft: str = ""
    right: str = ""
    holder: str = ""
    operands: list[str] = field(default_factory=list)


def values(numbers: Sequence[int]) -> str:
    """Numbers as arguments."""
    return ", ".join(map(str, numbers))


class Script:
    """Writes the operations of one trace, one after the other.

    Args:
        surface: the tree to write for.
        header: the trace's setting.
        buffers: whether steps write into two buffers in turn, as the worker does, or whether
            their values may stand where they are used.

    Attributes:
        operand: source of the function that makes a law's operands, once a law was written.
        isolated: whether forwards run inside the scheduler's transaction around them.
    """

    def __init__(self, surface: Surface, header: Header, *, buffers: bool) -> None:
        self.surface, self.header, self.buffers = surface, header, buffers
        self.operand = ""
        self.isolated = False
        self._turn = 0
        self._prefill: list[Request] = []
        self._known: dict[tuple[int, int], int] = {}
        self._write: dict[type[Operation], Callable[[Operation, Effect], list[Call]]] = {
            Admit: self._admit,
            Mixed: self._mixed,
            Seed: self._seed,
            Adopt: self._absorb,
            Merge: self._absorb,
            Step: self._step,
            Sync: lambda *_: [_RESULT],
            Finish: lambda _, effect: [_end(effect)],
            Filter: self._filter,
            Retract: self._drop,
            Preempt: self._drop,
            Idle: self._idle,
            Law: self._law,
        }

    def calls(self, operation: Operation, effect: Effect) -> list[Call]:
        """The calls of the next operation, in order.

        A law must be the last one: it sets ``operand``, the function that makes its operands.
        """
        return self._write[type(operation)](operation, effect)

    def start(self) -> list[str]:
        """What stands before the first operation."""
        lines = [
            "relay = FutureMap(",
            "    DEVICE,",
            "    SpeculativeAlgorithm.DFLASH,",
            "    POOL,",
            f"    needs_cpu_seq_lens={self.header.needs_cpu_seq_lens},",
            ")",
        ]
        if self.buffers:
            shape = f"(2, {self.header.pool})"
            lines += [
                "# The worker writes its results into two buffers in turn.",
                f"out_tokens = torch.zeros({shape}, dtype={self._dtype()}, device=DEVICE)",
                f"out_lengths = torch.zeros({shape}, dtype=torch.int64, device=DEVICE)",
            ]
        return lines

    # -- one step -------------------------------------------------------------------------------

    def _resolve(self, batch: str) -> list[str]:
        lengths = [f"relay.resolve_seq_lens_cpu({batch})"] if self.header.overlap else []
        return [*lengths, f"resolve_forward_inputs({batch}, relay)"]

    def _dtype(self) -> str:
        """Dtype of the worker's token buffer."""
        return "torch.int32" if self.surface.capabilities.token_bits < 32 else "torch.int64"

    def _tokens(self, tokens: str) -> str:
        """Tokens as the worker's buffer holds them."""
        narrow = [] if self._dtype() == "torch.int64" else [f"dtype={self._dtype()}"]
        return f"ints({', '.join(filter(None, [tokens, *narrow]))})"

    def _build(self, tokens: str, lengths: str, carried: str = "", *, prefill: bool) -> list[str]:
        step = "prefill" if prefill else "decode"
        accepted = self.surface.prefill_arguments if prefill else self.surface.decode_arguments
        return [
            f"draft = WORKER._make_next_draft_input_{step}(",
            f"    {self.surface.token_argument}={tokens},",
            f"    {'seq_lens' if prefill else 'new_seq_lens'}={lengths},",
            *([f"    {CARRIED}={carried},"] if carried and CARRIED in accepted else []),
            ")",
        ]

    def payload(self, draft: str) -> str:
        """What a stash takes, as an expression."""
        wrapped = hasattr(self.surface.payload, "__self__")  # a class method of the payload class
        return f"RelayPayload.from_draft_input({draft})" if wrapped else draft

    def _forward(self, batch: str, effect: Effect, build: list[str]) -> list[Call]:
        """What a forward leaves for the next step."""
        calls = [Call("build", build, batch, "draft")]
        if self.header.overlap:
            publish = f"relay.publish({batch}.req_pool_indices, draft.new_seq_lens)"
            stash = f"relay.stash({batch}.req_pool_indices, {self.payload('draft')})"
            calls.append(Call("publish", [publish], batch, "draft"))
            calls.append(Call("stash", [stash], batch, "draft"))
            if not effect.slots:
                calls.append(Call("idle-signals", [], batch))
        if self.isolated:
            calls = self._within_isolation(batch, calls)
        else:
            calls.append(Call("restore", [], batch))
        after = [f"{batch}.input_ids = None", f"{batch}.spec_info = draft"]
        if self.header.overlap:
            after.append(f"draft.future_indices = {batch}.req_pool_indices")
        elif effect.slots:
            after += [
                f"{batch}.seq_lens = draft.new_seq_lens",
                f"{batch}.seq_lens_cpu = {batch}.seq_lens.cpu()",
                f"{batch}.seq_lens_sum = int({batch}.seq_lens_cpu.sum())",
            ]
        calls.append(Call("", after))
        if self.header.overlap:
            calls.append(Call("copy", [f"launched = {batch}.copy()"], batch))
        if effect.landed is not None:
            calls.append(_RESULT)
        return [*calls, _end(effect)]

    def _within_isolation(self, batch: str, calls: list[Call]) -> list[Call]:
        """The same inside the scheduler's transaction, which must undo what a forward does."""
        build, *relay = calls
        slots = f"{batch}.req_pool_indices"
        lines = [
            *build.lines,
            f"slots = {slots}",
            "with Scheduler._forward_isolation(",
            f"    SCHEDULER, {batch}, overlap={self.header.overlap}",
            "):",
            "    # A forward may rebind any field of the batch.",
            f"    for field in dataclasses.fields({batch}):",
            f"        setattr({batch}, field.name, None)",
            *(f"    {line.replace(slots, 'slots')}" for call in relay for line in call.lines),
        ]
        before = [Call(call.name, [], batch) for call in calls]
        return [*before, Call("restore", lines, batch)]

    # -- operations -----------------------------------------------------------------------------

    def _admit(self, operation: Operation, effect: Effect) -> list[Call]:
        lines = [*self._prefill_batch(effect, len(effect.slots)), *self._resolve("prefill")]
        return [Call("admit-resolve", lines, "prefill"), *self._run_prefill(effect)]

    def _prefill_batch(self, effect: Effect, count: int) -> list[str]:
        """A prefill batch of the effect's first `count` rows."""
        lines = []
        for request in effect.requests[:count]:
            key = (request.number, request.generation)
            if key in self._known:
                lines.append(f"r{request.number}.kv_committed_len = {request.length}")
            else:
                lines.append(f"r{request.number} = Request({request.number}, {request.length})")
            self._known[key] = request.length
        requests, slots = _names(effect.requests[:count]), effect.slots[:count]
        batch = f"make_batch([{requests}], {slots}, {effect.lengths[:count]})"
        return [*lines, f"prefill = {batch}"]

    def _run_prefill(self, effect: Effect) -> list[Call]:
        self._prefill = effect.requests
        build = self._build(
            f"ints({values(effect.tokens)})",
            "prefill.seq_lens",
            "prefill.seq_lens_cpu",
            prefill=True,
        )
        return self._forward("prefill", effect, build)

    def _mixed(self, operation: Operation, effect: Effect) -> list[Call]:
        count = len(effect.slots) - len(effect.committed)
        slots, before = effect.slots[:count], [length - 1 for length in effect.lengths[:count]]
        kv_slots = [slot * SLOTS_APART + at for slot, at in zip(slots, before, strict=True)]
        prepare = self._prepare(effect.requests[count:], effect.committed)
        lines = [
            "# Of every prompt the last token is prefilled, the others are cached.",
            f"prefill.prefix_lens, prefill.extend_lens = {before}, {[1] * count}",
            f"prefill.extend_num_tokens = {count}",
            f"prefill.extend_logprob_start_lens = {[0] * count}",
            f"prefill.out_cache_loc = ints({values(kv_slots)})",
            "prefill.mix_with_running(running)",
        ]
        calls = [
            Call("prepare", [*self._prefill_batch(effect, count), *prepare], "running"),
            Call("mix", lines, "prefill", holder="running"),
            Call("", ["prefill.decoding_reqs = running.reqs"]),
        ]
        if not self.header.overlap:
            pending = f"running.req_pool_indices, ints({values(effect.pending)})"
            stash = f"relay.stash_bonus_tokens({pending})"
            calls.append(Call("mixed-stash", [stash], "prefill"))
        calls.append(Call("mixed-resolve", self._resolve("prefill"), "prefill"))
        return [*calls, *self._run_prefill(effect)]

    def _seed(self, operation: Operation, effect: Effect) -> list[Call]:
        self._prefill = effect.requests
        lines = []
        for request, slot, token in zip(effect.requests, effect.slots, effect.tokens, strict=True):
            self._known[request.number, request.generation] = request.length
            back = [request.earlier] if request.earlier else []
            arguments = values([request.number, slot, request.length, token, *back])
            lines.append(f"r{request.number} = PrefilledRequest({arguments})")
        lines += [
            f"prefill = make_batch([{_names(effect.requests)}], [], [])",
            "prefill.prefill_input_ids_cpu = None",
            "prefill.prepare_for_prebuilt()",
            "prefill.process_prebuilt(relay)",
        ]
        return [Call("seed", lines, "prefill")]

    def _absorb(self, operation: Operation, effect: Effect) -> list[Call]:
        chunked = _names([self._prefill[row] for row in effect.left_out])
        excluded = f"[{chunked}]" if chunked else ""
        calls = [Call("absorb-filter", [f"prefill.filter_batch({excluded})"], "prefill")]
        if effect.keep and isinstance(operation, Adopt):
            calls.append(Call("", ["running = prefill"]))
        elif effect.keep:
            merge = ["running.merge_batch(prefill)"]
            calls.append(Call("merge", merge, "running", right="prefill.spec_info"))
        return calls

    def _step(self, operation: Operation, effect: Effect) -> list[Call]:
        calls = [
            Call("prepare", self._prepare(effect.requests, effect.committed), "running"),
            Call("resolve", self._resolve("running"), "running"),
        ]
        rows, turn = len(effect.slots), self._turn
        self._turn ^= 1
        if self.buffers:
            tokens, lengths = f"out_tokens[{turn}, :{rows}]", f"out_lengths[{turn}, :{rows}]"
            fill = [
                f"{tokens} = ints({values(effect.tokens)})",
                f"{lengths} = ints({values(effect.lengths)})",
            ]
        else:
            tokens, lengths = self._tokens(values(effect.tokens)), f"ints({values(effect.lengths)})"
            fill = []
        carried = "running.spec_info.reserved_seq_lens_cpu"
        build = fill + self._build(tokens, lengths, carried, prefill=False)
        return [*calls, *self._forward("running", effect, build)]

    def _prepare(self, requests: Sequence[Request], committed: Sequence[int]) -> list[str]:
        """What the running batch goes through before it decodes."""
        lines = []
        for request, length in zip(requests, committed, strict=True):
            key = (request.number, request.generation)
            if self._known[key] != length:
                self._known[key] = length
                lines.append(f"r{request.number}.kv_committed_len = {length}")
        return [
            *lines,
            "running.forward_mode = ForwardMode.DECODE",
            "running.spec_info.prepare_for_decode(running)",
        ]

    def _filter(self, operation: Operation, effect: Effect) -> list[Call]:
        assert isinstance(operation, Filter)
        leaving = ", ".join(f"r{number}" for number in operation.leaving)
        excluded = f"[{leaving}]" if leaving else ""
        return [Call("filter", [f"running.filter_batch({excluded})"], "running")]

    def _drop(self, operation: Operation, effect: Effect) -> list[Call]:
        lines = [f"running.filter_batch(keep_indices={effect.keep})"]
        return [Call(operation.op, lines, "running")]

    def _empty_batch(self, name: str) -> list[str]:
        return [
            f"{name} = make_batch([], [], [])",
            f"{name}.forward_mode = ForwardMode.IDLE",
            f"{name}.input_ids, {name}.prefill_input_ids_cpu = ints(), None",
        ]

    def _idle(self, operation: Operation, effect: Effect) -> list[Call]:
        assert isinstance(operation, Idle)
        if operation.during == "prefill":
            build = ["draft = DFlashDraftInputV2.create_idle_input(DEVICE)"]
        else:
            build = self._build(self._tokens(""), "ints()", prefill=False)
        return [
            Call("idle-resolve", self._empty_batch("idle") + self._resolve("idle"), "idle"),
            *self._forward("idle", effect, build),
            Call("idle", [], "running"),
        ]

    # -- laws -----------------------------------------------------------------------------------

    def _law(self, operation: Operation, effect: Effect) -> list[Call]:
        assert isinstance(operation, Law)
        rows = len(effect.slots)
        self.operand = self._operand(operation, effect)
        keep, cut = list(operation.keep), operation.cut
        filter_ = self._filter_draft("draft", keep)
        whole = f"draft = operand(0, {rows})"
        if operation.law == "idle":
            lines = ["idle = DFlashDraftInputV2.create_idle_input(DEVICE)"]
            return [Call("idle-input", lines, draft="idle")]
        if operation.law == "lookup":
            filtered = Call("law-filter", [filter_], draft="draft", operands=[whole])
            partly = list(keep) != list(range(rows))
            return [
                self._merge(cut, rows),
                *([filtered] if partly else []),
                self._lookup(operation, effect),
            ]
        if operation.law == "consume-twice":
            return [self._consume(effect)]
        if operation.law == "resolve-nothing":
            lines = [
                *self._empty_batch("nothing"),
                "nothing.spec_info = operand(0, 0)",
                *self._resolve("nothing"),
            ]
            return [Call("resolve-nothing", lines, "nothing")]
        if operation.law == "filter":
            calls = [Call("law-filter", [filter_], draft="draft", operands=[whole])]
            if "new_indices_cpu" in self.surface.filter_arguments:
                twin = f"twin.filter_batch(ints({values(keep)}), new_indices_cpu={keep})"
                operand = [f"twin = operand(0, {rows})"]
                calls.append(Call("law-host-path", [twin], draft="twin", operands=operand))
            return calls
        if operation.law == "permute":
            return [Call("law-permute", [filter_], draft="draft", operands=[whole])]
        if operation.law == "compose":
            then = self._filter_draft("draft", list(operation.then))
            return [
                Call("law-filter", [filter_], draft="draft", operands=[whole]),
                Call("law-compose", [then], draft="draft"),
            ]
        if operation.law == "keep-all":
            lines = [self._filter_draft("draft", list(range(rows)))]
            return [Call("law-keep-all", lines, draft="draft", operands=[whole])]
        if operation.law == "merge":
            return [self._merge(cut, rows)]
        if operation.law == "associate":
            return self._associate(cut, rows)
        if operation.law == "distribute":
            left, right = f"operand(0, {cut})", f"operand({cut}, {rows})"
            mine = self._filter_draft("left", [i for i in keep if i < cut])
            theirs = self._filter_draft("right", [i - cut for i in keep if i >= cut])
            return [
                self._merge(cut, rows),
                Call(
                    "law-filter",
                    [mine],
                    draft="left",
                    operands=[f"left, right = {left}, {right}"],
                ),
                Call("law-filter", [theirs], draft="right"),
                Call("law-distribute", ["left.merge_batch(right)"], draft="left"),
            ]
        assert operation.law == "neutral"
        first = [f"left, idle = operand(0, {rows}), operand(0, 0)"]
        second = [f"idle, right = operand(0, 0), operand(0, {rows})"]
        return [
            Call("law-neutral", ["left.merge_batch(idle)"], draft="left", operands=first),
            Call("law-neutral", ["idle.merge_batch(right)"], draft="idle", operands=second),
        ]

    def _filter_draft(self, draft: str, keep: list[int]) -> str:
        # Old trees are told that the rows have not been filtered yet, as ScheduleBatch tells them.
        old = "has_been_filtered" in self.surface.filter_arguments
        more = ", has_been_filtered=False" if old else ""
        return f"{draft}.filter_batch(ints({values(keep)}){more})"

    def _merge(self, cut: int, rows: int) -> Call:
        operands = [f"left, right = operand(0, {cut}), operand({cut}, {rows})"]
        name, lines = merge_call(0, cut, rows), ["left.merge_batch(right)"]
        return Call(name, lines, draft="left", right="right", operands=operands)

    def _associate(self, cut: int, rows: int) -> list[Call]:
        one, two = sorted((cut, rows // 2))
        parts = [f"a, b, c = operand(0, {one}), operand({one}, {two}), operand({two}, {rows})"]
        later, earlier = merge_call(one, two, rows), merge_call(0, one, two)
        return [
            self._merge(rows // 2, rows),
            Call(later, ["b.merge_batch(c)"], draft="b", operands=parts),
            Call("law-associate", ["a.merge_batch(b)"], draft="a"),
            Call(earlier, ["a.merge_batch(b)"], draft="a", operands=parts),
            Call("law-associate", ["a.merge_batch(c)"], draft="a"),
        ]

    def _operand(self, law: Law, effect: Effect) -> str:
        """A function that makes the draft input of some of the running rows."""
        lines = [
            "def operand(first, last):",
            '    """Rows `first` to `last` - 1 as a draft input of their own; no rows: idle."""',
            f"    tokens = {effect.tokens}[first:last]",
            f"    lengths = {effect.lengths}[first:last]",
            "    if first == last:",
            "        draft = DFlashDraftInputV2.create_idle_input(DEVICE)",
            "    else:",
            *(
                f"        {line}"
                for line in self._build(self._tokens("*tokens"), "ints(*lengths)", prefill=False)
            ),
        ]
        resolved = law.law in ("lookup", "consume-twice", "resolve-nothing")
        if law.form == "relayed" or resolved:
            lines.append(f"    draft.future_indices = ints(*{effect.slots}[first:last])")
        if law.mirrors and not resolved:
            for offset, mirror in enumerate(self.surface.draft_fields("mirror"), 1):
                lines += [
                    f"    draft.{mirror.name} = torch.tensor(",
                    f"        [length + {offset} for length in lengths], dtype=torch.int32",
                    "    )",
                ]
                if mirror.sums:
                    lines.append(f"    draft.{mirror.sums} = int(draft.{mirror.name}.sum())")
        return "\n".join([*lines, "    return draft"])

    def _own_relay(self, effect: Effect) -> list[str]:
        """A relay of its own in which the running rows have just been written."""
        slots = f"ints({values(effect.slots)})"
        written = self.payload(f"operand(0, {len(effect.slots)})")
        return [
            "own = FutureMap(",
            "    DEVICE, SpeculativeAlgorithm.DFLASH, POOL, needs_cpu_seq_lens=False",
            ")",
            f"own.publish({slots}, ints({values(effect.lengths)}))",
            f"own.stash({slots}, {written})",
        ]

    def _own_batch(self, draft: str, effect: Effect, keep: Sequence[int]) -> list[str]:
        """A batch of some of the running rows that carries `draft`."""
        slots, lengths = ([of[i] for i in keep] for of in (effect.slots, effect.lengths))
        lines = [
            f"batch = make_batch([], {slots}, {lengths})",
            "batch.prefill_input_ids_cpu = None",
            f"batch.spec_info = {draft}",
        ]
        if "direct_carry" in self.surface.features:
            lines.append("batch.spec_info.direct_carry_valid = False")
        return lines

    def _lookup(self, law: Law, effect: Effect) -> Call:
        rows = len(effect.slots)
        lines = [
            f"draft, right = operand(0, {law.cut}), operand({law.cut}, {rows})",
            "draft.merge_batch(right)",
        ]
        if list(law.keep) != list(range(rows)):
            lines.append(self._filter_draft("draft", list(law.keep)))
        lines += [
            *self._own_batch("draft", effect, law.keep),
            "own.resolve_seq_lens_cpu(batch)",
            "resolve_forward_inputs(batch, own)",
        ]
        written = self._own_relay(effect)
        return Call("law-lookup", lines, "batch", "draft", operands=written)

    def _consume(self, effect: Effect) -> Call:
        rows = len(effect.slots)
        batch = self._own_batch(f"operand(0, {rows})", effect, range(rows))
        return Call("consume-twice", [*self._own_relay(effect), *batch], "batch")


_RESULT = Call("results", [], "launched")
"""The host processes a result: it finds the batch as it was launched."""


def _names(requests: Sequence[Request]) -> str:
    """Requests as the variables that hold them."""
    return ", ".join(f"r{request.number}" for request in requests)


def _end(effect: Effect) -> Call:
    """The host learns of ends; filters leave such requests out."""
    return Call("", [f"r{request.number}.done = True" for request in effect.ended])
