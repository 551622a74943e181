"""What wild uses may show: one of the right answers, or a clear error."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from conformance.observation import Observation
from conformance.oracle.aspects import expect
from conformance.oracle.laws import Laws
from generators.operations import Law, Wild
from generators.protocol import Effect
from generators.values import other
from reference.draft_input import DraftInput
from reference.relay import without_padding

if TYPE_CHECKING:
    from conformance.oracle.steps import Oracle

Answers = Sequence[dict[str, Any]]
"""What a use may show where it is not refused, each as aspects; none where only an error is right.

An aspect that an answer does not name may be anything.
"""

_RELAYED, _STORED = Law("merge", "relayed"), Law("merge", "stored")
_MIRRORED = Law("merge", "relayed", mirrors=True)


class WildUses:
    """What each wild use may show."""

    def __init__(self, oracle: Oracle, laws: Laws) -> None:
        self.oracle, self.laws = oracle, laws
        self._perform: dict[str, Callable[[str, Effect], Iterator[Answers]]] = {
            "merge-raw-idle-right": self._whole,
            "merge-raw-idle-left": self._whole,
            "mirror-left-only": self._refused,
            "mirror-right-only": self._refused,
            "relayed-with-stored": self._refused,
            "stored-with-relayed": self._refused,
            "resolve-without-indices": self._untouched,
            "filter-duplicates": self._filtered,
            "filter-out-of-range": self._filtered,
            "filter-nothing": self._filtered,
            "publish-duplicates": self._one_of_two,
            "stash-duplicates": self._one_of_two,
            "padding": self._padded,
            "permuted-indices": self._one_order,
            "resolve-unwritten": self._refused,
            "prepare-twice": self._as_once,
        }

    def perform(self, operation: Wild, effect: Effect) -> Iterator[Observation]:
        """What each call of one wild use may show."""
        for answers in self._perform[operation.use](operation.use, effect):
            yield expect(operation.name, answers=answers)

    def _refused(self, use: str, effect: Effect) -> Iterator[Answers]:
        yield []

    def _whole(self, use: str, effect: Effect) -> Iterator[Answers]:
        yield [self._rows(self.laws.operand(_RELAYED, effect, effect.rows()))]

    def _untouched(self, use: str, effect: Effect) -> Iterator[Answers]:
        draft = self.laws.operand(_STORED, effect, effect.rows())
        yield [{"tokens": draft.tokens, "lengths": draft.lengths}]

    def _filtered(self, use: str, effect: Effect) -> Iterator[Answers]:
        keep = {"filter-duplicates": [*effect.rows(), 0], "filter-nothing": []}.get(use)
        for form in (_RELAYED, _MIRRORED, _STORED):
            kept = None if keep is None else self.laws.operand(form, effect, keep)
            yield [] if kept is None else [self._rows(kept)]

    def _rows(self, draft: DraftInput) -> dict[str, Any]:
        rows = {"future": draft.future_indices, "mirrors": draft.mirrors}
        if draft.future_indices is None:
            rows.update(tokens=draft.tokens, lengths=draft.lengths)
        return rows

    def _one_of_two(self, use: str, effect: Effect) -> Iterator[Answers]:
        channel = use.removesuffix("-duplicates")
        first, *rest = effect.lengths if channel == "publish" else effect.tokens
        yield [
            self._written(effect, **{channel: [value, *rest]}) for value in (first, other(first))
        ]

    def _padded(self, use: str, effect: Effect) -> Iterator[Answers]:
        written = self._written(effect, effect.lengths, effect.tokens)
        yield [{name: without_padding(channel) for name, channel in written.items()}]

    def _written(
        self, effect: Effect, publish: list[int] | None = None, stash: list[int] | None = None
    ) -> dict[str, Any]:
        """The channels after the running rows' slots are given lengths, tokens, or both."""
        oracle, relay = self.oracle, copy.copy(self.oracle.relay)
        slots = oracle.tensor(effect.slots)
        if publish is not None:
            relay.publish(slots, oracle.tensor(publish))
        if stash is not None:
            relay.stash(slots, oracle.tensor(stash, oracle.facts.token_dtype))
        return oracle.relay_aspects(relay)

    def _one_order(self, use: str, effect: Effect) -> Iterator[Answers]:
        """That of future_indices, as the tree's relay goes by them, or that of the requests."""
        answers = []
        for order in (effect.rows()[::-1], effect.rows()):
            draft = self.laws.operand(_RELAYED, effect, order)
            answer = {"tokens": draft.tokens, "lengths": draft.lengths}
            if not self.oracle.facts.host_lengths_lag:
                answer["host"] = draft.lengths.cpu()
            answers.append(answer)
        yield answers

    def _as_once(self, use: str, effect: Effect) -> Iterator[Answers]:
        yield [{"changed": []}]
