"""Carry out the algebraic laws of the draft input, on fresh ones made from the running rows.

A law takes nothing from the running batch but its rows' values, and leaves the relay and the batch
as they are: operands come from the worker's own builder, and what must be resolved is resolved from
a relay of its own. The model's side is :mod:`conformance.oracle.laws`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from conformance.observation import Observation, merge_call
from conformance.sut.doubles import Settings
from conformance.sut.surface import make_draft_input, make_pool, make_relay
from generators.operations import Law
from generators.protocol import Effect

if TYPE_CHECKING:
    from conformance.sut.driver import Driver


class Laws:
    """The laws on one driver's tree."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        arguments = driver.surface.filter_arguments
        # The rows that a law filters have not been filtered yet.
        self.filter_options = dict.fromkeys(arguments & {"has_been_filtered"}, False)
        self._perform: dict[str, Callable[[Law, Effect], None]] = {
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
            "bookkeeping": self._bookkeeping,
            "penalties": self._penalties,
        }

    def perform(self, operation: Law, effect: Effect) -> None:
        """Carry out one law."""
        self._perform[operation.law](operation, effect)

    # -- what a decode is prepared with ---------------------------------------------------------

    def _bookkeeping(self, operation: Law, effect: Effect) -> None:
        """How often the eviction hook ran, and by how much each request's decodes grew."""

        def count(batch: Any) -> Callable[[], dict[str, Any]]:
            calls = []
            batch.maybe_evict_swa = lambda: calls.append(1)
            before = [host.decode_batch_idx for host in batch.reqs]
            return lambda: {
                "evictions": len(calls),
                "decodes": [
                    h.decode_batch_idx - b for h, b in zip(batch.reqs, before, strict=True)
                ],
            }

        self._prepare_both("law-bookkeeping", count)

    def _penalties(self, operation: Law, effect: Effect) -> None:
        """Which tokens the penalizers are handed."""

        def collect(batch: Any) -> Callable[[], Tensor | None]:
            handed: list[Tensor] = []
            batch.sampling_info = copy.copy(batch.sampling_info)
            batch.sampling_info.penalizer_orchestrator = Settings(
                is_required=True, cumulate_output_tokens=handed.append
            )
            return lambda: torch.stack(handed) if handed else None

        self._prepare_both("law-penalties", collect)

    def _prepare_both(self, call: str, watch: Callable[[Any], Callable[[], Any]]) -> None:
        """Prepare a copy of the running batch as DFlash does, and one as EAGLE does."""
        cache, running = self.driver.kv, self.driver.running
        assert cache is not None
        seen = {}
        for name, prepare in (("dflash", lambda b: b.prepare_for_decode()), ("eagle", cache.eagle)):
            twin = cache.copy(running)
            twin.spec_info = copy.copy(running.spec_info)
            twin.forward_mode = self.driver.surface.forward_mode.DECODE
            result = watch(twin)
            self.driver.call(call, prepare, twin)
            seen[name] = result()
        self.driver.observe(call, **seen)

    # -- filtering and merging ------------------------------------------------------------------

    def _filter(self, operation: Law, effect: Effect) -> None:
        rows = effect.rows()
        whole, twin = (self.operand(operation, effect, rows) for _ in range(2))
        held = [(t, t.clone()) for t in self.driver.row_tensors(whole).values()]
        self._keep(whole, operation.keep)
        intact = all(torch.equal(t, value) for t, value in held)
        self.observe("law-filter", whole, held=intact)
        if "new_indices_cpu" in self.driver.surface.filter_arguments:
            self._keep(twin, operation.keep, host=True)
            self.observe("law-host-path", twin)

    def _permute(self, operation: Law, effect: Effect) -> None:
        whole = self.operand(operation, effect, effect.rows())
        self._keep(whole, operation.keep)
        self.observe("law-permute", whole)

    def _compose(self, operation: Law, effect: Effect) -> None:
        whole = self.operand(operation, effect, effect.rows())
        self._keep(whole, operation.keep)
        self.observe("law-filter", whole)
        self._keep(whole, operation.then)
        self.observe("law-compose", whole)

    def _keep_all(self, operation: Law, effect: Effect) -> None:
        rows = effect.rows()
        whole = self.operand(operation, effect, rows)
        self._keep(whole, rows)
        self.observe("law-keep-all", whole)

    def _merge(self, operation: Law, effect: Effect) -> None:
        self._merge_at(operation, effect, operation.cut)

    def _merge_at(self, operation: Law, effect: Effect, cut: int) -> None:
        rows = effect.rows()
        call = merge_call(0, cut, len(rows))
        left = self.operand(operation, effect, rows[:cut])
        right = self.operand(operation, effect, rows[cut:])
        before = {k: v.clone() for k, v in self.driver.row_tensors(right).items()}
        self.driver.call(call, left.merge_batch, right)
        after = self.driver.row_tensors(right)
        self.observe(
            call,
            left,
            right_intact=all(torch.equal(after[k], v) for k, v in before.items()),
            right_shared=self.driver.shared(left, right),
        )

    def _associate(self, operation: Law, effect: Effect) -> None:
        rows = effect.rows()
        self._merge_at(operation, effect, len(rows) // 2)  # a wrong merge is M1's, not M2's
        first, second = sorted((operation.cut, len(rows) // 2))
        parts = (rows[:first], rows[first:second], rows[second:])
        a, b, c = (self.operand(operation, effect, part) for part in parts)
        self.driver.call("law-associate", b.merge_batch, c)
        self.observe(merge_call(first, second, len(rows)), b)
        self.driver.call("law-associate", a.merge_batch, b)
        self.observe("law-associate", a)
        a, b, c = (self.operand(operation, effect, part) for part in parts)
        self.driver.call("law-associate", a.merge_batch, b)
        self.observe(merge_call(0, first, second), a)
        self.driver.call("law-associate", a.merge_batch, c)
        self.observe("law-associate", a)

    def _distribute(self, operation: Law, effect: Effect) -> None:
        rows, cut = effect.rows(), operation.cut
        self._merge_at(operation, effect, cut)  # a wrong merge is M1's, not M3's
        left = self.operand(operation, effect, rows[:cut])
        right = self.operand(operation, effect, rows[cut:])
        self._keep(left, [i for i in operation.keep if i < cut])
        self.observe("law-filter", left)
        self._keep(right, [i - cut for i in operation.keep if i >= cut])
        self.observe("law-filter", right)
        self.driver.call("law-distribute", left.merge_batch, right)
        self.observe("law-distribute", left)

    def _neutral(self, operation: Law, effect: Effect) -> None:
        rows = effect.rows()
        nobody: list[int] = []
        for parts in ((rows, nobody), (nobody, rows)):
            left, right = (self.operand(operation, effect, part) for part in parts)
            self.driver.call("law-neutral", left.merge_batch, right)
            self.observe("law-neutral", left)

    def _keep(self, draft: Any, keep: Sequence[int], *, host: bool = False) -> None:
        """Filter a draft input the way ``ScheduleBatch.filter_batch`` does."""
        indices = self.driver.tensor(list(keep))
        if host:
            self.driver.call(
                "law-host-path", draft.filter_batch, indices, new_indices_cpu=list(keep)
            )
        else:
            self.driver.call("law-filter", draft.filter_batch, indices, **self.filter_options)

    # -- idle inputs and resolving --------------------------------------------------------------

    def _idle(self, operation: Law, effect: Effect) -> None:
        surface = self.driver.surface
        idle = self.driver.call(
            "idle-input", surface.draft_input.create_idle_input, self.driver.device
        )
        tokens, lengths = self.driver.tensor(effect.tokens), self.driver.tensor(effect.lengths)
        live = make_draft_input(surface, tokens, lengths)
        layout = {}
        for name in self.driver.five:
            mine, theirs = getattr(idle, name, None), getattr(live, name, None)
            if not isinstance(mine, Tensor) or not isinstance(theirs, Tensor):
                continue  # a tree may drop the fields that DFlash does not use
            layout[name] = (_layout(mine), _layout(theirs), mine.shape[0])
        self.driver.observe("idle-input", layout=layout)

    def own_relay(self, effect: Effect, *, spare: int = 0, needs_cpu_seq_lens: bool = False) -> Any:
        """A relay of its own in which the running rows have just been written.

        Args:
            spare: rows behind the pool's, which nobody has written.
            needs_cpu_seq_lens: whether it resolves lengths to the host too.
        """
        driver = self.driver
        pool = make_pool(driver.surface, driver.header.pool + spare)
        relay = make_relay(driver.surface, pool, needs_cpu_seq_lens=needs_cpu_seq_lens)
        draft = self.operand(Law("merge"), effect, effect.rows())
        slots = driver.tensor(effect.slots)
        relay.publish(slots, driver.tensor(effect.lengths))
        relay.stash(slots, driver.surface.payload(draft))
        return relay

    def own_batch(self, draft: Any, slots: list[int]) -> Any:
        """A copy of the running batch that carries `draft`, whose rows are at `slots`."""
        batch = copy.copy(self.driver.running)
        if hasattr(draft, "direct_carry_valid"):
            draft.direct_carry_valid = False
        batch.spec_info = draft
        batch.req_pool_indices = self.driver.tensor(slots)
        batch.req_pool_indices_cpu = torch.tensor(slots, dtype=torch.int64)
        return batch

    def _lookup(self, operation: Law, effect: Effect) -> None:
        """Merging and filtering, then resolving, is resolving, then merging and filtering."""
        driver, rows = self.driver, effect.rows()
        self._merge_at(Law("merge"), effect, operation.cut)  # a wrong merge is M1's, not R1's
        if list(operation.keep) != rows:
            whole = self.operand(Law("merge"), effect, rows)
            self._keep(whole, operation.keep)  # and a wrong filter F1's
            self.observe("law-filter", whole)
        relay = self.own_relay(effect)
        draft = self.operand(Law("merge"), effect, rows[: operation.cut])
        right = self.operand(Law("merge"), effect, rows[operation.cut :])
        driver.call("law-lookup", draft.merge_batch, right)
        if list(operation.keep) != rows:
            self._keep(draft, operation.keep)
        batch = self.own_batch(draft, [effect.slots[i] for i in operation.keep])
        driver.call("law-lookup", relay.resolve_seq_lens_cpu, batch)
        driver.call("law-lookup", driver.surface.resolve_forward_inputs, batch, relay)
        driver.observe(
            "law-lookup",
            draft,
            tokens=getattr(draft, driver.surface.token_field),
            lengths=batch.seq_lens,
            **driver.relay_aspects(),
        )

    def _consume_twice(self, operation: Law, effect: Effect) -> None:
        """Write the running rows of a relay of its own, then resolve them twice (debug only)."""
        driver, surface = self.driver, self.driver.surface
        relay = self.own_relay(effect)
        batch = self.own_batch(self.operand(Law("merge"), effect, effect.rows()), effect.slots)
        slots, lengths = batch.req_pool_indices, driver.tensor(effect.lengths)
        outcomes: dict[str, Any] = {}
        resolves = {"tokens": lambda: surface.resolve_forward_inputs(batch, relay)}
        if surface.poison_lengths:
            resolves["lengths"] = lambda: relay.resolve_seq_lens_cpu(batch)
        for channel, resolve in resolves.items():
            if operation.channel not in ("", channel):
                continue
            first = driver.attempt(resolve)
            # Publishing the padding row arms the freshness flag again, and only that: what must
            # refuse the second time is the poison in the consumed rows.
            relay.publish(torch.zeros_like(slots[:1]), lengths[:1])
            second = driver.attempt(resolve)
            refused = second is not None and second.kind == surface.device.assertion
            outcomes[channel] = [first is None, refused]
            if refused and not surface.device.survives_assertion:
                break
        # After a failed assertion there may be no device left to wait for.
        driver.sink(Observation("consume-twice", outcomes))

    def _resolve_nothing(self, operation: Law, effect: Effect) -> None:
        """Resolve a relayed draft input of zero rows on a copied relay."""
        driver = self.driver
        relay = driver.relay_copy()
        batch = driver.new_batch([], [], [])
        batch.spec_info = self.operand(Law("merge"), effect, [])
        if driver.header.overlap:
            driver.call("resolve-nothing", relay.resolve_seq_lens_cpu, batch)
        driver.call("resolve-nothing", driver.surface.resolve_forward_inputs, batch, relay)
        driver.observe("resolve-nothing", seq_lens=batch.seq_lens, **driver.relay_aspects(relay))

    # -- operands -------------------------------------------------------------------------------

    def operand(self, operation: Law, effect: Effect, rows: Sequence[int]) -> Any:
        """A draft input of some of the running rows, from the worker's builder.

        No rows means an idle draft input as a step leaves it: from ``create_idle_input``, with
        the idle batch's empty slots as future indices.
        """
        driver = self.driver
        tokens = driver.tensor([effect.tokens[i] for i in rows], driver.token_dtype)
        lengths = driver.tensor([effect.lengths[i] for i in rows])
        if rows:
            draft = driver.call("build", make_draft_input, driver.surface, tokens, lengths)
        else:
            create = driver.surface.draft_input.create_idle_input
            draft = driver.call("idle-input", create, driver.device)
        if operation.form == "relayed":
            draft.future_indices = driver.tensor([effect.slots[i] for i in rows])
        if operation.mirrors:
            for offset, mirror in enumerate(driver.mirrors, 1):
                values = [effect.lengths[i] + offset for i in rows]
                setattr(draft, mirror.name, torch.tensor(values, dtype=torch.int32))
                if mirror.sums:
                    setattr(draft, mirror.sums, sum(values))
        return draft

    def observe(self, call: str, draft: Any, **more: Any) -> None:
        """Everything that a filter or merge of a draft input alone decides."""
        driver = self.driver
        mirrors = {
            mirror.name: getattr(draft, mirror.name)
            for mirror in driver.mirrors
            if getattr(draft, mirror.name, None) is not None
        }
        stored = {}
        if draft.future_indices is None:
            stored["tokens"] = getattr(draft, driver.surface.token_field)
            stored["lengths"] = draft.new_seq_lens
            stored.update(driver.stored_layout(draft))
        driver.observe(
            call,
            draft,
            future=draft.future_indices,
            **stored,
            mirrors=mirrors,
            sums={
                mirror.name: getattr(draft, mirror.sums)
                for mirror in driver.mirrors
                if mirror.sums and mirror.name in mirrors
            },
            **more,
            **driver.relay_aspects(),
        )


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    """What an idle tensor must share with a live one: dtype, rank, trailing dimensions, device."""
    return (str(tensor.dtype), tensor.dim(), tuple(tensor.shape[1:]), str(tensor.device))
