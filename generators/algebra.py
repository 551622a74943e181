"""Every law of the draft input for up to a number of rows: the algebra, exhaustively.

A filter is a selection of rows in some order, a merge is a cut. With few rows all of them can be
written down, so each identity is tried in every instance: keeping all rows and merging with nothing
is the identity, merging is associative, filtering composes, distributes over merging, commutes with
permutations, and all of it commutes with looking rows up in the relay.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from generators.operations import Admit, Adopt, Header, Law, Trace
from generators.values import STRIDE

_PER_TRACE = 100
"""Laws of one trace; each takes copies, so they do not depend on one another."""


def instances(header: Header, most: int) -> Iterator[Trace]:
    """Traces that carry out every instance of every law for 1 to `most` rows."""
    for rows in range(1, most + 1):
        admit = Admit(tuple((i, i + 1, i * STRIDE + 1 + i) for i in range(rows)))
        laws = _laws(rows, header.overlap)
        while batch := tuple(itertools.islice(laws, _PER_TRACE)):
            yield Trace(header, (admit, Adopt(), *batch))


def _selections(rows: int, least: int, most: int) -> list[tuple[int, ...]]:
    """Every choice of `least` to `most` of the rows, in every order."""
    sizes = range(least, most + 1)
    return [chosen for size in sizes for chosen in itertools.permutations(range(rows), size)]


def _laws(rows: int, overlap: bool) -> Iterator[Law]:
    for form, mirrors in itertools.product(("relayed", "stored"), (False, True)):
        for law in ("keep-all", "neutral"):
            yield Law(law, form, mirrors)
        for keep in _selections(rows, 1, rows - 1):
            yield Law("filter", form, mirrors, keep)
            for then in _selections(len(keep), 1, len(keep) - 1):
                yield Law("compose", form, mirrors, keep, then)
        for keep in _selections(rows, rows, rows):
            yield Law("permute", form, mirrors, keep)
        for cut in range(rows + 1):
            yield Law("merge", form, mirrors, cut=cut)
            yield Law("associate", form, mirrors, cut=cut)
        for cut in range(1, rows):
            for left in _selections(cut, 1, cut):
                for right in _selections(rows - cut, 1, rows - cut):
                    keep = (*left, *(cut + i for i in right))
                    yield Law("distribute", form, mirrors, keep, cut=cut)
    yield Law("idle")
    yield Law("resolve-nothing")
    if overlap:
        for cut, keep in itertools.product(range(rows + 1), _selections(rows, 1, rows)):
            yield Law("lookup", keep=keep, cut=cut)
