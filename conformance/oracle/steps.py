"""The operations of the loop on the reference model: what each of their calls must show."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from conformance.observation import FEW_ROWS, Observation
from conformance.oracle.aspects import expect, rows_of
from conformance.oracle.facts import Facts
from conformance.oracle.kv import KvCache
from conformance.oracle.laws import Laws
from conformance.oracle.wild import WildUses
from generators.operations import (
    Admit,
    Adopt,
    Filter,
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
    Wild,
)
from generators.protocol import Effect, Request
from generators.protocol.kv import UNFINISHED
from reference import draft_input
from reference.draft_input import DraftInput
from reference.relay import POISON, Relay


@dataclass
class _Batch:
    """A batch in the model: requests in row order and their draft input."""

    requests: list[Request]
    slots: Tensor
    prompts: Tensor
    draft: DraftInput
    direct: bool


class Oracle:
    """One trace on the reference model.

    Args:
        facts: of the tree that will be compared.
        header: the trace's setting.
        born: the relay's channels as the tree made them. One that the tree creates at its first
            stash is missing; it is born poisoned under debug and uninitialized otherwise.
        width: positions of a row of the KV cache, where the trace has one.
    """

    def __init__(
        self, facts: Facts, header: Header, born: dict[str, Tensor], width: int = 0
    ) -> None:
        self.facts, self.header = facts, header
        self.kv = KvCache(header, width) if header.kv_tokens else None
        if "tokens" not in born:
            empty = torch.empty(header.pool, dtype=facts.token_dtype, device=facts.device)
            tokens = torch.full_like(empty, POISON) if facts.poison_tokens else empty
            born = {**born, "tokens": tokens}
        self.relay = Relay(
            born["tokens"],
            born.get("lengths", torch.zeros_like(born["tokens"], dtype=torch.int64)),
            poison_tokens=facts.poison_tokens,
            poison_lengths=facts.poison_lengths,
        )
        self._all_channels = set(facts.channels) == {"tokens", "lengths"}
        self.running: _Batch | None = None
        self.prefill: _Batch | None = None
        self.started = self.counted = False
        self.laws = Laws(self)
        self._perform: dict[type[Operation], Callable[[Any, Effect], Iterator[Observation]]] = {
            Admit: self._admit,
            Mixed: self._mixed,
            Seed: self._seed,
            Adopt: self._absorb,
            Merge: self._absorb,
            Step: self._step,
            Sync: lambda _, effect: self._result(effect),
            Filter: self._filter,
            Retract: self._filter,
            Preempt: self._filter,
            Idle: self._idle,
            Law: self.laws.perform,
            Wild: WildUses(self, self.laws).perform,
        }

    def perform(self, operation: Operation, effect: Effect) -> Iterator[Observation]:
        """Advance by one operation, yielding the observation that each call must give.

        The model moves on only when the next observation is asked for, so what was yielded is the
        state right after that call.
        """
        perform = self._perform.get(type(operation))
        if self.kv is not None and isinstance(operation, Retract | Preempt):
            assert self.running is not None
            if isinstance(operation, Retract):
                yield expect("kv-check", fits=effect.fits)
                yield expect("kv-check", fits=True)  # what stays, without those that went
            kept = set(effect.keep)
            gone = [r.slot for i, r in enumerate(self.running.requests) if i not in kept]
            self.kv.left(gone)
        if perform is not None:
            yield from perform(operation, effect)
        if self.kv is not None:
            self.kv.left([request.slot for request in effect.ended])
            yield expect("kv", **self.kv.unchanged())

    def resynchronize(
        self,
        channels: dict[str, Tensor],
        running: dict[str, Tensor] | None,
        prefill: dict[str, Tensor] | None,
    ) -> None:
        """Take over what the tree holds, after a deviation that a waiver covers."""
        self.relay.tokens = channels.get("tokens", self.relay.tokens).clone()
        self.relay.lengths = channels.get("lengths", self.relay.lengths).clone()
        for batch, rows in ((self.running, running), (self.prefill, prefill)):
            if batch is not None and rows is not None:
                batch.slots = rows["slots"]
                draft = {name: value for name, value in rows.items() if name != "slots"}
                batch.draft = replace(batch.draft, **draft)  # type: ignore[arg-type]

    # -- helpers --------------------------------------------------------------------------------

    def tensor(self, values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.facts.device)

    def relay_aspects(self, relay: Relay | None = None) -> dict[str, Any]:
        """The channels of the relay, or of a copy of it, as aspects."""
        relay = relay or self.relay
        aspects = {"relay_tokens": relay.tokens, "relay_lengths": relay.lengths}
        return aspects if self._all_channels else self._recognised(aspects)

    def _recognised(self, aspects: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in aspects.items() if k.removeprefix("relay_") in self.facts.channels}

    def _forward(self, effect: Effect, slots: Tensor) -> Generator[Observation, None, DraftInput]:
        """What a forward hands over: build, publish, stash, restore."""
        tokens = self.tensor(effect.tokens, self.facts.token_dtype)
        draft = draft_input.live(tokens, self.tensor(effect.lengths))
        yield expect("build", tokens=draft.tokens, lengths=draft.lengths, undeclared=[])
        if self.header.overlap:
            if effect.slots:
                self.relay.publish(slots, draft.lengths)
            yield expect("publish", **self.relay_aspects(), copied=True)
            if effect.slots:
                self.relay.stash(slots, draft.tokens)
            yield expect("stash", **self.relay_aspects(), copied=True, undeclared=[])
            if not effect.slots:
                yield expect("idle-signals", unchanged=True)
            draft = draft_input.relayed(draft, slots)
        yield expect("restore", changed=[])
        yield from self._result(effect)
        return draft

    def _result(self, effect: Effect) -> Iterator[Observation]:
        """The host finds the batch of an earlier launch as it was launched."""
        if effect.landed is not None:
            slots = self.tensor([slot for _, slot in effect.landed])
            numbers = [number for number, _ in effect.landed]
            tails = effect.landed_tails
            told = {} if tails is None else {"decoding": tails}
            yield expect("results", requests=numbers, slots=slots, slots_cpu=slots.cpu(), **told)

    # -- operations -------------------------------------------------------------------------------

    def _start(self) -> Iterator[Observation]:
        if not self.started:
            yield expect("relay", undeclared=[])
        self.started = True

    def _admit(self, operation: Admit, effect: Effect) -> Iterator[Observation]:
        yield from self._start()
        lengths = self.tensor(effect.lengths)
        prompts = [range(length - 1, length) for length in effect.lengths]
        if self.kv is not None:
            prompts = yield from self._extended(effect, len(effect.slots))
        yield expect(
            "admit-resolve",
            input_ids=self._ids(prompts, lengths),
            seq_lens=lengths,
            **self.relay_aspects(),
        )
        slots = self.tensor(effect.slots)
        draft = yield from self._forward(effect, slots)
        known = self._prompts(operation, effect, len(effect.slots))
        self.prefill = _Batch(effect.requests, slots, known, draft, self.facts.direct_carry)

    def _extended(self, effect: Effect, count: int) -> Generator[Observation, None, list[range]]:
        """The first `count` rows are given slots for their prompts; what of each is prefilled."""
        assert self.kv is not None
        requests, lengths = effect.requests[:count], effect.lengths[:count]
        starts = [self.kv.start(request) for request in requests]
        slots = self.tensor(effect.slots[:count])
        yield expect(
            "extend", **self.kv.extended(requests, lengths), slots=slots, decodes=[0] * count
        )
        return [range(start, length) for start, length in zip(starts, lengths, strict=True)]

    def _prompts(self, operation: Admit, effect: Effect, count: int) -> Tensor:
        """Prompts of the first `count` rows; with a KV pool one that goes on is longer."""
        more = 0 if self.kv is None else UNFINISHED
        rows = zip(effect.requests[:count], effect.lengths[:count], strict=True)
        lengths = [n + more * (r.number == operation.chunk) for r, n in rows]
        return self.tensor(lengths, torch.int32)

    def _ids(self, prompts: list[range], lengths: Tensor) -> Tensor:
        """What is prefilled: with a KV pool a token is its position, without one the length."""
        return lengths if self.kv is None else self.tensor([i for p in prompts for i in p])

    def _mixed(self, operation: Mixed, effect: Effect) -> Iterator[Observation]:
        yield from self._start()
        running, self.running = self.running, None
        assert running is not None
        admitted = len(effect.slots) - len(running.requests)
        prefilled = [range(length - 1, length) for length in effect.lengths[:admitted]]
        if self.kv is not None:
            prefilled = yield from self._extended(effect, admitted)
        yield self._prepared(running, effect)
        slots, prompts = self.tensor(effect.slots), self.tensor(effect.lengths[:admitted])
        batch = _Batch(
            effect.requests,
            slots,
            torch.cat([self._prompts(operation, effect, admitted), running.prompts]),
            draft_input.idle(self.facts.token_dtype, self.facts.device),
            self.facts.direct_carry,
        )
        yield expect(
            "mix",
            **self._batch_rows(batch),
            held=True,
            mode="MIXED",
            extends=[len(p) for p in prefilled] + [1] * len(running.requests),
            **self.relay_aspects(),
        )
        tails = slots[admitted:]
        if not self.header.overlap:
            # Nothing was relayed, so the relay is told what the host knows.
            self.relay.stash(tails, self.tensor(effect.pending, self.facts.token_dtype))
            yield expect("mixed-stash", **self.relay_aspects(), appeared=[])
            published = self.tensor(effect.committed)
        else:
            published = self.relay.peek_lengths(tails)
        tokens = self.relay.resolve_tokens(tails)
        lengths = torch.cat([prompts, published + 1])
        prefilled += [range(length, length + 1) for length in published.tolist()]
        # Without overlap the sum of a merged batch is taken later, where it is needed.
        sums = {"host_sum": int(lengths.sum())} if self.header.overlap else {}
        yield expect(
            "mixed-resolve",
            input_ids=torch.cat([self._ids(prefilled[:admitted], prompts), tokens]),
            seq_lens=lengths,
            host=lengths.cpu(),
            **sums,
            prefix=[positions.start for positions in prefilled],
            kv_slots=self._kv_slots(effect.slots, prefilled),
            **self.relay_aspects(),
        )
        batch.draft = yield from self._forward(effect, slots)
        self.prefill = batch

    def _kv_slots(self, rows: list[int], positions: list[range]) -> Tensor:
        """The KV slots of each row's positions."""
        apart = self.facts.kv_slots_apart
        found: list[int] = []
        for row, places in zip(rows, positions, strict=True):
            if self.kv is None:
                found += [row * apart + place for place in places]
            else:
                found += self.kv.slots(row, places)
        return self.tensor(found)

    def _seed(self, operation: Seed, effect: Effect) -> Iterator[Observation]:
        yield from self._start()
        slots, lengths = self.tensor(effect.slots), self.tensor(effect.lengths)
        draft = draft_input.live(self.tensor(effect.tokens, self.facts.token_dtype), lengths)
        if self.header.overlap:
            self.relay.publish(slots, draft.lengths)
            self.relay.stash(slots, draft.tokens)
            draft = draft_input.relayed(draft, slots)
        batch = _Batch(effect.requests, slots, lengths.to(torch.int32), draft, False)
        yield expect(
            "seed",
            tokens=draft.tokens,
            lengths=draft.lengths,
            future=draft.future_indices,
            **self._batch_rows(batch),
            seq_lens=lengths,
            drained=self.header.overlap and effect.in_flight,
            copied=True,
            appeared=[],
            undeclared=[],
            **self.relay_aspects(),
        )
        self.prefill = batch

    def _absorb(self, operation: Operation, effect: Effect) -> Iterator[Observation]:
        assert self.prefill is not None
        batch, self.prefill = self.prefill, None
        if not effect.keep:
            yield expect("absorb-filter", requests=[])
            return
        self._keep(batch, effect.keep)
        yield self._rows("absorb-filter", batch)
        if self.running is None:
            self.running = batch
            return
        running = self.running
        running.requests = running.requests + batch.requests
        running.slots = torch.cat([running.slots, batch.slots])
        running.prompts = torch.cat([running.prompts, batch.prompts])
        running.draft = draft_input.merge(running.draft, batch.draft)
        running.direct = False
        yield self._rows(
            "merge",
            running,
            forms=[self.header.overlap] * 2,
            right_intact=True,
            right_shared=[],
        )

    def _keep(self, batch: _Batch, keep: list[int]) -> None:
        """Filter a batch; keeping every row in order is not a filter at all."""
        if keep == list(range(len(batch.requests))):
            return
        rows = self.tensor(keep)
        batch.requests = [batch.requests[i] for i in keep]
        batch.slots = batch.slots[rows]
        batch.prompts = batch.prompts[rows]
        batch.draft = draft_input.filter_rows(batch.draft, rows)
        batch.direct = False

    def _filter(self, operation: Operation, effect: Effect) -> Iterator[Observation]:
        assert self.running is not None
        call = operation.op
        if not effect.keep:
            yield expect(call, requests=[])
            self.running = None
            return
        self._keep(self.running, effect.keep)
        yield self._rows(call, self.running)

    def _rows(self, call: str, batch: _Batch, **more: Any) -> Observation:
        aspects = {**self._batch_rows(batch), **rows_of(batch.draft)}
        if call != "merge":
            aspects.update(self.relay_aspects())
        return expect(call, **aspects, held=True, **more)

    @staticmethod
    def _batch_rows(batch: _Batch) -> dict[str, Any]:
        """What a batch says of its rows, its draft input apart."""
        numbers = [request.number for request in batch.requests]
        return {
            "requests": numbers,
            "sampling": numbers,
            "prompts": batch.prompts,
            "slots": batch.slots,
            "slots_cpu": batch.slots.cpu(),
        }

    def _prepared(self, running: _Batch, effect: Effect) -> Observation:
        """Host lengths once a decode of the running batch is prepared."""
        lag = self.facts.host_lengths_lag
        asked = [self.facts.top_k(request.number) for request in running.requests]
        uniform = asked[0] if len(set(asked)) == 1 else None
        prepared: dict[str, Any] = {"top_k": (max(asked), uniform), "asked": asked}
        if self.kv is not None:
            prepared.update(self.kv.prepared(running.requests, effect))
        if lag or not self.header.overlap:
            committed = torch.tensor(effect.committed, dtype=torch.int64)
            prepared.update(committed=committed, committed_sum=sum(effect.committed))
        if lag:
            prepared.update(planning=effect.before)
        call = "prepare" if self.kv is None else "kv-prepare"
        return expect(call, undeclared=[], **prepared)

    def _step(self, operation: Step, effect: Effect) -> Iterator[Observation]:
        batch = self.running
        assert batch is not None
        facts, header = self.facts, self.header
        lag = facts.host_lengths_lag and header.overlap
        yield self._prepared(batch, effect)
        if not header.overlap:
            tokens, lengths = batch.draft.tokens, batch.draft.lengths
        elif batch.direct:
            # 0.5.14: the rows never left the draft input, so the relay is not asked.
            tokens, lengths = batch.draft.tokens, batch.draft.lengths
        else:
            assert batch.draft.future_indices is not None
            lengths = self.relay.resolve_lengths(batch.draft.future_indices)
            tokens = self.relay.resolve_tokens(batch.draft.future_indices)
        if lag:
            host = torch.tensor(effect.committed, dtype=torch.int64)
            host_sum = sum(effect.committed)
        elif header.needs_cpu_seq_lens or not header.overlap:
            host, host_sum = lengths.cpu(), int(lengths.sum())
        else:
            host, host_sum = None, None
        yield expect(
            "resolve",
            tokens=tokens,
            lengths=lengths,
            aliased=[],
            staged=[None, None],
            host=host,
            host_sum=host_sum,
            **self.relay_aspects(),
        )
        batch.draft = yield from self._forward(effect, batch.slots)
        batch.direct = facts.direct_carry
        if len(effect.slots) >= FEW_ROWS and not self.counted:
            self.counted = True
            yield expect("batch", undeclared=[])

    def _idle(self, operation: Idle, effect: Effect) -> Iterator[Observation]:
        yield expect("idle-resolve", **self.relay_aspects(), seq_lens=self.tensor([]))
        yield from self._forward(effect, self.tensor([]))
        if self.running is not None:
            yield self._rows("idle", self.running)
