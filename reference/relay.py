"""What the relay must do: publish, stash, resolve.

The relay hands values that one step produces to the next step, which the CPU has prepared before
they exist. It has one row per request slot and two channels: the *length* of the request in the KV
cache (published in the middle of a forward) and its *bonus token* (stashed at its end). Whoever
runs next resolves its own rows back, by slot. Slot 0 is padding and belongs to nobody.

In SGLang: ``FutureMap`` and ``resolve_forward_inputs`` of ``managers/overlap_utils.py``.

Clauses of :mod:`reference.clauses`: a write changes the addressed rows and nothing else (P1, P2),
the last one wins (P3), exactly (P4), as a copy (P5); no rows change nothing (I3, I4). A resolve
returns the rows of the slots it is given, in their order (R1, R2), as copies of the channel's type
(R3, R4), so a slot's former occupant shows only if its successor never wrote (R8). Without debug a
resolve leaves the relay as it is; with debug it poisons the rows it consumed (R5) and refuses rows
that hold no fresh value (R6).

Slots are always (n,) int64, distinct, from 1 to pool - 1. Lengths are int64 and count tokens; token
ids and lengths are never negative.
"""

from __future__ import annotations

import torch
from torch import Tensor

POISON = -1
"""What a consumed row holds under debug until it is written again; no token, no length."""


def without_padding(channel: Tensor) -> Tensor:
    """A copy of a channel (pool,) with its padding row, which nobody may read, set to 0."""
    return torch.cat([torch.zeros_like(channel[:1]), channel[1:]])


class NothingFresh(RuntimeError):
    """Under debug: a row was resolved that was never written, or not since it was last resolved."""


class Relay:
    """The two channels, one row per slot.

    Every change makes a new tensor, so that the tensor before it still shows what was there.

    Args:
        tokens: (pool,) int32 or int64, what the token channel holds before the first stash; its
            dtype is the channel's.
        lengths: (pool,) int64, likewise for the length channel.
        poison_tokens, poison_lengths: whether a resolve consumes its rows (debug).
    """

    def __init__(
        self,
        tokens: Tensor,
        lengths: Tensor,
        *,
        poison_tokens: bool = False,
        poison_lengths: bool = False,
    ) -> None:
        self.tokens = tokens.clone()
        self.lengths = lengths.clone()
        self.poison_tokens = poison_tokens
        self.poison_lengths = poison_lengths

    def publish(self, slots: Tensor, lengths: Tensor) -> None:
        """P1, P2, P3, P5: copy ``lengths`` (n,) to the rows ``slots`` and touch nothing else."""
        self.lengths = self.lengths.index_put((slots,), lengths)

    def stash(self, slots: Tensor, tokens: Tensor) -> None:
        """P1-P5: copy ``tokens`` (n,) to the rows ``slots``, every value exactly.

        Errors:
            RuntimeError: the tokens' dtype is not the channel's; nothing is narrowed silently.
        """
        self.tokens = self.tokens.index_put((slots,), tokens)

    def resolve_lengths(self, slots: Tensor) -> Tensor:
        """R2-R6: (n,) int64 lengths of the rows ``slots``, a copy; consumes them under debug.

        Errors:
            NothingFresh: under debug, a row holds nothing that may be consumed.
        """
        values = self._read(self.lengths, slots, self.poison_lengths)
        if self.poison_lengths:
            self.lengths = self._poisoned(self.lengths, slots)
        return values

    def peek_lengths(self, slots: Tensor) -> Tensor:
        """R10: (n,) int64 lengths of the rows ``slots``, a copy; consumes nothing.

        What a mixed batch does for its decode tails, whose rows its own forward publishes again.

        Errors:
            NothingFresh: under debug, a row holds nothing that may be read.
        """
        return self._read(self.lengths, slots, self.poison_lengths)

    def resolve_tokens(self, slots: Tensor) -> Tensor:
        """R1, R3-R6: (n,) bonus tokens of the rows ``slots``, a copy; consumes them under debug.

        Errors:
            NothingFresh: under debug, a row holds nothing that may be consumed.
        """
        values = self._read(self.tokens, slots, self.poison_tokens)
        if self.poison_tokens:
            self.tokens = self._poisoned(self.tokens, slots)
        return values

    @staticmethod
    def _read(channel: Tensor, slots: Tensor, poison: bool) -> Tensor:
        values = channel[slots]
        if poison and bool((values < 0).any()):
            raise NothingFresh(f"rows {slots[values < 0].tolist()}")
        return values

    @staticmethod
    def _poisoned(channel: Tensor, slots: Tensor) -> Tensor:
        poison = torch.full_like(channel[slots], POISON)
        return channel.index_put((slots,), poison)
