"""What must be true after the call that deviates, as assertions with literal values.

The expectation is the reference model's observation of the call (:mod:`conformance.oracle`), so a
claim says what the specification says and not what some tree did.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from conformance.difference import Difference
from conformance.emit.calls import Call
from conformance.observation import Observation
from conformance.sut.surface import Surface

BEGINS = {"idle-signals": "publish"}
"""Calls whose claims compare with what was before an earlier call of the operation."""

_VALUES = {
    "future": "{draft}.future_indices",
    "lengths": "{draft}.new_seq_lens",
    "input_ids": "{batch}.input_ids",
    "seq_lens": "{batch}.seq_lens",
    "prompts": "{batch}.orig_seq_lens",
    "slots": "{batch}.req_pool_indices",
    "slots_cpu": "{batch}.req_pool_indices_cpu",
    "requests": "[request.rid for request in {batch}.reqs]",
    "sampling": "{batch}.sampling_info.rows",
    "committed": "{batch}.seq_lens_cpu",
    "committed_sum": "{batch}.seq_lens_sum",
    "host": "{batch}.seq_lens_cpu",
    "host_sum": "{batch}.seq_lens_sum",
    "staged": "[{batch}.input_ids, {batch}.prefill_input_ids_cpu]",
    "prefix": "{batch}.prefix_lens",
    "extends": "{batch}.extend_lens",
    "mode": "{batch}.forward_mode.name",
    "decoding": "[request.rid for request in {batch}.decoding_reqs or ()]",
    "kv_slots": "{batch}.out_cache_loc",
}
"""Where the values are that only have to be equal."""

_BUFFERS = "{name for name, value in vars(relay).items() if torch.is_tensor(value)}"
"""Names of all tensors that the relay holds."""

Lines = list[str]


@dataclass(frozen=True)
class Scene:
    """What the claims of an operation depend on beside the tree.

    Attributes:
        parts: attributes of the operation's draft inputs that carry rows in their form.
        armed: whether the relay was published to before.
        fresh: whether the relay has a flag that a publish sets.
        idle: dtype and shape that each stored tensor of an idle draft input must have.
    """

    parts: tuple[str, ...]
    armed: bool
    fresh: bool
    idle: dict[str, tuple[torch.dtype, tuple[int, ...]]]


class Claims:
    """Writes the assertions of one difference."""

    def __init__(self, surface: Surface, difference: Difference, scene: Scene) -> None:
        self.surface, self.difference, self.scene = surface, difference, scene
        self._special: dict[str, Callable[[Call, Observation], tuple[Lines, Lines]]] = {
            "widths": self._widths,
            "extra_rows": self._extra_rows,
            "sums": self._sums,
            "copied": self._copied,
            "aliased": self._aliased,
            "appeared": self._appeared,
            "unchanged": self._unchanged,
            "changed": self._changed,
            "forms": self._forms,
            "held": self._held,
            "right_intact": self._right_intact,
            "right_shared": self._right_shared,
            "planning": self._planning,
            "planning_sum": self._planning_sum,
        }
        if difference.call in ("idle-input", "consume-twice"):
            of = {"idle-input": self._idle_input, "consume-twice": self._consume_twice}
            self._special = {difference.aspect: of[difference.call]}

    def of(self, call: Call, expected: Observation) -> tuple[Lines, Lines]:
        """What to note before the call, and what to assert after it."""
        aspect = self.difference.aspect
        if aspect in expected.aspects.get("mirrors", ()):
            return self._mirror(call, expected)
        return self._special.get(aspect, self._value)(call, expected)

    # -- pieces -----------------------------------------------------------------------------------

    def _equal(self, observed: str, expected: str) -> Lines:
        one = f"self.assertEqual({observed}, {expected}, RULE)"
        if len(one) <= 80:
            return [one]
        return [
            "self.assertEqual(",
            *(f"    {a}," for a in (observed, expected, "RULE")),
            ")",
        ]

    def _separate(self, mine: str, theirs: list[str]) -> Lines:
        holders = ", ".join(f"storage({other})" for other in theirs)
        return [
            "self.assertNotIn(",
            *(f"    {a}," for a in (f"storage({mine})", f"[{holders}]", "RULE")),
            ")",
        ]

    def _place(self, aspect: str, call: Call) -> str:
        """The expression that holds a value."""
        surface = self.surface
        draft = _draft(call)
        if aspect == "relay_tokens":
            return f"relay.{surface.token_channel}"
        if aspect == "relay_lengths":
            return f"relay.{surface.length_channel}"
        if aspect == "tokens":
            return f"{draft}.{surface.token_field}"
        if aspect == "lengths" and call.name in ("resolve", "law-lookup"):
            return f"{call.batch}.seq_lens"
        return _VALUES[aspect].format(batch=call.batch, draft=draft)

    def _channels(self) -> list[str]:
        names = (self.surface.token_channel, self.surface.length_channel)
        return [f"relay.{name}" for name in names if name is not None]

    # -- one method per kind of claim ---------------------------------------------------------

    def _value(self, call: Call, expected: Observation) -> tuple[Lines, Lines]:
        aspect = self.difference.aspect
        if aspect not in expected.aspects:
            return [], []
        place, value = self._place(aspect, call), expected.aspects[aspect]
        if not isinstance(value, Tensor):
            return [], self._equal(place, repr(value))
        after = self._equal(f"seen({place})", content(value))
        if self.difference.clause in ("R3", "R10"):
            after.append(f"self.assertTrue({place}.is_contiguous(), RULE)")
        return [], after

    def _mirror(self, call: Call, expected: Observation) -> tuple[Lines, Lines]:
        # A merge may widen a host mirror; its values count.
        name = f"{call.draft}.{self.difference.aspect}"
        values = expected.aspects["mirrors"][self.difference.aspect].tolist()
        return [], [
            f"self.assertIsNotNone({name}, RULE)",
            *self._equal(f"{name}.tolist()", str(values)),
        ]

    def _sums(self, call: Call, expected: Observation) -> tuple[Lines, Lines]:
        fields = {f.name: f.sums for f in self.surface.draft_fields("mirror")}
        sums = expected.aspects.get("sums", {}).items()
        return [], [
            line
            for name, total in sums
            for line in self._equal(f"{call.draft}.{fields[name]}", str(total))
        ]

    def _widths(self, call: Call, expected: Observation) -> tuple[Lines, Lines]:
        draft = _draft(call)
        names = ("topk_p", "topk_index", self.surface.token_field, "new_seq_lens", "hidden_states")
        present = {field.name for field in self.surface.draft_fields("row")}
        lines = []
        for place, shape, dtype in expected.aspects.get("widths", ()):
            if names[place] in present:
                name = f"{draft}.{names[place]}"
                lines += self._equal(f"({name}.dtype, tuple({name}.shape))", f"({dtype}, {shape})")
        return [], lines

    def _extra_rows(self, call: Call, expected: Observation) -> tuple[Lines, Lines]:
        draft = _draft(call)
        five = {"topk_p", "topk_index", self.surface.token_field, "new_seq_lens", "hidden_states"}
        if "tokens" not in expected.aspects:
            return [], []
        rows = expected.aspects["tokens"].shape[0]
        return [], [
            line
            for field in self.surface.draft_fields("row")
            if field.name not in five
            for line in self._equal(f"{draft}.{field.name}.shape[0]", str(rows))
        ]

    def _copied(self, call: Call, expected: Observation) -> tuple[Lines, Lines]:
        lengths, tokens = "new_seq_lens", self.surface.token_field
        written = {"publish": [lengths], "stash": [tokens], "seed": [tokens, lengths]}
        return [], [
            line
            for name in written[call.name]
            for line in self._separate(f"{_draft(call)}.{name}", self._channels())
        ]

    def _appeared(self, call: Call, expected: Observation) -> tuple[Lines, Lines]:
        channels = ", ".join(f'"{name.removeprefix("relay.")}"' for name in self._channels())
        before = [f"buffers = {_BUFFERS}", f"buffers |= {{{channels}}}  # these may be made here"]
        return before, self._equal(f"{_BUFFERS} - buffers", "set()")

    def _aliased(self, call: Call, expected: Observation) -> tuple[Lines, Lines]:
        return [], [
            line
            for aspect in ast.literal_eval(self.difference.observed)
            for line in self._separate(self._place(aspect, call), self._channels())
        ]

    def _unchanged(self, call: Call, expected: Observation) -> tuple[Lines, Lines]:
        before = [f"buffers = {_BUFFERS}"]
        after = self._equal(_BUFFERS, "buffers")
        if self.scene.armed:
            before.append("relay.publish_ready = mock.Mock()")
            after += self._equal("relay.publish_ready.mock_calls", "[]")
        else:
            after.append("self.assertIsNone(relay.publish_ready, RULE)")
        if self.scene.fresh:
            before.append("fresh = relay._publish_fresh")
            after += self._equal("relay._publish_fresh", "fresh")
        return before, after

    def _changed(self, call: Call, expected: Observation) -> tuple[Lines, Lines]:
        before, after = [], []
        for name in ast.literal_eval(self.difference.observed):
            before.append(f"{name} = {call.batch}.{name}")
            after += self._equal(f"seen({call.batch}.{name})", f"seen({name})")
        return before, after

    def _forms(self, call: Call, expected: Observation) -> tuple[Lines, Lines]:
        drafts = f"({call.batch}.spec_info, {call.right})"
        forms = f"[draft.future_indices is not None for draft in {drafts}]"
        return self._equal(forms, str(expected.aspects["forms"])), []

    def _held(self, call: Call, expected: Observation) -> tuple[Lines, Lines]:
        if "held" not in expected.aspects:
            return [], []
        batch = call.holder or call.batch
        draft = f"{batch}.spec_info" if call.holder else _draft(call)
        held = [f"{draft}.{name}" for name in self.scene.parts]
        if batch:
            held.insert(0, f"{batch}.req_pool_indices")
        return [
            "held = [",
            *(f"    {tensor}," for tensor in held),
            "]",
            "before = [seen(tensor) for tensor in held]",
        ], self._equal("[seen(tensor) for tensor in held]", "before")

    def _right_intact(self, call: Call, expected: Observation) -> tuple[Lines, Lines]:
        if "right_intact" not in expected.aspects:
            return [], []
        parts = self.scene.parts
        right = f"[{', '.join(f'seen({call.right}.{name})' for name in parts)}]"
        return [f"before = {right}"], self._equal(right, "before")

    def _right_shared(self, call: Call, expected: Observation) -> tuple[Lines, Lines]:
        if "right_shared" not in expected.aspects:
            return [], []
        draft = _draft(call)
        theirs = [f"{call.right}.{name}" for name in self.scene.parts]
        return [], [
            line
            for name in ast.literal_eval(self.difference.observed)
            for line in self._separate(f"{draft}.{name}", theirs)
        ]

    def _planning(self, call: Call, expected: Observation) -> tuple[Lines, Lines]:
        bounds = f"{call.batch}.spec_info.planning_seq_lens_cpu.tolist()"
        true = expected.aspects["planning"]
        return [], [
            f"bounds = {bounds}",
            f"for bound, length in zip(bounds, {true}):",
            "    self.assertGreaterEqual(bound, length, RULE)",
        ]

    def _planning_sum(self, call: Call, expected: Observation) -> tuple[Lines, Lines]:
        draft = f"{call.batch}.spec_info"
        total = f"int({draft}.planning_seq_lens_cpu.sum())"
        return [], self._equal(f"{draft}.planning_seq_lens_sum", total)

    def _idle_input(self, call: Call, expected: Observation) -> tuple[Lines, Lines]:
        name = f"idle.{self.difference.aspect}"
        dtype, shape = self.scene.idle[self.difference.aspect]
        return [], self._equal(f"({name}.dtype, tuple({name}.shape))", f"({dtype}, {shape})")

    def _consume_twice(self, call: Call, expected: Observation) -> tuple[Lines, Lines]:
        lengths = self.difference.aspect == "lengths"
        resolve = (
            "own.resolve_seq_lens_cpu(batch)" if lengths else "resolve_forward_inputs(batch, own)"
        )
        return [], [
            resolve,
            "# Writing the padding row arms the relay again; the rows are consumed all the same.",
            "own.publish(ints(0), ints(1))",
            "with self.assertRaises(RuntimeError, msg=RULE):",
            f"    {resolve}",
        ]


def _draft(call: Call) -> str:
    return call.draft or f"{call.batch}.spec_info"


def content(value: Tensor) -> str:
    """What `seen` must give for a tensor: its dtype and its values, as text."""
    unwritten = "UNWRITTEN_INT32" if value.dtype == torch.int32 else "UNWRITTEN"
    most = torch.iinfo(value.dtype).max  # what torch fills fresh memory with
    texts = [unwritten if number == most else str(number) for number in value.tolist()]
    parts: list[str] = []
    row: list[str] = []
    for text, group in itertools.groupby(texts):
        count = len(list(group))
        if count > _REPEATED:
            parts += [f"[{', '.join(row)}]"] * bool(row) + [f"[{text}] * {count}"]
            row = []
        else:
            row += [text] * count
    parts += [f"[{', '.join(row)}]"] * bool(row or not parts)
    return f"({value.dtype}, {' + '.join(parts)})"


_REPEATED = 4
"""Longer runs of one value are abbreviated."""
