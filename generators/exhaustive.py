"""What a run tries exhaustively, in parts that workers share: small scopes, and the algebra."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from generators import algebra
from generators.operations import Header, Trace
from generators.protocol import Capabilities
from generators.small_scope import Scope, explore, tours


@dataclass(frozen=True)
class Part:
    """One share of something exhaustive.

    Attributes:
        rows: of the algebra: every law for up to this many; 0 for a small scope.
        slots, requests, arrivals: of the small scope.
        overlap, seeded, needs_cpu_seq_lens: settings of its traces.
        share, shares: every trace whose number modulo `shares` is `share`.
    """

    rows: int = 0
    slots: int = 0
    requests: int = 0
    arrivals: int = 0
    overlap: bool = True
    seeded: bool = False
    needs_cpu_seq_lens: bool = True
    share: int = 0
    shares: int = 1

    @property
    def setting(self) -> str:
        """The loop it is about, in words."""
        if self.seeded:
            return "decode server" if self.overlap else "decode server, no overlap"
        return "overlap" if self.overlap else "no overlap"


def traces(
    part: Part, capabilities: Capabilities, *, debug: bool, compiled: bool
) -> tuple[Iterator[Trace], dict[str, Any]]:
    """The part's traces, and what all parts together are, in numbers.

    A decode server's loop has no traces on a tree that it does not exist on.
    """
    header = Header(
        pool=max(part.rows, part.slots) + 1,
        block=3,
        overlap=part.overlap,
        seeded=part.seeded,
        needs_cpu_seq_lens=part.needs_cpu_seq_lens,
        debug=debug,
        compiled=compiled,
        token_bits=capabilities.token_bits,
    )
    if part.rows:
        found = algebra.instances(header, part.rows)
        size: dict[str, Any] = {"what": "algebra", "setting": part.setting, "rows": part.rows}
    elif part.seeded and not capabilities.seed:
        return iter(()), {}
    else:
        graph = explore(header, Scope(part.slots, part.requests, part.arrivals), capabilities)
        found = tours(graph)
        size = {
            "what": "small scope",
            "setting": part.setting,
            "slots": part.slots,
            "requests": part.requests,
            "arrivals": part.arrivals,
            "states": len(graph.follow),
            "operations": graph.edges,
            "pairs": graph.pairs,
        }
    return itertools.islice(found, part.share, None, part.shares), size
