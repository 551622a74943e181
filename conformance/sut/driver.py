"""Carry out a trace on a loaded tree, in the order the real scheduler keeps, and observe.

The driver knows the protocol of one overlapped step and nothing of what the values should be: it
is handed them (:class:`~generators.protocol.Effect`), as the target model would. What it calls is
the tree's own: relay, draft input, the worker's builders, ``ScheduleBatch.filter_batch`` and
``merge_batch``, ``prepare_for_decode`` and the scheduler's ``_forward_isolation``. Every request
comes with its whole row allocated, so that ``prepare_for_decode`` needs no KV slots.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import operator
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from conformance.observation import FEW_ROWS, Observation, Outcome
from conformance.sut.decode_server import DecodeServer
from conformance.sut.fields import guess
from conformance.sut.host_request import HarnessGap, HostRequest
from conformance.sut.isolation import StandInUsed
from conformance.sut.laws import Laws
from conformance.sut.surface import (
    SamplingInfo,
    Settings,
    Surface,
    make_draft_input,
    make_pool,
    make_relay,
)
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


def storage(tensor: Tensor) -> int:
    """Address of the tensor's storage; tensors with equal ones alias. Empty ones have none: -1."""
    return tensor.untyped_storage().data_ptr() or -1


class Driver:
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
        self.surface, self.header, self.recording = surface, header, recording
        self.device = surface.device.device
        surface.settings.set(speculative_num_draft_tokens=header.block)
        self.pool = make_pool(surface, header.pool, width)
        self.relay = make_relay(surface, self.pool, needs_cpu_seq_lens=header.needs_cpu_seq_lens)
        self.model_config = Settings(is_encoder_decoder=False, vocab_size=1 << 31)
        self.allocator = Settings(page_size=header.page)
        self.tree = _Tree()
        self.requests: dict[tuple[int, int], HostRequest] = {}
        self.running: Any = None
        self.prefill: Any = None
        self.sink = sink
        self.calls = 0
        self._batch_fields = [f.name for f in dataclasses.fields(surface.schedule_batch)]
        self._batch_values = operator.attrgetter(*self._batch_fields)
        census = surface.census["draft"].values()
        self._rows = [record.name for record in census if record.kind == "row"]
        self.five = ("topk_p", "topk_index", surface.token_field, "new_seq_lens", "hidden_states")
        self.mirrors = surface.draft_fields("mirror")
        # The worker writes its results into two buffers in turn.
        self.token_dtype = torch.int32 if surface.capabilities.token_bits < 32 else torch.int64
        self._output = [
            (
                torch.zeros(header.pool, dtype=self.token_dtype, device=self.device),
                torch.zeros(header.pool, dtype=torch.int64, device=self.device),
            )
            for _ in range(2)
        ]
        self._turn = 0
        self._queue: deque[Any] = deque()
        self._counted = False
        self._lag = "host_lengths_lag" in surface.features
        self._started = False
        self._scheduler = Settings(record_batch_in_overlap=lambda batch: None)
        self._token_field = surface.token_field
        self.channel_names = [
            (name, buffer)
            for name, buffer in (
                ("tokens", surface.token_channel),
                ("lengths", surface.length_channel),
            )
            if buffer is not None
        ]
        self._relay_names = [(f"relay_{name}", buffer) for name, buffer in self.channel_names]
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
            Sync: lambda _, effect: self._process_result(),
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
            with contextlib.suppress(_Stopped):
                perform(operation, effect)

    def observe(
        self, call: str, draft: Any = None, written: dict[str, Any] | None = None, **aspects: Any
    ) -> None:
        self.surface.device.settle()
        self.sink(Observation(call, aspects, draft, written))

    def _before(self, batch: Any) -> tuple[Any, ...]:
        """What :meth:`_written` compares with."""
        return self._batch_values(batch) if self.recording else ()

    def _written(self, batch: Any, before: tuple[Any, ...]) -> dict[str, Any] | None:
        """Batch fields that were rebound since `before`, and all integers it has now.

        Of small integers nobody can tell whether they were set again. None where nobody records.
        """
        if not self.recording:
            return None
        after = self._batch_values(batch)
        fields = zip(self._batch_fields, before, after, strict=True)
        return {k: new for k, old, new in fields if new is not old or type(new) is int}

    def _requests(self, batch: Any) -> dict[str, list[Any]]:
        """Numbers of the batch's requests, which a call may change, where it is recorded."""
        if not self.recording or not batch.reqs:
            return {}
        names = [k for k, v in vars(batch.reqs[0]).items() if type(v) is int and k != "rid"]
        return {f"requests.{k}": [getattr(host, k, None) for host in batch.reqs] for k in names}

    def _views(self, batch: Any, held: list[tuple[Tensor, Tensor]]) -> dict[str, list[str]]:
        """Which rows of a batch share storage with those before the call, where it is recorded."""
        if not self.recording:
            return {}
        before = {storage(tensor) for tensor, _ in held} - {-1}
        rows = {"req_pool_indices": batch.req_pool_indices, **self.row_tensors(batch.spec_info)}
        shared = {name for name, tensor in rows.items() if storage(tensor) in before}
        # By role: another name for the same field is told where fields are.
        return {"views": sorted("tokens" if n == self._token_field else n for n in shared)}

    def _carries(self, payload: Any, draft: Any) -> dict[str, Any]:
        """What the relay is handed, field by field, where it is recorded."""
        if not self.recording or payload is draft:
            return {}
        return {f"payload.{name}": value for name, value in _attributes(payload).items()}

    def _carried(self, **values: Tensor) -> dict[str, list[str]]:
        """Which values live in the worker's output buffers, where it is recorded."""
        if not self.recording:
            return {}
        theirs = {storage(buffer) for pair in self._output for buffer in pair}
        return {"carried": [name for name, value in values.items() if storage(value) in theirs]}

    def call(self, call: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call into the tree; an exception becomes an observation and ends the operation."""
        self.calls += 1
        try:
            return function(*args, **kwargs)
        except (StandInUsed, HarnessGap):
            raise
        except Exception as error:
            fresh = getattr(self.relay, "_publish_fresh", None)
            name = getattr(function, "__name__", "")
            self.observe(call, error=Outcome.of(error), during=name, fresh=fresh)
            raise _Stopped from None

    def attempt(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Outcome | None:
        """Call into the tree where an error is an answer, not the end."""
        self.calls += 1
        try:
            function(*args, **kwargs)
            self.surface.device.settle()
        except (StandInUsed, HarnessGap):
            raise
        except Exception as error:
            return Outcome.of(error)
        return None

    def channels(self) -> dict[str, Tensor]:
        """The relay's recognised buffers, as they are now; one may not exist yet."""
        held = vars(self.relay)
        return {name: held[buffer] for name, buffer in self.channel_names if buffer in held}

    def rows(self) -> tuple[dict[str, Tensor] | None, dict[str, Tensor] | None]:
        """What the running and the last prefill batch hold: ``slots``, and their draft's rows."""
        held: list[dict[str, Tensor] | None] = []
        for batch in (self.running, self.prefill):
            if batch is None:
                held.append(None)
                continue
            draft = batch.spec_info
            values = {"slots": batch.req_pool_indices}
            if draft.future_indices is not None:
                values["future_indices"] = draft.future_indices
            values["tokens"] = getattr(draft, self._token_field)
            values["lengths"] = draft.new_seq_lens
            held.append({name: value.clone() for name, value in values.items()})
        running, prefill = held
        return running, prefill

    def _buffers(self) -> tuple[str, ...]:
        """Names of all tensors the relay holds; a lazily created one shows here."""
        return tuple(k for k, v in vars(self.relay).items() if isinstance(v, Tensor))

    def _appeared(self, before: tuple[str, ...]) -> list[str]:
        """Buffers that the relay has and had not `before`, the two channels apart."""
        channels = [buffer for _, buffer in self.channel_names]
        return [n for n in self._buffers() if n not in before and n not in channels]

    def relay_aspects(self, relay: Any = None) -> dict[str, Any]:
        """The recognised buffers of the relay, or of a copy of it, as aspects."""
        held = vars(self.relay if relay is None else relay)
        return {aspect: held[buffer] for aspect, buffer in self._relay_names if buffer in held}

    def relay_copy(self) -> Any:
        """A relay with the same rows, whose writes nobody else sees."""
        relay = copy.copy(self.relay)
        for _, buffer in self.channel_names:
            if buffer in vars(self.relay):
                setattr(relay, buffer, getattr(self.relay, buffer).clone())
        return relay

    def _signals(self) -> tuple[Any, ...]:
        """Signals of the relay: its event's recordings, whether it is armed, its buffers."""
        event = getattr(self.relay, "publish_ready", None)
        fresh = getattr(self.relay, "_publish_fresh", None)
        return (getattr(event, "recorded", None), fresh, self._buffers())

    def _census(self, rows: int, **things: Any) -> dict[str, Any]:
        """What nobody declared of `things`, by owner, and with it the records to add."""
        unknown: list[tuple[str, str, Any]] = []
        for owner, thing in things.items():
            held, declared = _attributes(thing), self.surface.census[owner].keys()
            if not held.keys() <= declared:
                unknown += [(owner, n, value) for n, value in held.items() if n not in declared]
        if not unknown:
            return {"undeclared": []}
        return {
            "undeclared": [name for _, name, _ in unknown],
            "declare": [f"{owner} {n} {guess(n, value, rows)}" for owner, n, value in unknown],
        }

    def _rows_held(self, batch: Any) -> Settings:
        """The batch's fields that have one value per row, as an object of their own."""
        rows, held = len(batch.reqs), vars(batch).items()
        return Settings(**{name: value for name, value in held if _count(value) == rows})

    def _changed(self, before: tuple[Any, ...], after: tuple[Any, ...]) -> list[str]:
        """Batch fields that are not the same object any more."""
        if all(map(operator.is_, before, after)):
            return []
        pairs = zip(self._batch_fields, before, after, strict=True)
        return [name for name, old, new in pairs if not _same_value(old, new)]

    # -- making batches --------------------------------------------------------------------------

    def tensor(self, values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def _host_request(self, request: Request) -> HostRequest:
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
        saved = self._batch_values(batch)
        yield
        for name, value in zip(self._batch_fields, saved, strict=True):
            setattr(batch, name, value)

    def _forward(self, batch: Any, effect: Effect, build: Callable[[], Any]) -> None:
        """A worker's forward and the hand-over after it.

        Order: snapshot, forward (which edits the batch and publishes), stash, restore; then the
        batch carries the next draft input, whose future indices are the batch's own slots.
        """
        before = self._batch_values(batch)
        draft = None
        with self._isolation(batch), self.surface.device.forward():
            slots = batch.req_pool_indices
            # A forward may rebind any field in the middle; the transaction must undo it all.
            for name in self._batch_fields:
                setattr(batch, name, _SPOILED)
            draft = self.call("build", build)
            lengths = draft.new_seq_lens
            self.observe(
                "build",
                draft,
                tokens=getattr(draft, self._token_field),
                lengths=lengths,
                **self._census(len(effect.slots), draft=draft),
            )
            if self.header.overlap:
                signals = None if effect.slots else self._signals()
                self.call("publish", self.relay.publish, slots, lengths)
                self.observe("publish", **self.relay_aspects(), copied=self._copied(lengths))
                payload = self.call("stash", self.surface.payload, draft)
                self.call("stash", self.relay.stash, slots, payload)
                tokens = getattr(draft, self._token_field)
                self.observe(
                    "stash",
                    **self.relay_aspects(),
                    copied=self._copied(tokens),
                    **self._census(
                        len(effect.slots),
                        relay=self.relay,
                        **({} if payload is draft else {"payload": payload}),
                    ),
                    **self._carries(payload, draft),
                )
                if signals is not None:
                    self.observe("idle-signals", unchanged=self._signals() == signals)
        self.observe("restore", changed=self._changed(before, self._batch_values(batch)))
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
        self._end(effect)

    def _channel_storages(self) -> list[int]:
        return [storage(buffer) for buffer in self.channels().values()]

    def _copied(self, source: Tensor) -> bool:
        """Whether the relay shares no storage with what was just written to it."""
        return storage(source) not in self._channel_storages()

    # -- operations -----------------------------------------------------------------------------

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self.observe("relay", **self._census(0, relay=self.relay))

    def _admit(self, operation: Admit, effect: Effect) -> None:
        self._start()
        batch = self._prefill_batch(effect, len(effect.slots))
        self._resolve("admit-resolve", batch)
        self.observe(
            "admit-resolve",
            input_ids=batch.input_ids,
            seq_lens=batch.seq_lens,
            **self.relay_aspects(),
        )
        self._prefill(batch, effect)

    def _prefill_batch(self, effect: Effect, count: int) -> Any:
        """A prefill batch of the effect's first `count` rows."""
        requests = effect.requests[:count]
        lengths = effect.lengths[:count]
        for request, length in zip(requests, lengths, strict=True):
            self._host_request(request).kv_committed_len = length
        return self.new_batch(requests, effect.slots[:count], lengths)

    def _mixed(self, operation: Mixed, effect: Effect) -> None:
        self._start()
        running, self.running = self.running, None
        batch = self._prefill_batch(effect, len(effect.slots) - len(running.reqs))
        self._prepare(running, effect)
        # Of every prompt the last token is prefilled, the others are cached.
        rows, before = len(batch.reqs), [length - 1 for length in batch.seq_lens.tolist()]
        batch.prefix_lens, batch.extend_lens = before, [1] * rows
        batch.extend_num_tokens, batch.extend_logprob_start_lens = rows, [0] * rows
        kv_slots = self.pool.req_to_token[batch.req_pool_indices, self.tensor(before)]
        batch.out_cache_loc = kv_slots.to(torch.int64)
        held = self._hold(running)
        self.call("mix", batch.mix_with_running, running)
        self.observe(
            "mix",
            **self._batch_rows(batch),
            held=all(torch.equal(tensor, value) for tensor, value in held),
            **self.relay_aspects(),
        )
        if not self.header.overlap:
            buffers, pending = self._buffers(), self.tensor(effect.pending)
            self.call(
                "mixed-stash", self.relay.stash_bonus_tokens, running.req_pool_indices, pending
            )
            self.observe("mixed-stash", **self.relay_aspects(), appeared=self._appeared(buffers))
        written = self._before(batch)
        self._resolve("mixed-resolve", batch)
        self.observe(
            "mixed-resolve",
            None,
            self._written(batch, written),
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
        buffers = self._buffers()
        batch = self.call("seed", self._server.seed, hosts, self.running)
        draft = batch.spec_info
        tokens, lengths = getattr(draft, self._token_field), draft.new_seq_lens
        self.observe(
            "seed",
            draft,
            tokens=tokens,
            lengths=lengths,
            future=draft.future_indices,
            **self._batch_rows(batch),
            seq_lens=batch.seq_lens,
            order=list(self._server.order),
            copied=self._copied(tokens) and self._copied(lengths),
            appeared=self._appeared(buffers),
            **self._census(len(effect.slots), draft=draft, relay=self.relay),
            **self.relay_aspects(),
        )
        self.prefill = batch

    def _prefill(self, batch: Any, effect: Effect) -> None:
        """Run a prefill batch whose inputs are resolved; it is the last prefill batch then."""
        tokens = self.tensor(effect.tokens)
        lengths, host = batch.seq_lens, batch.seq_lens_cpu

        def build() -> Any:
            # A prefill publishes the batch's own lengths: the sampled token is not counted.
            return make_draft_input(
                self.surface,
                tokens,
                lengths,
                prefill=True,
                cur_allocated_seq_lens_cpu=host,
            )

        self._forward(batch, effect, build)
        self.prefill = batch

    def _absorb(self, operation: Operation, effect: Effect) -> None:
        batch = self.prefill
        chunked = [batch.reqs[row] for row in effect.left_out]
        held, before = self._hold(batch), self._before(batch)
        self.call("absorb-filter", batch.filter_batch, chunked)
        if effect.keep:
            self._observe_rows("absorb-filter", batch, held, before)
        else:
            self.observe("absorb-filter", requests=[host.rid for host in batch.reqs])
        self.prefill = None
        if not effect.stays:
            return
        if isinstance(operation, Adopt):
            self.running = batch
            return
        running = self.running
        right = copy.copy(batch.spec_info)
        right_values = {k: v.clone() for k, v in self._live_tensors(right).items()}
        held, before = self._hold(running), self._before(running)
        forms = [d.future_indices is not None for d in (running.spec_info, right)]
        self.call("merge", running.merge_batch, batch)
        other = batch.spec_info
        intact = all(torch.equal(getattr(other, k), v) for k, v in right_values.items())
        self._observe_rows(
            "merge",
            running,
            held,
            before,
            forms=forms,
            right_intact=intact,
            right_shared=self.shared(running.spec_info, other),
        )

    def stored_layout(self, draft: Any) -> dict[str, Any]:
        """Shape and dtype of the five stored tensors; row counts of what else is row-aligned."""
        held = vars(draft)
        five = [(name, held.get(name)) for name in self.five]
        known = [
            (i, tuple(t.shape), t.dtype) for i, (_, t) in enumerate(five) if isinstance(t, Tensor)
        ]
        extra = [t.shape[0] for n, t in self._live_tensors(draft).items() if n not in self.five]
        return {"widths": known, "extra_rows": extra} if extra else {"widths": known}

    def _live_tensors(self, draft: Any) -> dict[str, Tensor]:
        """Tensors of a draft input that carry rows in its present form."""
        if draft.future_indices is not None:
            return {"future_indices": draft.future_indices}
        held = vars(draft)
        return {name: held[name] for name in self._rows if isinstance(held.get(name), Tensor)}

    def shared(self, left: Any, right: Any) -> list[str]:
        """Names of the left draft input's tensors that share storage with one of the right's."""
        theirs = {storage(t) for t in self.row_tensors(right).values()} - {-1}
        return [name for name, t in self.row_tensors(left).items() if storage(t) in theirs]

    def row_tensors(self, draft: Any) -> dict[str, Tensor]:
        """Live tensors and host mirrors: whatever a filter or merge of another must not touch."""
        held = vars(draft)
        mirrors = {m.name: held.get(m.name) for m in self.mirrors}
        present = {name: t for name, t in mirrors.items() if isinstance(t, Tensor)}
        return {**self._live_tensors(draft), **present}

    def _prepare(self, batch: Any, effect: Effect) -> None:
        """What the running batch goes through before it decodes."""
        batch.forward_mode = self.surface.forward_mode.DECODE
        for host, committed in zip(batch.reqs, effect.committed, strict=True):
            host.kv_committed_len = committed
        draft = batch.spec_info
        before = self._before(batch)
        self.call("prepare", draft.prepare_for_decode, batch)
        planning = getattr(draft, "planning_seq_lens_cpu", None)
        aspects: dict[str, Any] = {}
        if self._lag or not self.header.overlap:
            # Elsewhere the resolve replaces what is prepared here.
            aspects.update(committed=batch.seq_lens_cpu, committed_sum=batch.seq_lens_sum)
        if planning is not None:
            aspects.update(planning=planning, planning_sum=draft.planning_seq_lens_sum)
        self.observe(
            "prepare",
            draft,
            self._written(batch, before),
            **self._census(len(batch.reqs), draft=draft),
            **aspects,
            **self._requests(batch),
        )

    def _step(self, operation: Step, effect: Effect) -> None:
        batch = self.running
        self._prepare(batch, effect)
        before = self._before(batch)
        self._resolve("resolve", batch)
        draft = batch.spec_info
        tokens = getattr(draft, self._token_field)
        held = self._channel_storages()
        aliased = [
            what
            for what, value in (("tokens", tokens), ("lengths", batch.seq_lens))
            if storage(value) in held
        ]
        self.observe(
            "resolve",
            draft,
            self._written(batch, before),
            tokens=tokens,
            lengths=batch.seq_lens,
            host=batch.seq_lens_cpu,
            host_sum=batch.seq_lens_sum,
            aliased=aliased,
            staged=[batch.input_ids, batch.prefill_input_ids_cpu],
            **self.relay_aspects(),
            **self._carried(tokens=tokens, lengths=batch.seq_lens),
        )
        output, output_lengths = self._output[self._turn]
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
            self.observe("batch", **self._census(rows, batch=self._rows_held(batch)))

    def _hold(self, batch: Any) -> list[tuple[Tensor, Tensor]]:
        """Tensors that others may hold (the result queue, the relay's stash): with their values."""
        tensors = [batch.req_pool_indices, *self.row_tensors(batch.spec_info).values()]
        return [(tensor, tensor.clone()) for tensor in tensors]

    def _filter(self, operation: Filter, effect: Effect) -> None:
        leaving = [self.running.reqs[row] for row in effect.left_out]
        self._filter_running("filter", effect, *([leaving] if leaving else []))

    def _drop(self, operation: Retract | Preempt, effect: Effect) -> None:
        self._filter_running(operation.op, effect, keep_indices=list(effect.keep))

    def _filter_running(self, call: str, effect: Effect, *args: Any, **kwargs: Any) -> None:
        batch = self.running
        held, before = self._hold(batch), self._before(batch)
        self.call(call, batch.filter_batch, *args, **kwargs)
        if effect.keep:
            self._observe_rows(call, batch, held, before)
        else:
            # The tree leaves stale tensors in an emptied batch; callers drop it, and so do we.
            self.observe(call, requests=[host.rid for host in batch.reqs])
            self.running = None

    def _end(self, effect: Effect) -> None:
        """The host learns of ends; filters leave such requests out."""
        for request in effect.ended:
            self._host_request(request).finished_flag = True

    def _process_result(self) -> None:
        """The host processes a result: it finds the batch as it was launched."""
        batch = self._queue.popleft()
        self.observe(
            "results",
            requests=[host.rid for host in batch.reqs],
            slots=batch.req_pool_indices,
            slots_cpu=batch.req_pool_indices_cpu,
        )

    def _observe_rows(
        self,
        call: str,
        batch: Any,
        held: list[tuple[Tensor, Tensor]],
        before: tuple[Any, ...] = (),
        **more: Any,
    ) -> None:
        """Everything a filter or merge of a batch decides."""
        draft = batch.spec_info
        aspects = {**self._batch_rows(batch), "future": draft.future_indices}
        if draft.future_indices is None:
            aspects["tokens"] = getattr(draft, self._token_field)
            aspects["lengths"] = draft.new_seq_lens
            aspects.update(self.stored_layout(draft))
        aspects.update(self.relay_aspects())
        aspects["held"] = all(torch.equal(tensor, value) for tensor, value in held)
        written = self._written(batch, before) if before else None
        self.observe(call, draft, written, **aspects, **more, **self._views(batch, held))

    def _batch_rows(self, batch: Any) -> dict[str, Any]:
        """What a batch says of its rows, its draft input apart."""
        return {
            "requests": [host.rid for host in batch.reqs],
            "sampling": batch.sampling_info.rows,
            "prompts": batch.orig_seq_lens,
            "slots": batch.req_pool_indices,
            "slots_cpu": batch.req_pool_indices_cpu,
        }

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
            self._observe_rows("idle", self.running, [])


def _same_value(old: Any, new: Any) -> bool:
    """Whether a batch field was restored: to the same object, or to an equal one."""
    if old is new:
        return True
    if isinstance(old, Tensor) or isinstance(new, Tensor):
        alike = type(old) is type(new) and old.dtype == new.dtype
        return alike and torch.equal(old, new)
    return type(old) is type(new) and bool(old == new)


def _count(value: Any) -> int:
    """How many things a value is a list or tensor of; -1 if it is none."""
    if isinstance(value, Tensor):
        return value.shape[0] if value.dim() else -1
    return len(value) if isinstance(value, list | tuple) else -1


def _attributes(thing: Any) -> dict[str, Any]:
    """Attributes of an object, which may keep them in slots."""
    if hasattr(thing, "__dict__"):
        return dict(vars(thing))
    return {name: getattr(thing, name) for name in type(thing).__slots__ if hasattr(thing, name)}


class _Stopped(Exception):
    """The tree raised; the operation ends with that observation."""
