"""Carry out wild uses: what the API accepts and no scheduler path issues, on copies.

A wild use leaves the relay and the batch as they are, so a trace goes on after it. The model's side
is :mod:`conformance.oracle.wild`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from conformance.sut.laws import Laws
from conformance.sut.surface import make_draft_input
from generators.operations import Law, Wild
from generators.protocol import Effect
from generators.values import other
from reference.relay import without_padding

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
            "filter-duplicates": self._filter,
            "filter-out-of-range": self._filter,
            "filter-nothing": self._filter,
            "publish-duplicates": self._write,
            "stash-duplicates": self._write,
            "padding": self._write,
            "permuted-indices": self._permuted_indices,
            "resolve-unwritten": self._resolve_unwritten,
            "prepare-twice": self._prepare_twice,
        }

    def perform(self, operation: Wild, effect: Effect) -> None:
        """Carry out one wild use."""
        self._perform[operation.use](operation.use, effect)

    # -- merging and filtering ------------------------------------------------------------------

    def _merge_raw_idle(self, use: str, effect: Effect) -> None:
        live = self.laws.operand(_RELAYED, effect, effect.rows())
        raw = self.laws.operand(_STORED, effect, [])
        left, right = (live, raw) if use.endswith("right") else (raw, live)
        self._show(use, left, left.merge_batch, right)

    def _merge_unlike(self, use: str, effect: Effect) -> None:
        """Merge two draft inputs of one row each that no step would ever bring together."""
        forms = {
            "mirror-left-only": (_MIRRORED, _RELAYED),
            "mirror-right-only": (_RELAYED, _MIRRORED),
            "relayed-with-stored": (_RELAYED, _STORED),
            "stored-with-relayed": (_STORED, _RELAYED),
        }[use]
        row = effect.rows()[:1]
        left, right = (self.laws.operand(form, effect, row) for form in forms)
        self._show(use, left, left.merge_batch, right)

    def _filter(self, use: str, effect: Effect) -> None:
        rows = effect.rows()
        keep = {
            "filter-duplicates": [*rows, 0],
            "filter-out-of-range": [len(rows)],
            "filter-nothing": [],
        }[use]
        for form in (_RELAYED, _MIRRORED, _STORED):
            draft = self.laws.operand(form, effect, rows)
            indices = self.driver.tensor(keep)
            self._show(use, draft, draft.filter_batch, indices, **self.laws.filter_options)

    def _show(
        self, use: str, draft: Any, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> None:
        """Do something to a draft input, and observe its rows or the error."""
        outcome = self.driver.attempt(function, *args, **kwargs)
        if outcome is not None:
            self.driver.observe(f"wild-{use}", outcome=outcome)
        else:
            self.laws.observe(f"wild-{use}", draft, outcome=None)

    # -- the relay ------------------------------------------------------------------------------

    def _write(self, use: str, effect: Effect) -> None:
        """Write the running rows to a copied relay, with one slot among them given again."""
        driver = self.driver
        again = [(effect.slots[0], other(effect.lengths[0]), other(effect.tokens[0]))]
        if use == "padding":
            again = [(0, value, value) for value in (1, 2, 3)]
        rows = [*zip(effect.slots, effect.lengths, effect.tokens, strict=True), *again]
        slots, lengths, tokens = (list(column) for column in zip(*rows, strict=True))
        relay, indices, values = driver.relay_copy(), driver.tensor(slots), driver.tensor(lengths)
        outcome = None
        if use != "stash-duplicates":
            outcome = driver.attempt(relay.publish, indices, values)
        if use != "publish-duplicates" and outcome is None:
            bonus = driver.tensor(tokens, driver.token_dtype)
            draft = make_draft_input(driver.surface, bonus, values)
            outcome = driver.attempt(relay.stash, indices, driver.surface.payload(draft))
        channels = driver.relay_aspects(relay)
        if use == "padding":
            channels = {name: without_padding(channel) for name, channel in channels.items()}
        driver.observe(f"wild-{use}", outcome=outcome, **channels)

    def _resolve_without_indices(self, use: str, effect: Effect) -> None:
        driver = self.driver
        batch = copy.copy(driver.running)
        tokens, lengths = driver.tensor(effect.tokens), driver.tensor(effect.lengths)
        batch.spec_info = make_draft_input(driver.surface, tokens, lengths)
        batch.seq_lens = driver.tensor(effect.lengths)
        self._resolve(use, batch, driver.relay)

    def _permuted_indices(self, use: str, effect: Effect) -> None:
        relay = self.laws.own_relay(effect, needs_cpu_seq_lens=True)
        draft = self.laws.operand(_RELAYED, effect, effect.rows()[::-1])
        self._resolve(use, self.laws.own_batch(draft, effect.slots), relay)

    def _resolve_unwritten(self, use: str, effect: Effect) -> None:
        relay = self.laws.own_relay(effect, spare=1)
        draft = self.laws.operand(_RELAYED, effect, effect.rows()[:1])
        nobodys = self.driver.header.pool
        draft.future_indices = self.driver.tensor([nobodys])
        self._resolve(use, self.laws.own_batch(draft, [nobodys]), relay)

    def _resolve(self, use: str, batch: Any, relay: Any) -> None:
        """Resolve a copied batch, lengths first, and observe what it is given."""
        driver, surface = self.driver, self.driver.surface
        batch.enable_overlap = True
        outcome = driver.attempt(relay.resolve_seq_lens_cpu, batch) or driver.attempt(
            surface.resolve_forward_inputs, batch, relay
        )
        driver.observe(
            f"wild-{use}",
            outcome=outcome,
            tokens=getattr(batch.spec_info, surface.token_field),
            lengths=batch.seq_lens,
            host=batch.seq_lens_cpu,
        )

    # -- preparing ------------------------------------------------------------------------------

    def _prepare_twice(self, use: str, effect: Effect) -> None:
        driver = self.driver
        draft = self.laws.operand(_RELAYED, effect, effect.rows())
        batch = self.laws.own_batch(draft, effect.slots)
        batch.forward_mode = driver.surface.forward_mode.DECODE
        pairs = zip(batch.reqs, effect.committed, strict=True)
        batch.reqs = [host.copy(committed) for host, committed in pairs]
        outcome = driver.attempt(draft.prepare_for_decode, batch)
        once = self._bounds(batch)
        outcome = outcome or driver.attempt(draft.prepare_for_decode, batch)
        twice = self._bounds(batch)
        changed = [f"{k}: {v} -> {twice[k]}" for k, v in once.items() if twice[k] != v]
        driver.observe(f"wild-{use}", outcome=outcome, changed=changed)

    def _bounds(self, batch: Any) -> dict[str, Any]:
        """The host's lengths and mirrors that a prepared batch has, as they are now."""
        driver, draft = self.driver, batch.spec_info
        bounds: dict[str, Any] = {}
        if "host_lengths_lag" in driver.surface.features or not driver.header.overlap:
            # Elsewhere the resolve replaces what is prepared.
            bounds.update(committed=batch.seq_lens_cpu, committed_sum=batch.seq_lens_sum)
        for mirror in driver.mirrors:
            bounds[mirror.name] = getattr(draft, mirror.name)
            if mirror.sums:
                bounds[mirror.sums] = getattr(draft, mirror.sums)
        return {k: v.tolist() if isinstance(v, Tensor) else v for k, v in bounds.items()}
