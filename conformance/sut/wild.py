"""Carry out wild uses: what the API accepts and no scheduler path issues, on copies.

A wild use leaves the relay and the batch as they are, so a trace goes on after it. The model's side
is :mod:`conformance.oracle.wild`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from conformance.sut.laws import Laws, every
from conformance.sut.surface import make_draft_input
from generators.operations import Law, Wild
from generators.protocol import Effect

if TYPE_CHECKING:
    from conformance.sut.driver import Driver

_RELAYED, _STORED = Law("merge", "relayed"), Law("merge", "stored")
_MIRRORED = Law("merge", "relayed", mirrors=True)


class WildUses:
    """The wild uses on one driver's tree."""

    def __init__(self, driver: Driver, laws: Laws) -> None:
        self.driver, self.laws = driver, laws
        self._perform: dict[str, Callable[[str, Effect], None]] = {
            "merge-raw-idle-right": self._merge_raw_idle,
            "merge-raw-idle-left": self._merge_raw_idle,
            "mirror-left-only": self._merge_unlike,
            "mirror-right-only": self._merge_unlike,
            "relayed-with-stored": self._merge_unlike,
            "stored-with-relayed": self._merge_unlike,
            "resolve-without-indices": self._resolve_without_indices,
        }

    def perform(self, operation: Wild, effect: Effect) -> None:
        """Carry out one wild use."""
        self._perform[operation.use](operation.use, effect)

    def _merge_raw_idle(self, use: str, effect: Effect) -> None:
        live = self.laws.operand(_RELAYED, effect, every(effect))
        raw = self.laws.operand(_STORED, effect, [])
        self._merge(use, *((live, raw) if use.endswith("right") else (raw, live)))

    def _merge_unlike(self, use: str, effect: Effect) -> None:
        """Merge two draft inputs of one row each that no step would ever bring together."""
        left, right = {
            "mirror-left-only": (_MIRRORED, _RELAYED),
            "mirror-right-only": (_RELAYED, _MIRRORED),
            "relayed-with-stored": (_RELAYED, _STORED),
            "stored-with-relayed": (_STORED, _RELAYED),
        }[use]
        row = every(effect)[:1]
        operands = (self.laws.operand(form, effect, row) for form in (left, right))
        self._merge(use, *operands)

    def _merge(self, use: str, left: Any, right: Any) -> None:
        outcome = self.driver.attempt(left.merge_batch, right)
        if outcome is not None:
            self.driver.observe(f"wild-{use}", outcome=outcome)
        else:
            self.laws.observe(f"wild-{use}", left, outcome=None)

    def _resolve_without_indices(self, use: str, effect: Effect) -> None:
        driver, surface = self.driver, self.driver.surface
        batch = copy.copy(driver.running)
        tokens, lengths = driver.tensor(effect.tokens), driver.tensor(effect.lengths)
        batch.spec_info = make_draft_input(surface, tokens, lengths)
        batch.seq_lens = driver.tensor(effect.lengths)
        batch.enable_overlap = True
        outcome = driver.attempt(driver.relay.resolve_seq_lens_cpu, batch) or driver.attempt(
            surface.resolve_forward_inputs, batch, driver.relay
        )
        driver.observe(
            f"wild-{use}",
            outcome=outcome,
            tokens=getattr(batch.spec_info, surface.token_field),
            lengths=batch.seq_lens,
        )
