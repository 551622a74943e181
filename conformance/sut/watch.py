"""What a driver can see of the tree it drives: batches, draft inputs, the relay, errors.

Nothing here makes anything happen but :meth:`Watch.call`, through which every call into the tree
goes. What is seen is handed to a sink as an :class:`~conformance.observation.Observation`.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from conformance.observation import Observation, Outcome
from conformance.sut.doubles import Settings
from conformance.sut.fields import guess
from conformance.sut.host_request import HarnessGap
from conformance.sut.isolation import StandInUsed
from conformance.sut.surface import Surface
from generators.operations import Header


class Watch:
    """The eyes of a driver.

    Args:
        surface: the loaded tree.
        header: the trace's setting.
        relay: the tree's relay.
        sink: receives every observation right after its call; tensors in it are the tree's own
            and change with the next call.
        recording: also observe which batch fields a call rebinds.

    Attributes:
        running, prefill: the tree's batches, None where there is none.
        calls: calls into the tree so far.
        five: names of the stored tensors of a draft input.
        mirrors: census records of its host mirrors.
        channel_names: the relay's recognised channels and the names of their buffers.
        token_dtype: of the worker's token buffers.
    """

    def __init__(
        self,
        surface: Surface,
        header: Header,
        relay: Any,
        sink: Callable[[Observation], None],
        *,
        recording: bool,
    ) -> None:
        self.surface, self.header, self.relay = surface, header, relay
        self.sink, self.recording = sink, recording
        self.device = surface.device.device
        self.running: Any = None
        self.prefill: Any = None
        self.calls = 0
        self.batch_fields = [f.name for f in dataclasses.fields(surface.schedule_batch)]
        self.batch_values = operator.attrgetter(*self.batch_fields)
        census = surface.census["draft"].values()
        self._rows = [record.name for record in census if record.kind == "row"]
        self.token_field = surface.token_field
        self.five = ("topk_p", "topk_index", surface.token_field, "new_seq_lens", "hidden_states")
        self.mirrors = surface.draft_fields("mirror")
        channels = (("tokens", surface.token_channel), ("lengths", surface.length_channel))
        self.channel_names = [(name, buffer) for name, buffer in channels if buffer is not None]
        self._relay_names = [(f"relay_{name}", buffer) for name, buffer in self.channel_names]
        # The worker writes its results into two buffers in turn.
        self.token_dtype = torch.int32 if surface.capabilities.token_bits < 32 else torch.int64
        self.output = [
            (
                torch.zeros(header.pool, dtype=self.token_dtype, device=self.device),
                torch.zeros(header.pool, dtype=torch.int64, device=self.device),
            )
            for _ in range(2)
        ]

    def observe(
        self, call: str, draft: Any = None, written: dict[str, Any] | None = None, **aspects: Any
    ) -> None:
        self.surface.device.settle()
        self.sink(Observation(call, aspects, draft, written))

    def before(self, batch: Any) -> tuple[Any, ...]:
        """What :meth:`written` compares with."""
        return self.batch_values(batch) if self.recording else ()

    def written(self, batch: Any, before: tuple[Any, ...]) -> dict[str, Any] | None:
        """Batch fields that were rebound since `before`, and all integers it has now.

        Of small integers nobody can tell whether they were set again. None where nobody records.
        """
        if not self.recording:
            return None
        after = self.batch_values(batch)
        fields = zip(self.batch_fields, before, after, strict=True)
        return {k: new for k, old, new in fields if new is not old or type(new) is int}

    def request_numbers(self, batch: Any) -> dict[str, list[Any]]:
        """Numbers of the batch's requests, which a call may change, where it is recorded."""
        if not self.recording or not batch.reqs:
            return {}
        names = [k for k, v in vars(batch.reqs[0]).items() if type(v) is int and k != "rid"]
        return {f"requests.{k}": [getattr(host, k, None) for host in batch.reqs] for k in names}

    def views(self, batch: Any, held: list[tuple[Tensor, Tensor]]) -> dict[str, list[str]]:
        """Which rows of a batch share storage with those before the call, where it is recorded."""
        if not self.recording:
            return {}
        before = {storage(tensor) for tensor, _ in held} - {-1}
        rows = {"req_pool_indices": batch.req_pool_indices, **self.row_tensors(batch.spec_info)}
        shared = {name for name, tensor in rows.items() if storage(tensor) in before}
        # By role: another name for the same field is told where fields are.
        return {"views": sorted("tokens" if n == self.token_field else n for n in shared)}

    def carries(self, payload: Any, draft: Any) -> dict[str, Any]:
        """What the relay is handed, field by field, where it is recorded."""
        if not self.recording or payload is draft:
            return {}
        return {f"payload.{name}": value for name, value in _attributes(payload).items()}

    def carried(self, **values: Tensor) -> dict[str, list[str]]:
        """Which values live in the worker's output buffers, where it is recorded."""
        if not self.recording:
            return {}
        theirs = {storage(buffer) for pair in self.output for buffer in pair}
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
            raise Stopped from None

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
            values["tokens"] = getattr(draft, self.token_field)
            values["lengths"] = draft.new_seq_lens
            held.append({name: value.clone() for name, value in values.items()})
        running, prefill = held
        return running, prefill

    def buffers(self) -> tuple[str, ...]:
        """Names of all tensors the relay holds; a lazily created one shows here."""
        return tuple(k for k, v in vars(self.relay).items() if isinstance(v, Tensor))

    def appeared(self, before: tuple[str, ...]) -> list[str]:
        """Buffers that the relay has and had not `before`, the two channels apart."""
        channels = [buffer for _, buffer in self.channel_names]
        return [n for n in self.buffers() if n not in before and n not in channels]

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

    def signals(self) -> tuple[Any, ...]:
        """Signals of the relay: its event's recordings, whether it is armed, its buffers."""
        event = getattr(self.relay, "publish_ready", None)
        fresh = getattr(self.relay, "_publish_fresh", None)
        return (getattr(event, "recorded", None), fresh, self.buffers())

    def census(self, rows: int, **things: Any) -> dict[str, Any]:
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

    def rows_held(self, batch: Any) -> Settings:
        """The batch's fields that have one value per row, as an object of their own."""
        rows, held = len(batch.reqs), vars(batch).items()
        return Settings(**{name: value for name, value in held if _count(value) == rows})

    def changed(self, before: tuple[Any, ...], after: tuple[Any, ...]) -> list[str]:
        """Batch fields that are not the same object any more."""
        if all(map(operator.is_, before, after)):
            return []
        pairs = zip(self.batch_fields, before, after, strict=True)
        return [name for name, old, new in pairs if not _same_value(old, new)]

    def channel_storages(self) -> list[int]:
        return [storage(buffer) for buffer in self.channels().values()]

    def copied(self, source: Tensor) -> bool:
        """Whether the relay shares no storage with what was just written to it."""
        return storage(source) not in self.channel_storages()

    def stored_layout(self, draft: Any) -> dict[str, Any]:
        """Shape and dtype of the five stored tensors; row counts of what else is row-aligned."""
        held = vars(draft)
        five = [(name, held.get(name)) for name in self.five]
        known = [
            (i, tuple(t.shape), t.dtype) for i, (_, t) in enumerate(five) if isinstance(t, Tensor)
        ]
        extra = [t.shape[0] for n, t in self.live_tensors(draft).items() if n not in self.five]
        return {"widths": known, "extra_rows": extra} if extra else {"widths": known}

    def live_tensors(self, draft: Any) -> dict[str, Tensor]:
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
        return {**self.live_tensors(draft), **present}

    def hold(self, batch: Any) -> list[tuple[Tensor, Tensor]]:
        """Tensors that others may hold (the result queue, the relay's stash): with their values."""
        tensors = [batch.req_pool_indices, *self.row_tensors(batch.spec_info).values()]
        return [(tensor, tensor.clone()) for tensor in tensors]

    def observe_rows(
        self,
        call: str,
        batch: Any,
        held: list[tuple[Tensor, Tensor]],
        before: tuple[Any, ...] = (),
        **more: Any,
    ) -> None:
        """Everything a filter or merge of a batch decides."""
        draft = batch.spec_info
        aspects = {**self.batch_rows(batch), "future": draft.future_indices}
        if draft.future_indices is None:
            aspects["tokens"] = getattr(draft, self.token_field)
            aspects["lengths"] = draft.new_seq_lens
            aspects.update(self.stored_layout(draft))
        aspects.update(self.relay_aspects())
        aspects["held"] = all(torch.equal(tensor, value) for tensor, value in held)
        written = self.written(batch, before) if before else None
        self.observe(call, draft, written, **aspects, **more, **self.views(batch, held))

    def batch_rows(self, batch: Any) -> dict[str, Any]:
        """What a batch says of its rows, its draft input apart."""
        return {
            "requests": [host.rid for host in batch.reqs],
            "sampling": batch.sampling_info.rows,
            "prompts": batch.orig_seq_lens,
            "slots": batch.req_pool_indices,
            "slots_cpu": batch.req_pool_indices_cpu,
        }


def storage(tensor: Tensor) -> int:
    """Address of the tensor's storage; tensors with equal ones alias. Empty ones have none: -1."""
    return tensor.untyped_storage().data_ptr() or -1


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
        held: dict[str, Any] = vars(thing)
        return held
    return {name: getattr(thing, name) for name in type(thing).__slots__ if hasattr(thing, name)}


class Stopped(Exception):
    """The tree raised; the operation ends with that observation."""
