"""The KV cache on the reference model: how it may change with each operation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from generators.operations import Header
from generators.protocol import Effect, Request
from reference.kv_ledger import Growth, Ledger, View, Violation, unaligned
from reference.kv_lengths import BLOCKS_AHEAD

Follow = Callable[[View], Violation | None]


class KvCache:
    """Whose every slot is, and what the next call may do about it.

    Args:
        header: the trace's setting.
        width: positions of a row, as the tree sizes them.
    """

    def __init__(self, header: Header, width: int) -> None:
        self.header = header
        table = torch.zeros((header.pool + 1, width), dtype=torch.int64)
        self.ledger = Ledger(width, header.page, header.kv_tokens // header.page, table)
        self._left: list[int] = []

    def unchanged(self) -> dict[str, Follow]:
        """Nothing changes but what requests give back that have ended."""
        left, self._left = self._left, []
        return {"kv": partial(self.ledger.follow, left=left)}

    def extended(self, requests: list[Request], lengths: list[int]) -> dict[str, Any]:
        """Prompts of these lengths are prefilled: exactly they are allocated."""
        grown = [
            Growth(r.slot, self.start(r), length, exact=True)
            for r, length in zip(requests, lengths, strict=True)
        ]
        ranges = [(growth.row, growth.start, growth.least) for growth in grown]
        return {"kv": partial(self.ledger.follow, grown=grown), "ranges": ranges}

    def start(self, request: Request) -> int:
        """Where the request's next prefill starts."""
        return self.ledger.held.get(request.slot, 0)

    def prepared(self, requests: list[Request], effect: Effect) -> dict[str, Any]:
        """A decode of these requests is prepared."""
        ahead = BLOCKS_AHEAD * self.header.block
        grown = [
            Growth(r.slot, self.start(r), committed + ahead)
            for r, committed in zip(requests, effect.committed, strict=True)
        ]
        return {
            "fits": True,
            "kv": partial(self.ledger.follow, grown=grown),
            "pages": partial(unaligned, grown=grown, page=self.header.page),
            "true": effect.before,
            "rows": [r.slot for r in requests],
        }

    def left(self, rows: list[int]) -> None:
        """Requests in these rows give back what they hold."""
        self._left += rows

    def slots(self, row: int, positions: range) -> list[int]:
        """The KV slots of a row's positions."""
        return self.ledger.table[row, positions.start : positions.stop].tolist()
