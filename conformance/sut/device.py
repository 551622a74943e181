"""The device seam: what the harness makes of torch so that a tree's code runs unmodified.

``plain``   CPU tensors, inert streams; the bulk of all runs. CPU tensors refuse ``record_stream``
            (older trees call it unguarded), and events there record nothing: the *device* is made
            to tolerate and count them, not SGLang's code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class PlainEvent:
    """A device event that only counts: on one thread everything before it has happened."""

    recorded = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.recorded = 0

    def record(self, stream: Any = None) -> None:
        self.recorded += 1

    def wait(self, stream: Any = None) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True


class PlainDevice:
    """CPU tensors, one thread, streams that order nothing because everything is in order."""

    name = "cpu"
    assertion = "RuntimeError"
    """What a failed device-side assertion raises here."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.doubles: list[str] = []

    def prepare(self, *, compiled: bool) -> None:
        """Adapt torch in this process; call once, before the tree loads.

        Args:
            compiled: keep ``torch.compile``; otherwise it becomes the identity (a recorded
                double), because compiling costs seconds and the bulk tests what is compiled.
        """
        torch.set_num_threads(1)
        # Uninitialized memory is filled with a fixed pattern: a run must not depend on garbage.
        torch.use_deterministic_algorithms(True, warn_only=True)
        _replace(torch.cpu, "Event", PlainEvent)
        _replace(torch.Tensor, "record_stream", lambda self, stream: None)
        self.doubles = [
            "torch.cpu.Event",
            "torch.Tensor.record_stream",
            "torch.use_deterministic_algorithms (uninitialized memory is filled)",
        ]
        if not compiled:
            _replace(torch, "compile", _identity_compile)
            self.doubles.append("torch.compile (identity)")


def _replace(owner: Any, name: str, double: Any) -> None:
    setattr(owner, name, double)


def _identity_compile(model: Callable[..., Any] | None = None, **_: Any) -> Any:
    if model is not None:
        return model
    return lambda function: function


def open_device(name: str) -> PlainDevice:
    """The device called `name`; raises ValueError for one this version does not have."""
    if name == "cpu":
        return PlainDevice()
    raise ValueError(f"device {name!r} is not available in this version; use cpu")
