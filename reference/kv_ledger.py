"""Whose every slot of the KV cache is.

A request's row of ``req_to_token`` names the KV slot of each of its positions, up to its allocated
length (:mod:`reference.kv_lengths`). Slots come in pages of ``page`` tokens; page 0 is padding.

Which free page a request is given is the allocator's choice. So :class:`Ledger` does not predict a
table: it says whether what is seen can follow from what was seen before, by clauses K1 to K5.

Source: DESIGN section 5, "KV lengths"; upstream's own invariants of an idle server, sgl-project
sglang, scheduler_components/invariant_checker.py (0.5.23).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class View:
    """A KV cache as it is seen.

    Attributes:
        table: (rows, width) int64 on the host; the KV slot of every position of every row, and
            below the rows of the cache one that is nobody's and catches what runs over.
        free: ids of the free pages, as often as they are listed.
        free_rows: rows that no request holds, as often as they are listed.
        committed, allocated: lengths by row, of requests that hold one.
    """

    table: Tensor
    free: Sequence[int]
    free_rows: Sequence[int]
    committed: Mapping[int, int]
    allocated: Mapping[int, int]


@dataclass(frozen=True)
class Violation:
    """What cannot follow.

    Attributes:
        clause, anomaly: its name.
        aspect: of what.
        expected, observed: for people.
        rows: (row, expected, observed) of what differs.
    """

    clause: str
    anomaly: str
    aspect: str
    expected: str
    observed: str
    rows: tuple[tuple[int, str, str], ...] = ()


@dataclass(frozen=True)
class Growth:
    """A row that is given slots: from position `start` to at least `least`, or `exact`ly so far."""

    row: int
    start: int
    least: int
    exact: bool = False


def unaligned(seen: View, grown: Sequence[Growth], page: int) -> Violation | None:
    """K4 of what is reserved ahead: it is whole pages, where it grew."""
    for growth in grown:
        stop = seen.allocated[growth.row]
        if stop > growth.start and stop % page:
            whole = f"a multiple of {page}"
            return _of("K4", "wrong-value", "reserved", growth.row, whole, stop)
    return None


@dataclass
class Ledger:
    """Whose every slot is, from one view to the next.

    Attributes:
        width: positions of a row.
        page: tokens of a page.
        pages: pages of the pool, padding aside; their ids are 1 to `pages`.
        table: (rows, width), as it was seen last.
        held: allocated length of every row that a request holds.
        lost: whether something was seen that cannot follow, so that nothing can be said any more.
    """

    width: int
    page: int
    pages: int
    table: Tensor
    held: dict[int, int] = field(default_factory=dict)
    lost: bool = False

    def follow(
        self, seen: View, grown: Sequence[Growth] = (), left: Sequence[int] = ()
    ) -> Violation | None:
        """Whether `seen` may follow when `grown` rows grew and `left` rows were given back.

        On a violation the ledger stays as it was and is lost; otherwise it moves on.
        """
        if self.lost:
            return None
        violation = (
            self._lengths(seen, grown)
            or self._table(seen, grown)
            or self._layout(seen, grown)
            or self._owners(seen, grown, left)
        )
        self.lost = violation is not None
        if violation is None:
            self.table = seen.table
            for row in left:
                del self.held[row]
            for growth in grown:
                self.held[growth.row] = seen.allocated[growth.row]
        return violation

    def _lengths(self, seen: View, grown: Sequence[Growth]) -> Violation | None:
        """K1, K2: what was allocated is enough, and within the row."""
        for growth in grown:
            row, stop = growth.row, seen.allocated[growth.row]
            committed = seen.committed[row]
            if stop < max(growth.least, committed):
                return _of("K1", "wrong-value", "allocated", row, f">= {growth.least}", stop)
            if growth.exact and stop != growth.least:
                return _of("K1", "wrong-value", "allocated", row, str(growth.least), stop)
            if growth.exact and committed != growth.least:
                return _of("K1", "wrong-value", "committed", row, str(growth.least), committed)
            if stop > self.width:
                return _of("K2", "overrun", "reserved", row, f"<= {self.width}", stop)
        for row, length in seen.allocated.items():
            known = self.held.get(row, length)
            if length != known and all(row != growth.row for growth in grown):
                return _of("K1", "wrong-value", "allocated", row, str(known), length)
        return None

    def _table(self, seen: View, grown: Sequence[Growth]) -> Violation | None:
        """K3: nothing but the new part of the grown rows changed."""
        changed = seen.table != self.table
        for growth in grown:
            changed[growth.row, growth.start : seen.allocated[growth.row]] = False
        if not changed.any():
            return None
        row, position = (int(i) for i in changed.nonzero()[0])
        before, after = int(self.table[row, position]), int(seen.table[row, position])
        where = f"position {position}: slot"
        text = (row, f"{where} {before}", f"{where} {after}")
        return Violation("K3", "phantom-row", "table", text[1], text[2], (text,))

    def _layout(self, seen: View, grown: Sequence[Growth]) -> Violation | None:
        """K4: the slots of a page follow each other from its start."""
        for growth in grown:
            row, stop = growth.row, seen.allocated[growth.row]
            slots = seen.table[row, :stop]
            place = torch.arange(stop)
            first = slots[place // self.page * self.page]
            wrong = (first % self.page != 0) | (slots != first + place % self.page)
            if wrong[growth.start :].any():
                position = growth.start + int(wrong[growth.start :].nonzero()[0])
                want = int(first[position]) // self.page * self.page + position % self.page
                where = f"position {position}: slot"
                text = (row, f"{where} {want}", f"{where} {int(slots[position])}")
                return Violation("K4", "torn-page", "table", text[1], text[2], (text,))
        return None

    def _owners(self, seen: View, grown: Sequence[Growth], left: Sequence[int]) -> Violation | None:
        """K5: every page is free once or held by one request; so is every row."""
        held = {row: length for row, length in self.held.items() if row not in left}
        held |= {growth.row: seen.allocated[growth.row] for growth in grown}
        owners: dict[int, int] = {0: -1}
        for row, length in held.items():
            for owned in (seen.table[row, : length : self.page] // self.page).tolist():
                if owned in owners:
                    whose = "padding" if not owned else f"row {owners[owned]}"
                    return Violation(
                        *("K5", "wrong-owner", "pages", f"page {owned} is {whose}'s"),
                        f"page {owned} is also row {row}'s",
                        ((row, "a page of its own", f"page {owned}"),),
                    )
                owners[owned] = row
        free = Counter(seen.free)
        twice = sorted(p for p, n in free.items() if n > 1 or p in owners)
        if twice:
            owner = owners.get(twice[0])
            whose = "padding's" if owner == -1 else f"row {owner}'s"
            state = "free twice" if owner is None else f"free and {whose}"
            return Violation("K5", "double-free", "pages", "free or held", f"{twice} {state}")
        lost = sorted(set(range(1, self.pages + 1)) - owners.keys() - free.keys())
        if lost:
            holders = {
                int(slot) // self.page: row
                for row, length in self.held.items()
                for slot in self.table[row, : length : self.page]
            }
            rows = sorted({holders[p] for p in lost if p in holders})
            of = f", last of row {', '.join(map(str, rows))}" if rows else ""
            return Violation("K5", "leaked-slot", "pages", "free or held", f"{lost} neither{of}")
        strange = sorted(p for p in free if not 1 <= p <= self.pages)
        if strange:
            return Violation("K5", "phantom-row", "pages", f"1 to {self.pages}", f"{strange} free")
        listed = Counter(seen.free_rows)
        wanted = Counter(r for r in range(1, len(seen.table) - 1) if r not in held)
        if listed != wanted:
            more = sorted((listed - wanted).elements())
            fewer = sorted((wanted - listed).elements())
            anomaly = "double-free" if more else "leaked-slot"
            return Violation(
                *("K5", anomaly, "rows", f"free rows {sorted(wanted)}"),
                f"free rows {sorted(listed.elements())}",
                tuple((row, "held", "free") for row in more)
                + tuple((row, "free", "held by nobody") for row in fewer),
            )
        return None


def _of(clause: str, anomaly: str, aspect: str, row: int, want: str, got: int) -> Violation:
    return Violation(clause, anomaly, aspect, want, str(got), ((row, want, str(got)),))
