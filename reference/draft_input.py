"""What a DFlash draft input must be: idle, filter, merge.

A *draft input* is the draft-side state of one batch, one row per request, in request order. It has
two forms. *Relayed*: the rows live in the relay and the draft input holds only ``future_indices``,
the request slots where the next step will find them. *Stored*: ``future_indices`` is None and the
rows live in the draft input itself (without overlap, and between a forward and its dispatch).

Every function returns a new draft input and leaves its arguments alone; the result shares no
storage with the right operand of a merge (M6). Device tensors of the operands are of one device,
and keep their dtypes (M5).

In SGLang: ``DFlashDraftInputV2`` of ``speculative/dflash_info_v2.py``, which changes itself
instead, and ``ScheduleBatch.filter_batch`` and ``merge_batch``, which call it only where some rows
stay and some leave.

Clauses of :mod:`reference.clauses`: I1, I2, F1-F4, M1-M7.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor


class MixedForms(ValueError):
    """A relayed and a stored draft input were merged: one side's rows would be lost."""


class OneSidedMirror(ValueError):
    """A host mirror is present on one side of a merge only: no length would be right."""


@dataclass(frozen=True)
class DraftInput:
    """Draft-side state of ``n`` requests.

    Attributes:
        tokens: (n,) int, the bonus token of each request: its last token, not in the KV cache yet.
        lengths: (n,) int64, tokens of each request in the KV cache.
        topk_p, topk_index, hidden_states: (n, 0), kept for the shape EAGLE uses; DFlash has none.
        future_indices: (n,) int64 request slots if the rows live in the relay, else None.
        mirrors: host copies of per-row lengths by name, (n,) int on the CPU; may be empty.
    """

    tokens: Tensor
    lengths: Tensor
    topk_p: Tensor
    topk_index: Tensor
    hidden_states: Tensor
    future_indices: Tensor | None = None
    mirrors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """The number of requests."""
        form = self.tokens if self.future_indices is None else self.future_indices
        return int(form.shape[0])

    @property
    def sums(self) -> dict[str, int]:
        """Sum of each host mirror, in tokens."""
        return {name: int(values.sum()) for name, values in self.mirrors.items()}


STORED = ("tokens", "lengths", "topk_p", "topk_index", "hidden_states")
"""The five tensors of the stored form."""


def live(tokens: Tensor, lengths: Tensor) -> DraftInput:
    """The stored draft input a forward leaves.

    Args:
        tokens: (n,) int32 or int64 token ids, whichever the tree's channel carries.
        lengths: (n,) int64 tokens in the KV cache.
    """
    return DraftInput(tokens, lengths.to(torch.int64), *_unused(tokens.shape[0], tokens.device))


def relayed(draft: DraftInput, slots: Tensor) -> DraftInput:
    """The same draft input after dispatch: its rows are to be found at ``slots`` (n,) int64."""
    return DraftInput(
        draft.tokens,
        draft.lengths,
        draft.topk_p,
        draft.topk_index,
        draft.hidden_states,
        slots,
        draft.mirrors,
    )


@lru_cache
def _unused(n: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The three fields DFlash does not use: n rows, no columns; shared, as they hold nothing."""
    return (
        torch.empty((n, 0), dtype=torch.float32, device=device),
        torch.empty((n, 0), dtype=torch.int64, device=device),
        torch.empty((n, 0), dtype=torch.float16, device=device),
    )


def idle(token_dtype: torch.dtype, device: torch.device) -> DraftInput:
    """I1: a draft input of zero requests, with the layout of a live one."""
    return live(
        torch.empty((0,), dtype=token_dtype, device=device),
        torch.empty((0,), dtype=torch.int64, device=device),
    )


def filter_rows(draft: DraftInput, keep: Tensor) -> DraftInput:
    """F1-F4: row j of the result is row ``keep[j]``.

    Relayed rows are addressed by ``future_indices`` alone; what the five stored tensors hold then
    is dead, and stays as it is.

    Args:
        keep: (m,) int64 row indices on the draft input's device, from 0 to n - 1, m >= 1; they
            may permute, which retraction does.

    Errors:
        IndexError: an index is out of range.
    """
    mirrors = {name: values[keep.cpu()] for name, values in draft.mirrors.items()}
    if draft.future_indices is not None:
        return replace(draft, future_indices=draft.future_indices[keep], mirrors=mirrors)
    rows = {name: getattr(draft, name)[keep] for name in STORED}
    return replace(draft, **rows, mirrors=mirrors)


def merge(left: DraftInput, right: DraftInput) -> DraftInput:
    """M1-M5, I2: the rows of ``left``, then the rows of ``right``; either may have none.

    In the relayed form the dead stored tensors are the left side's.

    Errors:
        MixedForms: one side is relayed and the other stored (M7).
        OneSidedMirror: a mirror is on one side only (M4).
    """
    if (left.future_indices is None) != (right.future_indices is None):
        raise MixedForms("one side's rows live in the relay, the other's in the draft input")
    if left.mirrors.keys() != right.mirrors.keys():
        raise OneSidedMirror(", ".join(sorted(left.mirrors.keys() ^ right.mirrors.keys())))
    mirrors = {
        name: torch.cat([values, right.mirrors[name]]) for name, values in left.mirrors.items()
    }
    if left.future_indices is not None and right.future_indices is not None:
        indices = torch.cat([left.future_indices, right.future_indices])
        return replace(left, future_indices=indices, mirrors=mirrors)
    rows = {name: torch.cat([getattr(left, name), getattr(right, name)]) for name in STORED}
    return replace(left, **rows, mirrors=mirrors)
