"""Expectations, and aspects that several of them share."""

from __future__ import annotations

from typing import Any

import torch

from conformance.observation import Observation
from reference.draft_input import STORED, DraftInput


def expect(call: str, **aspects: Any) -> Observation:
    """What `call` must make visible; an aspect that is not named is not checked."""
    return Observation(call, aspects)


_ORDER = ("topk_p", "topk_index", "tokens", "lengths", "hidden_states")
assert set(_ORDER) == set(STORED)


def widths(draft: DraftInput) -> list[tuple[int, tuple[int, ...], torch.dtype]]:
    """Place, shape and dtype of the five stored tensors, in the order of the tree's fields."""
    tensors = [getattr(draft, name) for name in _ORDER]
    return [(i, tuple(tensor.shape), tensor.dtype) for i, tensor in enumerate(tensors)]


def rows_of(draft: DraftInput) -> dict[str, Any]:
    """The rows of a draft input in the form it has."""
    if draft.future_indices is not None:
        return {"future": draft.future_indices}
    return {
        "future": None,
        "tokens": draft.tokens,
        "lengths": draft.lengths,
        "widths": widths(draft),
    }
