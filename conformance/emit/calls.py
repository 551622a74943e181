"""A trace as straight-line calls on a tree's own classes, call for call what the driver makes.

The text names what the tree it is written for has: its fields, its payload class, the arguments of
its builders and of ``filter_batch``. Nothing in it probes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conformance.observation import merge_call
from conformance.sut.surface import Surface
from generators.operations import (
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
        fresh: whether it starts from operands of its own.
    """

    name: str
    lines: list[str]
    batch: str = ""
    draft: str = ""
    right: str = ""
    fresh: bool = False


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
        self._chunk: int | None = None
        self._known: dict[tuple[int, int], int] = {}
        self._write: dict[type[Operation], Callable[[Operation, Effect], list[Call]]] = {
            Admit: self._admit,
            Adopt: self._absorb,
            Merge: self._absorb,
            Step: self._step,
            Finish: self._finish,
            Filter: self._filter,
            Retract: self._retract,
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
        return [*calls, Call("", after)]

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
        assert isinstance(operation, Admit)
        self._chunk = operation.chunk
        lines = []
        for request in effect.requests:
            key = (request.number, request.generation)
            if key in self._known:
                lines.append(f"r{request.number}.kv_committed_len = {request.length}")
            else:
                lines.append(f"r{request.number} = Request({request.number}, {request.length})")
            self._known[key] = request.length
        names = ", ".join(f"r{request.number}" for request in effect.requests)
        lines += [
            f"prefill = make_batch([{names}], {effect.slots}, {effect.lengths})",
            *self._resolve("prefill"),
        ]
        build = self._build(
            f"ints({values(effect.tokens)})",
            "prefill.seq_lens",
            "prefill.seq_lens_cpu",
            prefill=True,
        )
        resolve = Call("admit-resolve", lines, "prefill")
        return [resolve, *self._forward("prefill", effect, build)]

    def _absorb(self, operation: Operation, effect: Effect) -> list[Call]:
        chunked = f"[r{self._chunk}]" if self._chunk is not None else ""
        calls = [Call("absorb-filter", [f"prefill.filter_batch({chunked})"], "prefill")]
        if effect.stays and isinstance(operation, Adopt):
            calls.append(Call("", ["running = prefill"]))
        elif effect.stays:
            merge = ["running.merge_batch(prefill)"]
            calls.append(Call("merge", merge, "running", right="prefill.spec_info"))
        return calls

    def _step(self, operation: Operation, effect: Effect) -> list[Call]:
        assert isinstance(operation, Step)
        lines = [
            *self._committed(effect.requests, effect.committed),
            "running.forward_mode = ForwardMode.DECODE",
            "running.spec_info.prepare_for_decode(running)",
        ]
        calls = [
            Call("prepare", lines, "running"),
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
        calls += self._forward("running", effect, build)
        done = [f"r{number}.done = True" for number in operation.redundant]
        return [*calls, Call("", done)]

    def _committed(self, requests: Sequence[Request], committed: Sequence[int]) -> list[str]:
        lines = []
        for request, length in zip(requests, committed, strict=True):
            key = (request.number, request.generation)
            if self._known[key] != length:
                self._known[key] = length
                lines.append(f"r{request.number}.kv_committed_len = {length}")
        return lines

    def _finish(self, operation: Operation, effect: Effect) -> list[Call]:
        assert isinstance(operation, Finish)
        return [Call("", [f"r{operation.request}.done = True"])]

    def _filter(self, operation: Operation, effect: Effect) -> list[Call]:
        return [Call("filter", ["running.filter_batch()"], "running")]

    def _retract(self, operation: Operation, effect: Effect) -> list[Call]:
        lines = [f"running.filter_batch(keep_indices={effect.keep})"]
        return [Call("retract", lines, "running")]

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
            calls = [Call("law-filter", [whole, filter_], draft="draft", fresh=True)]
            if "new_indices_cpu" in self.surface.filter_arguments:
                twin = [
                    f"twin = operand(0, {rows})",
                    f"twin.filter_batch(ints({values(keep)}), new_indices_cpu={keep})",
                ]
                calls.append(Call("law-host-path", twin, draft="twin", fresh=True))
            return calls
        if operation.law == "compose":
            then = self._filter_draft("draft", list(operation.then))
            return [
                Call("law-filter", [whole, filter_], draft="draft", fresh=True),
                Call("law-compose", [then], draft="draft"),
            ]
        if operation.law == "keep-all":
            lines = [whole, self._filter_draft("draft", list(range(rows)))]
            return [Call("law-keep-all", lines, draft="draft", fresh=True)]
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
                    [f"left, right = {left}, {right}", mine],
                    draft="left",
                    fresh=True,
                ),
                Call("law-filter", [theirs], draft="right"),
                Call("law-distribute", ["left.merge_batch(right)"], draft="left"),
            ]
        assert operation.law == "neutral"
        first = [f"left, idle = operand(0, {rows}), operand(0, 0)", "left.merge_batch(idle)"]
        second = [f"idle, right = operand(0, 0), operand(0, {rows})", "idle.merge_batch(right)"]
        return [
            Call("law-neutral", first, draft="left", fresh=True),
            Call("law-neutral", second, draft="idle", fresh=True),
        ]

    def _filter_draft(self, draft: str, keep: list[int]) -> str:
        # Old trees are told that the rows have not been filtered yet, as ScheduleBatch tells them.
        old = "has_been_filtered" in self.surface.filter_arguments
        more = ", has_been_filtered=False" if old else ""
        return f"{draft}.filter_batch(ints({values(keep)}){more})"

    def _merge(self, cut: int, rows: int) -> Call:
        lines = [
            f"left, right = operand(0, {cut}), operand({cut}, {rows})",
            "left.merge_batch(right)",
        ]
        name = merge_call(0, cut, rows)
        return Call(name, lines, draft="left", right="right", fresh=True)

    def _associate(self, cut: int, rows: int) -> list[Call]:
        one, two = sorted((cut, rows // 2))
        parts = f"a, b, c = operand(0, {one}), operand({one}, {two}), operand({two}, {rows})"
        return [
            self._merge(rows // 2, rows),
            Call(merge_call(one, two, rows), [parts, "b.merge_batch(c)"], draft="b", fresh=True),
            Call("law-associate", ["a.merge_batch(b)"], draft="a"),
            Call(merge_call(0, one, two), [parts, "a.merge_batch(b)"], draft="a", fresh=True),
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
        if law.form == "relayed" or law.law in ("consume-twice", "resolve-nothing"):
            lines.append(f"    draft.future_indices = ints(*{effect.slots}[first:last])")
        if law.mirrors:
            for offset, mirror in enumerate(self.surface.draft_fields("mirror"), 1):
                lines += [
                    f"    draft.{mirror.name} = torch.tensor(",
                    f"        [length + {offset} for length in lengths], dtype=torch.int32",
                    "    )",
                ]
                if mirror.sums:
                    lines.append(f"    draft.{mirror.sums} = int(draft.{mirror.name}.sum())")
        return "\n".join([*lines, "    return draft"])

    def _consume(self, effect: Effect) -> Call:
        lines = [
            "relay = FutureMap(DEVICE, SpeculativeAlgorithm.DFLASH, POOL)",
            f"batch = make_batch([], {effect.slots}, {effect.lengths})",
            "batch.prefill_input_ids_cpu = None",
            f"batch.spec_info = operand(0, {len(effect.slots)})",
        ]
        if "direct_carry" in self.surface.features:
            lines.append("batch.spec_info.direct_carry_valid = False")
        lines += [
            "relay.publish(batch.req_pool_indices, batch.seq_lens)",
            f"relay.stash(batch.req_pool_indices, {self.payload('batch.spec_info')})",
        ]
        return Call("consume-twice", lines, "batch")
