"""The algebraic laws of the draft input on the reference model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from conformance.observation import Observation, merge_call
from conformance.oracle.aspects import expect, rows_of
from generators.operations import Law
from generators.protocol import Effect
from reference import draft_input
from reference.draft_input import DraftInput

if TYPE_CHECKING:
    from conformance.oracle.steps import Oracle


class Laws:
    """What each law must show."""

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle
        self._perform: dict[str, Callable[[Law, Effect], Iterator[Observation]]] = {
            "filter": self._filter,
            "permute": self._permute,
            "compose": self._compose,
            "keep-all": self._keep_all,
            "merge": self._merge,
            "associate": self._associate,
            "distribute": self._distribute,
            "neutral": self._neutral,
            "idle": self._idle,
            "lookup": self._lookup,
            "consume-twice": self._consume_twice,
            "resolve-nothing": self._resolve_nothing,
            "bookkeeping": lambda *_: iter([expect("law-bookkeeping")]),
            "penalties": lambda *_: iter([expect("law-penalties")]),
        }

    def perform(self, operation: Law, effect: Effect) -> Iterator[Observation]:
        """What the calls of one law must show."""
        return self._perform[operation.law](operation, effect)

    def _filter(self, operation: Law, effect: Effect) -> Iterator[Observation]:
        kept = self._kept(operation, effect)
        yield self.show("law-filter", kept, held=True)
        if self.oracle.facts.host_index_filter:
            yield self.show("law-host-path", kept)

    def _permute(self, operation: Law, effect: Effect) -> Iterator[Observation]:
        yield self.show("law-permute", self._kept(operation, effect))

    def _kept(self, operation: Law, effect: Effect) -> DraftInput:
        whole = self.operand(operation, effect, effect.rows())
        return draft_input.filter_rows(whole, self.oracle.tensor(list(operation.keep)))

    def _compose(self, operation: Law, effect: Effect) -> Iterator[Observation]:
        once = self._kept(operation, effect)
        yield self.show("law-filter", once)
        twice = draft_input.filter_rows(once, self.oracle.tensor(list(operation.then)))
        yield self.show("law-compose", twice)

    def _keep_all(self, operation: Law, effect: Effect) -> Iterator[Observation]:
        yield self.show("law-keep-all", self.operand(operation, effect, effect.rows()))

    def _merge(self, operation: Law, effect: Effect) -> Iterator[Observation]:
        yield self._merged_at(operation, effect, operation.cut)

    def _merged_at(self, operation: Law, effect: Effect, cut: int) -> Observation:
        whole = self.operand(operation, effect, effect.rows())
        call = merge_call(0, cut, whole.rows)
        return self.show(call, whole, right_intact=True, right_shared=[])

    def _associate(self, operation: Law, effect: Effect) -> Iterator[Observation]:
        rows = effect.rows()
        yield self._merged_at(operation, effect, len(rows) // 2)
        first, second = sorted((operation.cut, len(rows) // 2))
        call = merge_call(first, second, len(rows))
        yield self.show(call, self.operand(operation, effect, rows[first:]))
        yield self.show("law-associate", self.operand(operation, effect, rows))
        call = merge_call(0, first, second)
        yield self.show(call, self.operand(operation, effect, rows[:second]))
        yield self.show("law-associate", self.operand(operation, effect, rows))

    def _distribute(self, operation: Law, effect: Effect) -> Iterator[Observation]:
        yield self._merged_at(operation, effect, operation.cut)
        left = [i for i in operation.keep if i < operation.cut]
        right = [i for i in operation.keep if i >= operation.cut]
        for part in (left, right):
            yield self.show("law-filter", self.operand(operation, effect, part))
        yield self.show("law-distribute", self.operand(operation, effect, left + right))

    def _neutral(self, operation: Law, effect: Effect) -> Iterator[Observation]:
        for _ in range(2):
            yield self.show("law-neutral", self.operand(operation, effect, effect.rows()))

    def _idle(self, operation: Law, effect: Effect) -> Iterator[Observation]:
        yield expect("idle-input", layout=None)

    def _lookup(self, operation: Law, effect: Effect) -> Iterator[Observation]:
        yield self._merged_at(Law("merge"), effect, operation.cut)
        if list(operation.keep) != effect.rows():
            yield self.show("law-filter", self._kept(Law("filter", keep=operation.keep), effect))
        kept = self.operand(Law("merge"), effect, operation.keep)
        yield expect(
            "law-lookup", tokens=kept.tokens, lengths=kept.lengths, **self.oracle.relay_aspects()
        )

    def _consume_twice(self, operation: Law, effect: Effect) -> Iterator[Observation]:
        channels = ["tokens", *(["lengths"] if self.oracle.facts.poison_lengths else [])]
        wanted = [name for name in channels if operation.channel in ("", name)]
        yield expect("consume-twice", **{name: [True, True] for name in wanted})

    def _resolve_nothing(self, operation: Law, effect: Effect) -> Iterator[Observation]:
        nothing = self.oracle.tensor([])
        yield expect("resolve-nothing", seq_lens=nothing, **self.oracle.relay_aspects())

    def operand(self, operation: Law, effect: Effect, rows: Sequence[int]) -> DraftInput:
        """A draft input of some of the running rows, in the law's form."""
        oracle = self.oracle
        draft = draft_input.live(
            oracle.tensor([effect.tokens[i] for i in rows], oracle.facts.token_dtype),
            oracle.tensor([effect.lengths[i] for i in rows]),
        )
        if operation.form == "relayed":
            draft = replace(draft, future_indices=oracle.tensor([effect.slots[i] for i in rows]))
        if operation.mirrors:
            mirrors = {
                name: torch.tensor([effect.lengths[i] + offset for i in rows], dtype=torch.int32)
                for offset, (name, _) in enumerate(oracle.facts.mirrors, 1)
            }
            draft = replace(draft, mirrors=mirrors)
        return draft

    def show(self, call: str, draft: DraftInput, **more: Any) -> Observation:
        """Everything that a filter or merge of a draft input alone decides."""
        sums = {
            name: draft.sums[name]
            for name, total in self.oracle.facts.mirrors
            if total and name in draft.mirrors
        }
        return expect(
            call,
            **rows_of(draft),
            mirrors=draft.mirrors,
            sums=sums,
            **more,
            **self.oracle.relay_aspects(),
        )
