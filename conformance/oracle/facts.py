"""What the model must know of a tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Facts:
    """What the oracle must know of a tree.

    Attributes:
        device: where device values live.
        token_dtype: the token channel's dtype.
        channels: which of the relay's buffers were recognised, ``tokens`` and ``lengths``.
        poison_tokens, poison_lengths: whether resolving consumes rows.
        host_lengths_lag: host lengths are the committed ones, with planning bounds beside them.
        direct_carry: a batch whose shape did not change skips the relay.
        mirrors: host mirrors of the draft input, with the name of their sum or None.
        kv_slots_apart: slot r's KV slot for position p is r * kv_slots_apart + p.
        host_index_filter: whether a filter takes host indices beside device indices.
        top_k: how many candidates a request samples from, by its number.
    """

    device: torch.device
    token_dtype: torch.dtype
    channels: tuple[str, ...]
    poison_tokens: bool
    poison_lengths: bool
    host_lengths_lag: bool
    direct_carry: bool
    mirrors: tuple[tuple[str, str | None], ...]
    host_index_filter: bool
    kv_slots_apart: int
    top_k: Callable[[int], int]
