"""Carry out a trace on a loaded tree, in the order the real scheduler keeps, and observe.

The driver knows the protocol of one overlapped step and nothing of what the values should be: it
is handed them (:class:`~generators.protocol.Effect`), as the target model would. What it calls is
the tree's own: relay, draft input, the worker's builders, ``ScheduleBatch.filter_batch`` and
``merge_batch``, ``prepare_for_decode`` and the scheduler's ``_forward_isolation``. Where the trace
has a KV pool, so is all that hands out its slots (:mod:`conformance.sut.kv_cache`); elsewhere every
request comes with its whole row allocated, so that ``prepare_for_decode`` needs none.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from conformance.observation import FEW_ROWS, Observation
from conformance.sut.decode_server import DecodeServer
from conformance.sut.doubles import SamplingInfo, Settings
from conformance.sut.host_request import HarnessGap, HostRequest
from conformance.sut.kv_cache import KvCache, set_plan_stream
from conformance.sut.laws import Laws
from conformance.sut.surface import (
    Surface,
    make_draft_input,
    make_pool,
    make_relay,
)
from conformance.sut.watch import Stopped, Watch, storage
from conformance.sut.wild import WildUses
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
    Trace,
    Wild,
)
from generators.protocol import Effect, Request
from generators.values import STRIDE

_SPOILED = object()
"""What every batch field holds in the middle of a forward."""


class _Tree:
    """The prefix cache: no sliding window, nothing to evict."""

    def supports_swa(self) -> bool:
        return False


def table_width(trace: Trace) -> int:
    """Columns of ``req_to_token`` that a trace needs: one where it never looks up a KV slot."""
    mixed = [i for i, operation in enumerate(trace.operations) if isinstance(operation, Mixed)]
    if not mixed:
        return 1
    arrivals = (o for o in trace.operations[: mixed[-1] + 1] if isinstance(o, Admit))
    longest = max(length for arrival in arrivals for _, _, length in arrival.rows)
    return (longest // STRIDE + 1) * STRIDE


class Driver(Watch):
    """One trace on one tree.

    Args:
        surface: the loaded tree.
        header: the trace's setting.
        sink: receives every observation right after its call; tensors in it are the tree's own
            and change with the next call.
        recording: also observe which batch fields a call rebinds.
        width: columns of ``req_to_token``: beyond all lengths that mixed batches look up.
    """

    def __init__(
        self,
        surface: Surface,
        header: Header,
        sink: Callable[[Observation], None],
        *,
        recording: bool = False,
        width: int = 1,
    ) -> None:
        surface.settings.set(
            speculative_num_draft_tokens=header.block,
            max_speculative_num_draft_tokens=header.block,
        )
        set_plan_stream(header.plan_stream)
        self.kv = KvCache(surface, header) if header.kv_tokens else None
        self.pool = make_pool(surface, header.pool, width) if self.kv is None else self.kv.pool
        relay = make_relay(surface, self.pool, needs_cpu_seq_lens=header.needs_cpu_seq_lens)
        super().__init__(surface, header, relay, sink, recording=recording)
        self.model_config = Settings(is_encoder_decoder=False, vocab_size=1 << 31)
        self.allocator = Settings(page_size=header.page) if self.kv is None else self.kv.allocator
        self.tree = _Tree() if self.kv is None else self.kv.tree
        self.requests: dict[tuple[int, int], Any] = {}
        self._turn = 0
        self._queue: deque[Any] = deque()
        self._counted = False
        self._lag = "host_lengths_lag" in surface.features
        self._started = False
        self._scheduler = Settings(record_batch_in_overlap=lambda batch: None)
        if header.seeded:
            self._server = DecodeServer(self)
        self.laws = Laws(self)
        self.wild = WildUses(self, self.laws)
        self._perform: dict[type[Operation], Callable[[Any, Effect], None]] = {
            Admit: self._admit,
            Mixed: self._mixed,
            Seed: self._seed,
            Adopt: self._absorb,
            Merge: self._absorb,
            Step: self._step,
            Sync: self._sync,
            Finish: lambda _, effect: self._end(effect),
            Filter: self._filter,
            Retract: self._drop,
            Preempt: self._drop,
            Idle: self._idle,
            Law: self.laws.perform,
            Wild: self.wild.perform,
        }

    # -- observing ----------------------------------------------------------------------------

    def perform(self, operation: Operation, effect: Effect) -> None:
        """Carry out one operation, handing the sink what each of its calls made visible."""
        perform = self._perform.get(type(operation))
        if perform is not None:
            with contextlib.suppress(Stopped):
                perform(operation, effect)
                if self.kv is not None:
                    self.observe("kv", kv=self.kv.view())

    # -- making batches --------------------------------------------------------------------------

    def tensor(self, values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def _host_request(self, request: Request) -> Any:
        if self.kv is not None:
            return self.kv.host(request)
        key = (request.number, request.generation)
        host = self.requests.get(key)
        if host is None:
            host = self.requests[key] = HostRequest(request, self.surface.no_capture)
        return host

    def new_batch(self, requests: list[Request], slots: list[int], lengths: list[int]) -> Any:
        """A batch as ``prepare_for_extend`` leaves it, or ``prepare_for_idle`` (no requests)."""
        modes = self.surface.forward_mode
        batch = self.surface.schedule_batch(
            reqs=[self._host_request(r) for r in requests],
            model_config=self.model_config,
            token_to_kv_pool_allocator=self.allocator,
            req_to_token_pool=self.pool,
            tree_cache=self.tree,
            enable_overlap=self.header.overlap,
            device=str(self.device),
            spec_algorithm=self.surface.algorithm,
        )
        batch.forward_mode = modes.EXTEND if requests else modes.IDLE
        batch.sampling_info = SamplingInfo([r.number for r in requests])
        batch.req_pool_indices = self.tensor(slots)
        batch.req_pool_indices_cpu = torch.tensor(slots, dtype=torch.int64)
        batch.seq_lens = self.tensor(lengths)
        batch.seq_lens_cpu = torch.tensor(lengths, dtype=torch.int64)
        batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
        batch.seq_lens_sum = sum(lengths)
        if requests:
            batch.input_ids = None
            batch.prefill_input_ids_cpu = batch.seq_lens_cpu
        else:
            batch.input_ids = self.tensor([])
        return batch

    # -- one step -------------------------------------------------------------------------------

    def _resolve(self, call: str, batch: Any) -> None:
        """What happens before a forward: the two resolves, lengths first."""
        if self.header.overlap:
            self.call(call, self.relay.resolve_seq_lens_cpu, batch)
        with self.surface.device.forward():
            self.call(call, self.surface.resolve_forward_inputs, batch, self.relay)

    def _isolation(self, batch: Any) -> contextlib.AbstractContextManager[None]:
        """The scheduler's own transaction around a forward, if the tree has one."""
        self.calls += 1
        if self.surface.isolation_of is not None:
            overlap = self.header.overlap
            return cast(
                contextlib.AbstractContextManager[None],
                self.surface.isolation_of(self._scheduler, batch, overlap=overlap),
            )
        return self._own_isolation(batch)

    @contextlib.contextmanager
    def _own_isolation(self, batch: Any) -> Iterator[None]:
        saved = self.batch_values(batch)
        yield
        for name, value in zip(self.batch_fields, saved, strict=True):
            setattr(batch, name, value)

    def _forward(self, batch: Any, effect: Effect, build: Callable[[], Any]) -> None:
        """A worker's forward and the hand-over after it.

        Order: snapshot, forward (which edits the batch and publishes), stash, restore; then the
        batch carries the next draft input, whose future indices are the batch's own slots.
        """
        before = self.batch_values(batch)
        draft = None
        with self._isolation(batch), self.surface.device.forward():
            slots = batch.req_pool_indices
            # A forward may rebind any field in the middle; the transaction must undo it all.
            for name in self.batch_fields:
                setattr(batch, name, _SPOILED)
            draft = self.call("build", build)
            lengths = draft.new_seq_lens
            self.observe(
                "build",
                draft,
                tokens=getattr(draft, self.token_field),
                lengths=lengths,
                **self.census(len(effect.slots), draft=draft),
            )
            if self.header.overlap:
                signals = None if effect.slots else self.signals()
                self.call("publish", self.relay.publish, slots, lengths)
                self.observe("publish", **self.relay_aspects(), copied=self.copied(lengths))
                payload = self.call("stash", self.surface.payload, draft)
                self.call("stash", self.relay.stash, slots, payload)
                tokens = getattr(draft, self.token_field)
                self.observe(
                    "stash",
                    **self.relay_aspects(),
                    copied=self.copied(tokens),
                    **self.census(
                        len(effect.slots),
                        relay=self.relay,
                        **({} if payload is draft else {"payload": payload}),
                    ),
                    **self.carries(payload, draft),
                )
                if signals is not None:
                    self.observe("idle-signals", unchanged=self.signals() == signals)
        self.observe("restore", changed=self.changed(before, self.batch_values(batch)))
        batch.input_ids = None
        batch.spec_info = draft
        if self.header.overlap:
            draft.future_indices = batch.req_pool_indices
        elif effect.slots:
            batch.seq_lens = lengths
            if batch.seq_lens_cpu is not None:
                batch.seq_lens_cpu = lengths.to("cpu")
                batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        if self.header.overlap:
            # The loop keeps a copy until the result is processed, after the next launch.
            self._queue.append(self.call("copy", batch.copy))
            if effect.landed is not None:
                self._process_result()
        self._learn(effect)
        self._end(effect)

    # -- operations -----------------------------------------------------------------------------

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self.observe("relay", **self.census(0, relay=self.relay))

    def _admit(self, operation: Admit, effect: Effect) -> None:
        self._start()
        batch = self._prefill_batch(operation, effect, len(effect.slots))
        self._resolve("admit-resolve", batch)
        self.observe(
            "admit-resolve",
            input_ids=batch.input_ids,
            seq_lens=batch.seq_lens,
            **self.relay_aspects(),
        )
        self._prefill(batch, effect)

    def _prefill_batch(self, operation: Admit, effect: Effect, count: int) -> Any:
        """A prefill batch of the effect's first `count` rows."""
        requests = effect.requests[:count]
        lengths = effect.lengths[:count]
        batch = self.new_batch(requests, effect.slots[:count], lengths)
        if self.kv is None:
            for host, length in zip(batch.reqs, lengths, strict=True):
                host.kv_committed_len = length
        else:
            self.call("extend", self.kv.extend, batch, requests, lengths, operation.chunk)
            self.observe(
                "extend",
                kv=self.kv.view(),
                slots=batch.req_pool_indices,
                decodes=[host.decode_batch_idx for host in batch.reqs],
                kv_slots=batch.out_cache_loc,
            )
        chunk = [host for host in batch.reqs if host.rid == operation.chunk]
        batch.chunked_req = chunk[0] if chunk else None
        return batch

    def _mixed(self, operation: Mixed, effect: Effect) -> None:
        self._start()
        running, self.running = self.running, None
        stash = getattr(self.relay, "stash_bonus_tokens", None)
        if stash is None:
            raise HarnessGap("the relay has no stash_bonus_tokens, which mixed batches need")
        batch = self._prefill_batch(operation, effect, len(effect.slots) - len(running.reqs))
        self._prepare(running, effect)
        if self.kv is None:
            # Of every prompt the last token is prefilled, the others are cached.
            rows, before = len(batch.reqs), [length - 1 for length in batch.seq_lens.tolist()]
            batch.prefix_lens, batch.extend_lens = before, [1] * rows
            batch.extend_num_tokens, batch.extend_logprob_start_lens = rows, [0] * rows
            kv_slots = self.pool.req_to_token[batch.req_pool_indices, self.tensor(before)]
            batch.out_cache_loc = kv_slots.to(torch.int64)
        held = self.hold(running)
        self.call("mix", batch.mix_with_running, running)
        self.observe(
            "mix",
            **self.batch_rows(batch),
            held=all(torch.equal(tensor, value) for tensor, value in held),
            mode=batch.forward_mode.name,
            extends=batch.extend_lens,
            **self.relay_aspects(),
        )
        batch.decoding_reqs = running.reqs
        if not self.header.overlap:
            buffers, pending = self.buffers(), self.tensor(effect.pending)
            self.call("mixed-stash", stash, running.req_pool_indices, pending)
            self.observe("mixed-stash", **self.relay_aspects(), appeared=self.appeared(buffers))
        written = self.before(batch)
        self._resolve("mixed-resolve", batch)
        self.observe(
            "mixed-resolve",
            None,
            self.written(batch, written),
            input_ids=batch.input_ids,
            seq_lens=batch.seq_lens,
            host=batch.seq_lens_cpu,
            host_sum=batch.seq_lens_sum,
            prefix=batch.prefix_lens,
            kv_slots=batch.out_cache_loc,
            **self.relay_aspects(),
        )
        self._prefill(batch, effect)

    def _seed(self, operation: Seed, effect: Effect) -> None:
        self._start()
        hosts = [self._host_request(request) for request in effect.requests]
        buffers = self.buffers()
        batch = self.call("seed", self._server.seed, hosts, self.running)
        draft = batch.spec_info
        tokens, lengths = getattr(draft, self.token_field), draft.new_seq_lens
        self.observe(
            "seed",
            draft,
            tokens=tokens,
            lengths=lengths,
            future=draft.future_indices,
            **self.batch_rows(batch),
            seq_lens=batch.seq_lens,
            order=list(self._server.order),
            copied=self.copied(tokens) and self.copied(lengths),
            appeared=self.appeared(buffers),
            **self.census(len(effect.slots), draft=draft, relay=self.relay),
            **self.relay_aspects(),
        )
        self.prefill = batch

    def _prefill(self, batch: Any, effect: Effect) -> None:
        """Run a prefill batch whose inputs are resolved; it is the last prefill batch then."""
        tokens = self.tensor(effect.tokens)
        lengths, allocated = batch.seq_lens, self._allocated(batch)

        def build() -> Any:
            # A prefill publishes the batch's own lengths: the sampled token is not counted.
            return make_draft_input(
                self.surface,
                tokens,
                lengths,
                prefill=True,
                cur_allocated_seq_lens_cpu=allocated,
            )

        self._forward(batch, effect, build)
        self.prefill = batch

    def _allocated(self, batch: Any) -> Tensor:
        """Allocated lengths of a batch's requests, which old trees hand on with the draft input."""
        of = KvCache.allocated
        return torch.tensor([of(host) for host in batch.reqs], dtype=torch.int64)

    def _absorb(self, operation: Operation, effect: Effect) -> None:
        batch = self.prefill
        chunked = [batch.reqs[row] for row in effect.left_out]
        held, before = self.hold(batch), self.before(batch)
        self.call("absorb-filter", batch.filter_batch, chunked)
        if effect.keep:
            self.observe_rows("absorb-filter", batch, held, before)
        else:
            self.observe("absorb-filter", requests=[host.rid for host in batch.reqs])
        self.prefill = None
        if not effect.keep:
            return
        if isinstance(operation, Adopt):
            self.running = batch
            return
        running = self.running
        right = copy.copy(batch.spec_info)
        right_values = {k: v.clone() for k, v in self.live_tensors(right).items()}
        held, before = self.hold(running), self.before(running)
        forms = [d.future_indices is not None for d in (running.spec_info, right)]
        self.call("merge", running.merge_batch, batch)
        other = batch.spec_info
        intact = all(torch.equal(getattr(other, k), v) for k, v in right_values.items())
        self.observe_rows(
            "merge",
            running,
            held,
            before,
            forms=forms,
            right_intact=intact,
            right_shared=self.shared(running.spec_info, other),
        )

    def _prepare(self, batch: Any, effect: Effect) -> None:
        """What the running batch goes through before it decodes."""
        batch.forward_mode = self.surface.forward_mode.DECODE
        draft = batch.spec_info
        aspects: dict[str, Any] = {}
        before = self.before(batch)
        call = "prepare" if self.kv is None else "kv-prepare"
        if self.kv is None:
            for host, committed in zip(batch.reqs, effect.committed, strict=True):
                host.kv_committed_len = committed
            self.call(call, draft.prepare_for_decode, batch)
        else:
            aspects["fits"] = bool(self.call(call, batch.check_decode_mem))
            self.call(call, batch.prepare_for_decode)
            aspects["kv"] = self.kv.view()
            aspects["bounds"] = {m.name: getattr(draft, m.name) for m in self.mirrors}
            aspects["bound_sums"] = {m.sums: getattr(draft, m.sums) for m in self.mirrors if m.sums}
        aspects["top_k"] = (draft.max_top_k, draft.uniform_top_k_value)
        planning = getattr(draft, "planning_seq_lens_cpu", None)
        if self._lag or not self.header.overlap:
            # Elsewhere the resolve replaces what is prepared here.
            aspects.update(committed=batch.seq_lens_cpu, committed_sum=batch.seq_lens_sum)
        if planning is not None:
            aspects.update(planning=planning, planning_sum=draft.planning_seq_lens_sum)
        self.observe(
            call,
            draft,
            self.written(batch, before),
            **self.census(len(batch.reqs), draft=draft),
            **aspects,
            # The tree's own requests have numbers that are nobody's business here.
            **({} if self.kv is not None else self.request_numbers(batch)),
        )

    def _step(self, operation: Step, effect: Effect) -> None:
        batch = self.running
        self._prepare(batch, effect)
        before = self.before(batch)
        self._resolve("resolve", batch)
        draft = batch.spec_info
        tokens = getattr(draft, self.token_field)
        held = self.channel_storages()
        aliased = [
            what
            for what, value in (("tokens", tokens), ("lengths", batch.seq_lens))
            if storage(value) in held
        ]
        self.observe(
            "resolve",
            draft,
            self.written(batch, before),
            tokens=tokens,
            lengths=batch.seq_lens,
            host=batch.seq_lens_cpu,
            host_sum=batch.seq_lens_sum,
            aliased=aliased,
            staged=[batch.input_ids, batch.prefill_input_ids_cpu],
            **self.relay_aspects(),
            **self.carried(tokens=tokens, lengths=batch.seq_lens),
        )
        output, output_lengths = self.output[self._turn]
        self._turn ^= 1
        rows = len(effect.slots)
        reserved = getattr(draft, "reserved_seq_lens_cpu", None)

        def build() -> Any:
            output[:rows] = self.tensor(effect.tokens)
            output_lengths[:rows] = self.tensor(effect.lengths)
            return make_draft_input(
                self.surface,
                output[:rows],
                output_lengths[:rows],
                cur_allocated_seq_lens_cpu=reserved,
            )

        self._forward(batch, effect, build)
        if rows >= FEW_ROWS and not self._counted:
            self._counted = True
            self.observe("batch", **self.census(rows, batch=self.rows_held(batch)))

    def _filter(self, operation: Filter, effect: Effect) -> None:
        leaving = [self.running.reqs[row] for row in effect.left_out]
        self._filter_running("filter", effect, *([leaving] if leaving else []))

    def _drop(self, operation: Retract | Preempt, effect: Effect) -> None:
        if self.kv is not None:
            if isinstance(operation, Retract):
                fits = self.call("kv-check", self.running.check_decode_mem)
                self.observe("kv-check", fits=bool(fits))
            rows = range(len(self.running.reqs))
            gone = [row for row in rows if row not in effect.keep]
            self.call("release", self.kv.retract, self.running, gone)
            if isinstance(operation, Retract):
                fits = self.call("kv-check", self.running.check_decode_mem, list(effect.keep))
                self.observe("kv-check", fits=bool(fits))
        self._filter_running(operation.op, effect, keep_indices=list(effect.keep))

    def _filter_running(self, call: str, effect: Effect, *args: Any, **kwargs: Any) -> None:
        batch = self.running
        held, before = self.hold(batch), self.before(batch)
        self.call(call, batch.filter_batch, *args, **kwargs)
        if effect.keep:
            self.observe_rows(call, batch, held, before)
        else:
            # The tree leaves stale tensors in an emptied batch; callers drop it, and so do we.
            self.observe(call, requests=[host.rid for host in batch.reqs])
            self.running = None

    def _learn(self, effect: Effect) -> None:
        """The host learns how long requests have become."""
        if self.kv is not None:
            for request, length in effect.learned:
                self.kv.learn(request, length)

    def _end(self, effect: Effect) -> None:
        """The host learns of ends; filters leave such requests out."""
        if self.kv is not None:
            if effect.ended:
                self.call("release", self.kv.release, effect.ended)
            return
        for request in effect.ended:
            self._host_request(request).finished_flag = True

    def _sync(self, operation: Sync, effect: Effect) -> None:
        self._process_result()
        self._learn(effect)
        self._end(effect)

    def _process_result(self) -> None:
        """The host processes a result: it finds the batch as it was launched."""
        batch = self._queue.popleft()
        self.observe(
            "results",
            requests=[host.rid for host in batch.reqs],
            slots=batch.req_pool_indices,
            slots_cpu=batch.req_pool_indices_cpu,
            decoding=[host.rid for host in batch.decoding_reqs or ()],
        )

    def _idle(self, operation: Idle, effect: Effect) -> None:
        batch = self.new_batch([], [], [])
        self._resolve("idle-resolve", batch)
        self.observe("idle-resolve", **self.relay_aspects(), seq_lens=batch.seq_lens)

        def build() -> Any:
            if operation.during == "prefill":
                return self.surface.draft_input.create_idle_input(self.device)
            return make_draft_input(
                self.surface,
                torch.empty((0,), dtype=self.token_dtype, device=self.device),
                self.tensor([]),
            )

        self._forward(batch, effect, build)
        if self.running is not None:
            self.observe_rows("idle", self.running, [])
