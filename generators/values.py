"""Values that carry their writer: an injective table from writes to token ids.

Every token a trace writes is different, so a wrong value names the write it came from. Lengths are
kept apart the same way: the state machine gives every (request, generation) a range of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

STRIDE = 1 << 14
"""Lengths of one (request, generation) lie in a range of this many tokens."""

_MULTIPLIER = 0x9E3779B97F4A7C15


def _edges(bits: int) -> list[int]:
    """Values where narrowing, sign and float conversions show, widest first."""
    # Not the largest value of the type: that is what torch fills uninitialized memory with.
    edges = [(1 << bits) - 2, 0, (1 << 24) + 1, 1, (1 << 16) + 3, 127]
    if bits > 32:
        edges[1:1] = [(1 << 31) + 5, (1 << 32) + 7, (1 << 53) + 1, 1 << 62]
    return [edge for edge in edges if edge < 1 << bits]


@dataclass(slots=True)
class Write:
    """Who wrote a value: the operation (index into the trace), request, generation and step."""

    operation: int
    request: int
    generation: int
    slot: int
    step: int
    kind: str

    def describe(self) -> str:
        again = f" (generation {self.generation})" if self.generation else ""
        return f"r{self.request}{again}@{self.slot} {self.kind} {self.step}"


class TokenTable:
    """Deals a fresh token id to every write and remembers whose it is.

    Args:
        seed: of the values.
        bits: ids are below ``2**bits``.
    """

    def __init__(self, seed: int, bits: int) -> None:
        self._mask = (1 << bits) - 1
        self._next = (seed * 2654435761 + 12345) & self._mask
        self._step = (_MULTIPLIER & self._mask) | 1
        self._edges = iter(_edges(bits))
        self._dealt = 0
        self.writer: dict[int, Write] = {}

    def deal(self, write: Write) -> int:
        """A token id no other write of this trace has; edge values come first and then thinly."""
        self._dealt += 1
        if self._dealt % 3 == 1:
            edge = next(self._edges, None)
            if edge is not None and edge not in self.writer:
                self.writer[edge] = write
                return edge
        value = self._next
        while value in self.writer:
            value = (value + self._step) & self._mask
        self._next = (value + self._step) & self._mask
        self.writer[value] = write
        return value


def other(value: int) -> int:
    """A value that is not `value` and fits wherever it does."""
    return value ^ 1
