"""Condense what a replay made visible, so that two trees can be compared on the same traces.

:func:`record` plays a trace on a loaded tree and keeps, for every *place* (a call and a thing seen
at it, such as ``resolve: tokens``), the *forms* that the thing took (dtype, dimensions, None, an
exception) and a checksum of its *values* in order. Forms and values are kept apart, so that a type
that widens everywhere is one difference, and equal values stay visibly equal.

What is recorded goes beyond what the model speaks of: every declared attribute of the draft input
and of the relay, the batch fields that a call rebinds, what shares storage with the worker's
buffers, how often an event was recorded. Left out is what nobody may read: stored tensors of a
relayed draft input, and scratch.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from conformance.observation import Observation, Outcome
from conformance.sut.driver import Driver, table_width
from conformance.sut.surface import Surface
from generators.operations import Trace
from generators.protocol import State, apply

_MOST_VALUES = 12


@dataclass
class Seen:
    """One thing at one call, for people.

    Attributes:
        operation: index into the trace.
        form, text: what it was.
    """

    operation: int
    form: str
    text: str


@dataclass
class Record:
    """One trace on one tree.

    Attributes:
        values: per place, a checksum of all values in order; independent of dtypes.
        forms: per place, the forms it took.
        counts: per place, how often it was seen.
        seen: what was seen at the places asked for, in order.
    """

    values: dict[str, int] = field(default_factory=dict)
    forms: dict[str, set[str]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    seen: dict[str, list[Seen]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {
            "values": self.values,
            "forms": {place: sorted(forms) for place, forms in self.forms.items()},
            "counts": self.counts,
            "seen": {
                place: [[s.operation, s.form, s.text] for s in seen]
                for place, seen in self.seen.items()
            },
        }


def as_table(recorded: Sequence[tuple[Trace, Record, bool]]) -> dict[str, Any]:
    """Many records as one JSON value: places and sets of forms once, then numbers per trace.

    Returns:
        ``places``; ``forms`` (sets of forms); ``traces``; ``whole`` (whether no deviation ended
        the trace when it was judged); and per trace one number per place:
        ``counts`` (0 where the trace did not come by it), ``values`` (checksums) and ``kinds``
        (indices into ``forms``, 0 for none).
    """
    places = list(dict.fromkeys(place for _, one, _ in recorded for place in one.values))
    forms: dict[tuple[str, ...], int] = {(): 0}
    records = [one for _, one, _ in recorded]
    taken = [[tuple(sorted(one.forms.get(place, ()))) for place in places] for one in records]
    return {
        "places": places,
        "traces": [trace.as_json() for trace, _, _ in recorded],
        "whole": [whole for _, _, whole in recorded],
        "counts": [[one.counts.get(place, 0) for place in places] for one in records],
        "values": [[one.values.get(place, 0) for place in places] for one in records],
        "kinds": [[forms.setdefault(f, len(forms)) for f in row] for row in taken],
        "forms": list(forms),
    }


def record(surface: Surface, trace: Trace, wanted: Sequence[str] = ()) -> Record:
    """Play `trace`, judged by nobody, until its end or an exception of the tree.

    Args:
        wanted: places whose values to keep for people.
    """
    recorder = _Recorder(surface, wanted)
    width = table_width(trace)
    driver = Driver(surface, trace.header, recorder.note, recording=True, width=width)
    recorder.driver = driver
    state = State(trace.header)
    for index, operation in enumerate(trace.operations):
        recorder.operation = index
        effect = apply(state, operation)
        recorder.slots = effect.slots
        try:
            driver.perform(operation, effect)
        except (ValueError, IndexError, AttributeError, TypeError, RuntimeError) as error:
            # Nobody judges, so the driver may be handed what the specification forbids.
            recorder.keep("driver", "error", Outcome.of(error))
        if recorder.stopped:
            break
    return recorder.finish()


_LEFT_OUT = frozenset(
    {
        *("undeclared", "declare", "during", "fresh", "mirrors", "sums"),
        *("committed", "committed_sum", "planning", "planning_sum"),
        *("top_k", "bounds", "bound_sums"),
    }
)
"""Aspects that are about the harness, or that are recorded as attributes and batch fields."""

_RELAY_AT = frozenset({"relay", "stash", "resolve", "idle-resolve", "mixed-resolve", "seed"})
"""Calls after which all attributes of the relay are recorded."""

_CHANNELS_AT = frozenset(
    {
        *("publish", "stash", "resolve", "admit-resolve", "idle-resolve"),
        *("mixed-stash", "mixed-resolve", "seed"),
    }
)
"""Calls after which the relay's rows are recorded; at the others the model says they are kept."""


class _Recorder:
    """The sink of one trace."""

    driver: Driver

    def __init__(self, surface: Surface, wanted: Sequence[str]) -> None:
        self.surface = surface
        self.result = Record()
        self.operation = 0
        self.slots: list[int] = []
        self.stopped = False
        self._wanted = frozenset(wanted)
        self._places: dict[tuple[str, str], _Place] = {}
        roles = {surface.token_field, "new_seq_lens", "future_indices"}
        self._draft_kinds = {
            name: declared.kind
            for name, declared in surface.census["draft"].items()
            if name not in roles
        }
        self._relay_kinds = {n: declared.kind for n, declared in surface.census["relay"].items()}
        self._five = ("topk_p", "topk_index", "tokens", "lengths", "hidden_states")
        self._roles = roles
        self._born: dict[str, tuple[Tensor, Tensor]] = {}
        self._homes: dict[str, int] = {}

    def note(self, observed: Observation) -> None:
        """Record one observation."""
        call = observed.call
        for name, value in observed.aspects.items():
            if name == "error":
                self.stopped = True
            if name == "widths":
                for place, shape, dtype in value:
                    self.keep(call, f"stored.{self._five[place]}", _Layout(shape, dtype))
            elif name == "layout":
                for thing, (mine, _, rows) in (value or {}).items():
                    self.keep(call, f"idle.{self._role(thing)}", _Layout((rows, *mine[2]), mine[0]))
            elif call == "consume-twice":
                self.keep(call, f"twice.{name}", value)
            elif name == "kv":
                # Which of the free slots are handed out may differ; how many may not.
                self.keep(call, "allocated", [value.allocated[r] for r in sorted(value.allocated)])
                self.keep(call, "free", len(value.free))
            elif name.startswith("relay_"):
                if call in _CHANNELS_AT:
                    self.keep(call, name, self._written_rows(call, name, value))
                    home = self._homes.setdefault(name, value.data_ptr())
                    self.keep(call, f"home.{name}", home == value.data_ptr())
            elif name not in _LEFT_OUT and (name != "kv_slots" or self.driver.kv is None):
                self.keep(call, name, value)
        if observed.draft is not None:
            for name, value in self._draft_attributes(observed.draft, built=call == "build"):
                self.keep(call, f"draft.{name}", value)
        if call in _RELAY_AT:
            for name, value in self._relay_attributes(born=call == "relay"):
                self.keep(call, f"relay.{name}", value)
        if observed.written is not None and self.driver.kv is None:
            rebound = {k for k, v in observed.written.items() if type(v) is not int}
            self.keep(call, "batch", sorted(rebound - _STAGED))
            for name, value in observed.written.items():
                if name not in _SAID.get(call, ()):
                    self.keep(call, f"batch.{name}", value)

    def _role(self, name: str) -> str:
        if name == self.surface.token_field:
            return "tokens"
        return "lengths" if name == "new_seq_lens" else name

    def _written_rows(self, call: str, name: str, channel: Tensor) -> Tensor:
        """The channel without rows that nobody ever wrote: what those hold says nothing."""
        if name not in self._born:
            self._born[name] = channel.clone(), torch.zeros_like(channel, dtype=torch.bool)
        born, written = self._born[name]
        written |= channel != born
        if call in _WRITES[name]:
            # A channel that is created when it is first written was never seen without.
            written[self.slots] = True
        return torch.where(written, channel, _NEVER_WRITTEN)

    def _draft_attributes(self, draft: Any, *, built: bool) -> Iterator[tuple[str, Any]]:
        for name, value in vars(draft).items():
            kind = self._draft_kinds.get(name)
            if name in self._roles or kind == "scratch":
                continue
            if kind in ("row", "constant") and not built:
                continue  # its rows are among the aspects while they are live
            yield name, value

    def _relay_attributes(self, *, born: bool) -> Iterator[tuple[str, Any]]:
        for name, value in vars(self.driver.relay).items():
            kind = self._relay_kinds.get(name)
            if kind in ("channel", "scratch") or (kind == "constant" and not born):
                continue  # channels are aspects
            yield name, value

    def keep(self, call: str, thing: str, value: Any) -> None:
        """Add one value to its place."""
        place = self._places.get((call, thing))
        if place is None:
            place = self._places[call, thing] = _Place()
        form, content = _condense(value)
        if form is not place.form:
            place.form = form
            place.forms.add(form)
        place.value = zlib.crc32(content, place.value ^ self.operation)
        place.count += 1
        if (name := f"{call}: {thing}" if self._wanted else "") in self._wanted:
            text = _text(value).replace(str(_NEVER_WRITTEN), "_")
            place.seen.append(Seen(self.operation, form, text))
            self.result.seen[name] = place.seen

    def finish(self) -> Record:
        """The record of all that was kept."""
        for (call, thing), place in self._places.items():
            name = f"{call}: {thing}"
            self.result.values[name] = place.value
            self.result.forms[name] = place.forms
            self.result.counts[name] = place.count
        return self.result


class _Place:
    """What was seen of one thing at one call."""

    __slots__ = ("count", "form", "forms", "seen", "value")

    def __init__(self) -> None:
        self.value = self.count = 0
        self.form = ""
        self.forms: set[str] = set()
        self.seen: list[Seen] = []


_WRITES = {"relay_tokens": ("stash", "seed"), "relay_lengths": ("publish", "seed")}
"""The calls that write a channel at all rows of their batch."""

_NEVER_WRITTEN = -(1 << 20)
"""Stands for what a relay row holds before its first write; no token, no length, no poison."""

_STAGED = frozenset({"spec_info", "prefill_input_ids_cpu"})
"""Batch fields that the hand-over itself takes and leaves."""

_ROWS = ("spec_info", "reqs", "req_pool_indices", "req_pool_indices_cpu", "orig_seq_lens")
_RESOLVED = ("seq_lens", "seq_lens_cpu", "seq_lens_sum", "spec_info", "input_ids")
_SAID: dict[str, tuple[str, ...]] = {
    "resolve": _RESOLVED,
    "mixed-resolve": (*_RESOLVED, "prefix_lens", "out_cache_loc"),
    **dict.fromkeys(("filter", "absorb-filter", "retract", "preempt", "merge"), _ROWS),
}
"""Batch fields whose values are aspects of their call already."""


@dataclass(frozen=True)
class _Layout:
    """Shape and dtype of a tensor whose values are recorded elsewhere, or are of no interest."""

    shape: tuple[int, ...]
    dtype: Any


_INTEGERS = frozenset({torch.int8, torch.int16, torch.int32, torch.uint8, torch.bool})


def _condense(value: Any) -> tuple[str, bytes]:
    """Form and content of a value; the content does not depend on an integer's width."""
    if type(value) is Tensor:
        form = _tensor_form(value.dtype, value.shape[1:] if value.dim() else None)
        if not value.is_contiguous():
            form = f"{form}, strided"
        if not value.is_cpu:
            value = value.cpu()
        if value.dtype is not torch.int64:
            value = value.to(torch.int64 if value.dtype in _INTEGERS else torch.float64)
        content: bytes = value.numpy().tobytes()
        return form, content
    if value is None:
        return "None", b"None"
    kind = type(value)
    if kind is bool:
        return "bool", b"%d" % value
    if kind is int or kind is float or kind is str:
        return kind.__name__, repr(value).encode()
    if kind is _Layout:
        return _tensor_form(value.dtype, value.shape[1:]), b"%d" % value.shape[0]
    if kind is Outcome:
        return f"raises {value.kind}", value.kind.encode()
    if isinstance(value, list | tuple | dict):
        return kind.__name__, _text(value).encode()
    if (uses := _event_uses(value)) is not None:
        return "event", b"%d %d %d" % uses
    return kind.__name__, b""


def _event_uses(value: Any) -> tuple[int, int, int] | None:
    """How often an event was recorded, waited for by a stream and by the host; None for others."""
    recorded = getattr(value, "recorded", None)
    return (recorded, value.waited, value.joined) if isinstance(recorded, int) else None


@lru_cache
def _tensor_form(dtype: Any, trailing: tuple[int, ...] | None) -> str:
    """Such as ``int64[n]``: the first dimension is the batch, or the relay's rows."""
    dims = "" if trailing is None else ", ".join(("n", *map(str, trailing)))
    return f"{str(dtype).removeprefix('torch.')}[{dims}]"


def _text(value: Any) -> str:
    """A value for people."""
    if isinstance(value, Tensor):
        head = ", ".join(map(str, value.flatten()[:_MOST_VALUES].tolist()))
        return f"[{head}{', ...' if value.numel() > _MOST_VALUES else ''}]"
    if isinstance(value, _Layout):
        return f"{value.shape[0]} rows"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k}: {_text(v)}' for k, v in value.items())}}}"
    if value is None or isinstance(value, bool | int | float | str | Outcome):
        return str(value)
    if (uses := _event_uses(value)) is not None:
        return "recorded {}, awaited by streams {}, by the host {} times".format(*uses)
    return type(value).__name__
