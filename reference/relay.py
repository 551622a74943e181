"""What the relay must do: publish, stash, resolve.

The relay hands values that one step produces to the next step, which the CPU has prepared before
they exist. It has one row per request slot and two channels: the *length* of the request in the KV
cache (published in the middle of a forward) and its *bonus token* (stashed at its end). Whoever
runs next resolves its own rows back, by slot. Slot 0 is padding and belongs to nobody.

Clauses: P1-P5, R1-R6, R8, I3, I4 of :mod:`reference.clauses`.
"""

from __future__ import annotations

import torch
from torch import Tensor

POISON = -1
"""What a consumed row holds under debug until it is written again; no token, no length."""


class ConsumedTwice(RuntimeError):
    """Under debug: a row was resolved that was never written, or not since it was last resolved."""


class Relay:
    """The two channels, one row per slot.

    A write makes a new tensor, so that the tensor before it still shows what was there.

    Args:
        tokens: (pool,) int, what the token channel holds before the first stash.
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
        """P1, P2, P5: copy ``lengths`` (n,) to the rows ``slots`` (n,) and touch nothing else."""
        self.lengths = self.lengths.index_put((slots,), lengths.to(self.lengths.dtype))

    def stash(self, slots: Tensor, tokens: Tensor) -> None:
        """P1, P2, P4, P5: copy ``tokens`` (n,) to the rows ``slots`` (n,), every value exactly."""
        self.tokens = self.tokens.index_put((slots,), tokens.to(self.tokens.dtype))

    def resolve_lengths(self, slots: Tensor) -> Tensor:
        """R2-R6: (n,) int64 lengths of the rows ``slots``, a copy; consumes them under debug."""
        return self._resolve(self.lengths, slots, self.poison_lengths)

    def resolve_tokens(self, slots: Tensor) -> Tensor:
        """R1, R3-R6: (n,) bonus tokens of the rows ``slots``, a copy; consumes them under debug."""
        return self._resolve(self.tokens, slots, self.poison_tokens)

    @staticmethod
    def _resolve(channel: Tensor, slots: Tensor, poison: bool) -> Tensor:
        values = channel[slots]
        if poison:
            if bool((values < 0).any()):
                raise ConsumedTwice(f"rows {slots[values < 0].tolist()}")
            channel[slots] = torch.full_like(values, POISON)
        return values
