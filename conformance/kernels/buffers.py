"""Memory in which a stray write shows: buffers between guard zones, poisoned before a launch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

GUARD = 512
"""Elements before and after every buffer; more than any faulty mask here can overshoot by."""

POISONS = (-1_234_567_891, -987_654_323)
"""What an output holds before a launch. Two, because one could be the right answer by chance."""

_GUARDS = (-1_111_111_117, -777_777_787)


def pattern(dtype: torch.dtype, value: int) -> Any:
    """The closest thing to `value` that the dtype has, different for different values."""
    if dtype is torch.bool:
        return value == POISONS[0]
    if dtype.is_floating_point:
        return float(value // 1_000_000)
    return value if dtype.itemsize >= 4 else value % 127


class Buffer:
    """A tensor somewhere within a larger one.

    Args:
        shape: of the tensor.
        dtype, device: its.
        gap: elements left out between two rows (first dimension).
        offset: elements by which it is shifted out of alignment.
        poison: which of :data:`POISONS` fills it.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        gap: int = 0,
        offset: int = 0,
        poison: int = 0,
    ) -> None:
        strides = [1] * len(shape)
        for axis in reversed(range(len(shape) - 1)):
            strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
        if strides:
            strides[0] += gap
        span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        size = 2 * GUARD + offset + (span if 0 not in shape else 0)
        self._outside = pattern(dtype, _GUARDS[poison])
        self._arena = torch.full((size,), self._outside, dtype=dtype, device=device)
        self.view = self._arena.as_strided(tuple(shape), strides, GUARD + offset)
        self.view.fill_(pattern(dtype, POISONS[poison]))
        self._fresh = self._arena.clone()
        self._held = False

    def hold(self, values: Tensor) -> None:
        """Fill the buffer as an input: from now on nothing in it may change."""
        self.view.copy_(values)
        self._fresh = self._arena.clone()
        self._held = True

    def disturbed(self) -> Tensor:
        """() bool: something outside the buffer changed, or an input did."""
        if self._held:
            return self.touched()
        outside = self._arena.clone()
        outside.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset()).fill_(
            self._outside
        )
        return torch.any(outside != self._outside)

    def touched(self) -> Tensor:
        """() bool: anything at all changed since the buffer was made or filled."""
        return torch.any(_bits(self._arena) != _bits(self._fresh))


def _bits(values: Tensor) -> Tensor:
    """The tensor as integers, so that NaN equals itself."""
    if not values.dtype.is_floating_point:
        return values
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.view(integers[values.dtype.itemsize])


def same(one: Tensor, other: Tensor) -> Tensor:
    """Elementwise bool: the same bits."""
    return _bits(one) == _bits(other)


def poisoned(values: Tensor, poison: int) -> Tensor:
    """Elementwise bool: still holds what the buffer was filled with."""
    return torch.eq(values, pattern(values.dtype, POISONS[poison]))


@contextlib.contextmanager
def allocating(poison: int, offset: int) -> Iterator[list[Buffer]]:
    """Serve every ``torch.empty`` from poisoned buffers: what a wrapper allocates for its outputs.

    Yields:
        The buffers, in the order of allocation.
    """
    made: list[Buffer] = []
    plain = torch.empty

    def empty(*size: Any, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        buffer = Buffer(
            [int(n) for n in shape],
            dtype or torch.get_default_dtype(),
            torch.device(device or "cpu"),
            offset=offset,
            poison=poison,
        )
        made.append(buffer)
        return buffer.view

    torch.empty = empty
    try:
        yield made
    finally:
        torch.empty = plain
