"""The device seam: what the harness makes of torch so that a tree's code runs unmodified.

``plain``   CPU tensors, inert streams; the bulk of all runs. CPU tensors refuse ``record_stream``
            (older trees call it unguarded), and events there record nothing: the *device* is made
            to tolerate and count them, not SGLang's code.
``cuda``    tensors on a GPU, a real forward stream beside the schedule stream, real events (whose
            recordings are counted) and pinned host memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from conformance.errors import UserError


@dataclass(frozen=True)
class Streams:
    """The streams of a scheduler.

    Attributes:
        module: torch's module for the device.
        schedule, forward, copy: the streams.
        using: makes the context in which a stream is the current one, any number of times.
    """

    module: Any
    schedule: Any
    forward: Any
    copy: Any
    using: Callable[[Any], contextlib.AbstractContextManager[Any]]


class Device(Protocol):
    """Where a tree's tensors live.

    Attributes:
        name: as ``--device`` gives it.
        device: for tensors.
        assertion: name of what a failed device-side assertion raises.
        survives_assertion: whether the process can go on after one.
        answers: what the tree is told when it asks where it runs; every other answer is no.
        doubles: what of torch the harness replaced, for reports.
    """

    name: str
    device: torch.device
    assertion: str
    survives_assertion: bool
    answers: frozenset[str]
    doubles: list[str]

    def prepare(self, *, compiled: bool) -> None:
        """Adapt torch in this process; call once, before the tree loads.

        Args:
            compiled: keep ``torch.compile``; otherwise it becomes the identity (a recorded
                double), because compiling costs seconds and the bulk tests what is compiled.
        """

    def forward(self) -> contextlib.AbstractContextManager[None]:
        """The forward stream, which waits for all that the schedule stream was given before."""

    def streams(self) -> Streams:
        """Streams for a scheduler's loop; the schedule stream is the current one."""

    def settle(self) -> None:
        """Wait until everything that was started is done, so that values can be looked at."""

    def lost(self) -> bool:
        """Whether this process cannot use the device any more (after an assertion, say)."""


class PlainEvent:
    """A device event that only counts: on one thread everything before it has happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.recorded = self.waited = self.joined = 0

    def record(self, stream: Any = None) -> None:
        self.recorded += 1

    def wait(self, stream: Any = None) -> None:
        self.waited += 1

    def synchronize(self) -> None:
        self.joined += 1

    def query(self) -> bool:
        return True


class PlainStream:
    """A stream on which everything has happened."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing is left to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing is left to wait for."""

    def synchronize(self) -> None:
        """Nothing is left to wait for."""


class PlainDevice:
    """CPU tensors, one thread, streams that order nothing because everything is in order."""

    def __init__(self) -> None:
        self.name = "cpu"
        self.device = torch.device("cpu")
        self.assertion = "RuntimeError"
        self.survives_assertion = True
        self.answers: frozenset[str] = frozenset()
        self.doubles: list[str] = []

    def prepare(self, *, compiled: bool) -> None:
        """See :class:`Device`."""
        _replace(torch.cpu, "Event", PlainEvent)
        _replace(torch.cpu.Stream, "wait_event", lambda self, event: event.wait(self))
        _replace(torch.Tensor, "record_stream", lambda self, stream: None)
        replaced = ["torch.cpu.Event", "torch.cpu.Stream.wait_event", "torch.Tensor.record_stream"]
        self.doubles = [*replaced, *_prepare(compiled)]

    def forward(self) -> contextlib.AbstractContextManager[None]:
        """See :class:`Device`: on one thread everything is in order."""
        return contextlib.nullcontext()

    def streams(self) -> Streams:
        """See :class:`Device`."""
        made = (PlainStream(), PlainStream(), PlainStream())
        return Streams(torch.cpu, *made, lambda stream: contextlib.nullcontext())

    def settle(self) -> None:
        """See :class:`Device`."""

    def lost(self) -> bool:
        """See :class:`Device`."""
        return False


class CudaDevice:
    """A GPU. A failed assertion there leaves the process without it."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise UserError(
                "there is no GPU here that this torch can use: leave --device out to run on the "
                "CPU, or run where torch.cuda.is_available() is true"
            )
        self.name = "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.assertion = "AcceleratorError"
        self.survives_assertion = False
        self.answers = frozenset({"is_cuda", "is_pin_memory_available"})
        self.doubles: list[str] = []
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def prepare(self, *, compiled: bool) -> None:
        """See :class:`Device`."""

        class CountedEvent(torch.cuda.Event):
            """An event that counts its recordings and who waits for it."""

            recorded = waited = joined = 0

            def record(self, stream: Any = None) -> None:
                self.recorded += 1
                super().record(stream)

            def wait(self, stream: Any = None) -> None:
                self.waited += 1
                super().wait(stream)

            def synchronize(self) -> None:
                self.joined += 1
                super().synchronize()

        _replace(torch.cuda, "Event", CountedEvent)
        self.doubles = ["torch.cuda.Event (counts its uses)", *_prepare(compiled)]

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """See :class:`Device`."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def streams(self) -> Streams:
        """See :class:`Device`."""
        made = (torch.cuda.current_stream(), self._stream, torch.cuda.Stream())  # type: ignore[no-untyped-call]
        return Streams(torch.cuda, *made, torch.cuda.stream)

    def settle(self) -> None:
        """See :class:`Device`."""
        torch.cuda.synchronize()

    def lost(self) -> bool:
        """See :class:`Device`."""
        try:
            self.settle()
        except RuntimeError:
            return True
        return False


def _prepare(compiled: bool) -> list[str]:
    """What all devices have in common; returns what was replaced."""
    torch.set_num_threads(1)
    # Uninitialized memory is filled with a fixed pattern: a run must not depend on garbage.
    torch.use_deterministic_algorithms(True, warn_only=True)
    doubles = ["torch.use_deterministic_algorithms (uninitialized memory is filled)"]
    if not compiled:
        _replace(torch, "compile", _identity_compile)
        doubles.append("torch.compile (identity)")
    return doubles


def _replace(owner: Any, name: str, double: Any) -> None:
    setattr(owner, name, double)


def _identity_compile(model: Callable[..., Any] | None = None, **_: Any) -> Any:
    if model is not None:
        return model
    return lambda function: function


DEVICES: dict[str, Callable[[], Device]] = {"cpu": PlainDevice, "cuda": CudaDevice}


def open_device(name: str) -> Device:
    """The device called `name`.

    Raises:
        UserError: this machine does not have it.
    """
    return DEVICES[name]()
