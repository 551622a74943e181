"""A flight recorder: which operation a process was at when it died.

A file mapped by the worker and read by the parent, so that it survives any signal.
"""

from __future__ import annotations

import json
import mmap
import struct
from pathlib import Path
from typing import Any

from generators.operations import Trace

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


def create(path: Path) -> None:
    """Make an empty recorder file."""
    with path.open("wb") as file:
        file.truncate(_SIZE)
        file.write(_HEAD.pack(-1, 0))


def read(path: Path) -> tuple[dict[str, Any], int] | None:
    """The last (trace as JSON, operation index), or None if nothing was recorded."""
    data = path.read_bytes()
    index, size = _HEAD.unpack_from(data, 0)
    if index < 0 or not size:
        return None
    return json.loads(data[_HEAD.size : _HEAD.size + size]), index
