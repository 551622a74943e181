"""What a run launches: one list, chosen so that the interpreter gets through it in seconds.

On a CPU every row of a launch is one program of Triton's interpreter, which takes from 2 ms
(prepare) to 60 ms (accept, block 128); :data:`LIMIT` bounds the whole list. On a GPU the same cases
have :data:`SCALE` times the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from generators.kernel_inputs import Case

LIMIT = 600
"""Programs of the whole list, in the interpreter."""

SCALE = 4096
"""Rows on a GPU for each row in the interpreter: its launches cost the same up to about 65,536."""


@dataclass(frozen=True)
class Program:
    """One case and how closely it is looked at.

    Attributes:
        case: what is launched.
        thorough: also twice alike, and with half of the rows alone.
    """

    case: Case
    thorough: bool = False


def _each(kernel: str, *rows: tuple[int, int, str], **common: Any) -> Iterator[Program]:
    """Cases from (batch, block, layout), each with a seed of its own."""
    for seed, (batch, block, layout) in enumerate(rows):
        case = Case(kernel, batch, block, layout=layout, seed=seed, **common)
        yield Program(case, thorough=seed == 0)


_CASES = (
    # Blocks of one column, powers of two and their neighbours, narrower and wider than the pool.
    *_each(
        "prepare",
        (9, 16, "plain"),
        (0, 4, "plain"),
        (1, 1, "plain"),
        (4, 1, "strided"),
        (9, 2, "offset"),
        (9, 3, "strided"),
        (3, 4, "offset"),
        (3, 5, "strided"),
        (3, 7, "plain"),
        (4, 8, "strided"),
        (2, 15, "offset"),
        (9, 16, "strided"),
        (2, 17, "plain"),
        (2, 31, "strided"),
        (2, 32, "offset"),
        (2, 33, "strided"),
        (2, 64, "strided"),
        (2, 65, "plain"),
        (2, 100, "strided"),
        (2, 127, "offset"),
        (2, 128, "strided"),
    ),
    Program(Case("prepare", 3, 8, pool=1, width=1, layout="strided", seed=3)),
    *_each(
        "accept",
        (6, 5, "plain"),
        (0, 4, "plain"),
        (2, 1, "offset"),
        (3, 2, "strided"),
        (6, 3, "offset"),
        (3, 4, "strided"),
        (3, 7, "plain"),
        (6, 8, "strided"),
        (3, 15, "offset"),
        (6, 16, "strided"),
        (2, 17, "plain"),
        (2, 32, "offset"),
        (2, 33, "plain"),
        (1, 64, "strided"),
        (1, 100, "offset"),
        (1, 128, "plain"),
    ),
    *_each(
        "correct",
        (6, 5, "plain"),
        (0, 4, "plain"),
        (2, 1, "offset"),
        (3, 3, "strided"),
        (6, 16, "strided"),
        (1, 128, "offset"),
    ),
    *_each(
        "fused",
        (6, 5, "plain"),
        (2, 1, "offset"),
        (3, 2, "plain"),
        (6, 3, "offset"),
        (2, 4, "plain"),
        (2, 7, "offset"),
        (6, 8, "plain"),
        (2, 9, "offset"),
        (6, 16, "offset"),
        (2, 17, "plain"),
        (2, 33, "offset"),
        (2, 64, "plain"),
        (2, 65, "offset"),
        (2, 100, "plain"),
        (2, 128, "offset"),
    ),
    # Rows of one column block of the kernel and of several, with and without hidden states.
    *_each(
        "gather",
        (5, 1500, "plain"),
        (0, 8, "plain"),
        (4, 1024, "strided"),
        (3, 1025, "offset"),
        (2, 2500, "strided"),
        width=4,
    ),
    Program(Case("gather", 4, 33, width=1, floats="bfloat16", layout="offset", seed=1)),
    Program(Case("gather", 4, 64, width=8, floats="float16", layout="strided", seed=2)),
    Program(Case("gather", 5, 1, width=3, floats="none", layout="strided", seed=3)),
    Program(Case("gather", 3, 1, width=1030, pool=3, floats="none", seed=4)),
    *_each(
        "selector",
        (6, 4, "plain"),
        (0, 3, "plain"),
        (5, 3, "strided"),
        (4, 1, "offset"),
        width=8,
    ),
    Program(Case("selector", 2, 15, width=16, layout="strided", seed=4)),
    Program(Case("selector", 3, 2, width=1, seed=5)),
    Program(Case("selector", 4, 3, width=2, layout="offset", seed=6)),
    Program(Case("selector", 4, 3, width=4, floats="bfloat16", seed=7)),
    *_each("selector", (4, 4, "plain"), (4, 3, "strided"), width=8, family="exact"),
    *_each("selector", (4, 3, "plain"), (3, 2, "strided"), width=4, family="nan"),
)


def listed(kernel: str, *, tokens: str, scale: int = 1) -> Iterator[Program]:
    """The list's programs of one kernel.

    Args:
        tokens: type of the tree's token channel, where the kernel has one.
        scale: rows for each row of the list.
    """
    for program in _CASES:
        if program.case.kernel == kernel:
            case = replace(program.case, tokens=tokens, batch=program.case.batch * scale)
            yield replace(program, case=case)
