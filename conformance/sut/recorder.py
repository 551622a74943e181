"""A flight recorder: which operation a process was at when it died.

A file mapped by the worker and read by the parent, so that it survives any signal.
"""

from __future__ import annotations

import json
import mmap
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from generators.operations import Trace

if TYPE_CHECKING:
    from generators.kernel_inputs import Case
    from generators.schedules import Schedule

_HEAD = struct.Struct("<iI")
_SIZE = 1 << 20


class Recorder:
    """Writes the present trace and operation index; create in the worker.

    Args:
        path: file of the recorder; made by :func:`create`.
    """

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._trace: Trace | None = None

    def __call__(self, trace: Trace, index: int) -> None:
        if trace is not self._trace:
            self._trace = trace
            text = json.dumps(trace.as_json()).encode()[: _SIZE - _HEAD.size]
            self._map[_HEAD.size : _HEAD.size + len(text)] = text
            _HEAD.pack_into(self._map, 0, index, len(text))
        else:
            struct.pack_into("<i", self._map, 0, index)

    def clear(self) -> None:
        """Record nothing: another request begins."""
        self._trace = None
        _HEAD.pack_into(self._map, 0, -1, 0)

    def note(self, case: Case) -> None:
        """Record a kernel case in the place of a trace."""
        self._whole({"case": case.as_json()})

    def schedule(self, schedule: Schedule) -> None:
        """Record a schedule in the place of a trace."""
        self._whole(schedule.as_json())

    def _whole(self, record: dict[str, Any]) -> None:
        text = json.dumps(record).encode()
        self._map[_HEAD.size : _HEAD.size + len(text)] = text
        _HEAD.pack_into(self._map, 0, 0, len(text))


def create(path: Path) -> None:
    """Make an empty recorder file."""
    with path.open("wb") as file:
        file.truncate(_SIZE)
        file.write(_HEAD.pack(-1, 0))


def read(path: Path) -> tuple[dict[str, Any], int] | None:
    """The last (trace as JSON, operation index), or None if nothing was recorded.

    In the place of the trace stands ``{"case": ...}`` of a kernel case, or a schedule.
    """
    data = path.read_bytes()
    index, size = _HEAD.unpack_from(data, 0)
    if index < 0 or not size:
        return None
    return json.loads(data[_HEAD.size : _HEAD.size + size]), index
