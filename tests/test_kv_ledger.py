"""The reference ledger by itself: what may follow, and what each clause says cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from reference.kv_ledger import Growth, Ledger, View, Violation, unaligned
from reference.kv_lengths import pages, reserve

ROWS = 3  # rows that requests may have; row 0 is padding, and one below them is nobody's
PAGES = 64
WIDTH = 64
BLOCK = 4


@dataclass
class Cache:
    """A small KV cache that does all as it should."""

    page: int
    free: list[int] = field(default_factory=lambda: list(range(1, PAGES + 1)))
    free_rows: list[int] = field(default_factory=lambda: list(range(1, ROWS + 1)))
    committed: dict[int, int] = field(default_factory=dict)
    allocated: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.table = torch.zeros((ROWS + 2, WIDTH), dtype=torch.int64)

    def ledger(self) -> Ledger:
        """A ledger that has seen the cache as it is when nobody holds anything."""
        return Ledger(WIDTH, self.page, PAGES, self.table.clone())

    def view(self) -> View:
        return View(
            self.table.clone(),
            list(self.free),
            list(self.free_rows),
            dict(self.committed),
            dict(self.allocated),
        )

    def grow(self, row: int, length: int) -> Growth:
        """Slots of a row up to `length`: what is left of its last page, then free pages."""
        start = self.allocated.get(row, 0)
        if row in self.free_rows:
            self.free_rows.remove(row)
        for position in range(start, length):
            if position % self.page:
                self.table[row, position] = self.table[row, position - 1] + 1
            else:
                self.table[row, position] = self.free.pop(0) * self.page
        self.allocated[row] = max(start, length)
        return Growth(row, start, length)

    def prefill(self, row: int, length: int) -> Growth:
        self.committed[row] = length
        return self.grow(row, length)

    def decode(self, row: int, accepted: int = 0) -> Growth:
        self.committed[row] += accepted + 1
        start, committed = self.allocated[row], self.committed[row]
        growth = self.grow(row, reserve(committed, start, BLOCK, self.page))
        return replace(growth, least=committed + 2 * BLOCK)

    def release(self, row: int) -> None:
        """A request gives back all that it holds; its row of the table stays as it is."""
        slots = self.table[row, : self.allocated.pop(row) : self.page]
        self.free += (slots // self.page).tolist()
        self.free_rows.append(row)
        del self.committed[row]


@pytest.mark.parametrize("page", [1, 4, 16])
def test_a_healthy_life_is_accepted(page: int) -> None:
    cache = Cache(page)
    ledger = cache.ledger()
    prefill = [cache.prefill(1, 17), cache.prefill(3, 1)]
    assert ledger.follow(cache.view(), prefill) is None
    assert ledger.held == {1: 17, 3: 1}
    for accepted in (0, 3, 2):
        decode = [cache.decode(1, accepted), cache.decode(3)]
        assert ledger.follow(cache.view(), decode) is None
        assert unaligned(cache.view(), decode, page) is None
        assert ledger.held == cache.allocated
    assert ledger.follow(cache.view()) is None
    cache.release(1)
    assert ledger.follow(cache.view(), left=[1]) is None
    assert ledger.held == cache.allocated
    again = [cache.prefill(1, 16), cache.prefill(2, 5)]
    assert ledger.follow(cache.view(), again) is None
    for row in (1, 2, 3):
        cache.release(row)
    assert ledger.follow(cache.view(), left=[1, 2, 3]) is None
    assert not ledger.held
    assert not ledger.lost


@pytest.mark.parametrize("page", [1, 4, 16])
def test_a_prompt_may_come_in_pieces_and_a_row_may_leave_and_grow_at_once(page: int) -> None:
    cache = Cache(page)
    ledger = cache.ledger()
    for length in (3, 18, 19, 33):
        piece = cache.prefill(2, length)
        assert ledger.follow(cache.view(), [piece]) is None
    assert ledger.held == {2: 33}
    prompt = cache.prefill(1, 7)
    assert ledger.follow(cache.view(), [prompt]) is None
    cache.release(2)
    decode = cache.decode(1)
    assert ledger.follow(cache.view(), [decode], left=[2]) is None
    assert ledger.held == cache.allocated


# -- what cannot follow ---------------------------------------------------------------------------


PAGE = 4


@dataclass
class Next:
    """Two requests have run; one is given slots for a decode and the other one ends or goes on.

    Row 1 holds pages 1, 2 (its prompt has 5 tokens) and is given pages 5 and 6; row 2 holds pages 3
    and 4 (8 tokens). Pages from 7 on are free, and so is row 3.
    """

    ledger: Ledger
    seen: View
    grown: list[Growth]
    left: list[int]

    def follow(self) -> Violation | None:
        return self.ledger.follow(self.seen, self.grown, self.left)


def coming(*, ends: bool = False) -> Next:
    cache = Cache(PAGE)
    ledger = cache.ledger()
    prompts = [cache.prefill(1, 5), cache.prefill(2, 8)]
    assert ledger.follow(cache.view(), prompts) is None
    grown = [cache.decode(1)]
    if ends:
        cache.release(2)
    return Next(ledger, cache.view(), grown, [2] if ends else [])


Change = Callable[[View], View]


def slot(row: int, position: int, *values: int) -> Change:
    """Other slots in the table."""

    def change(view: View) -> View:
        table: Tensor = view.table.clone()
        table[row, position : position + len(values)] = torch.tensor(values)
        return replace(view, table=table)

    return change


def allocated(row: int, length: int) -> Change:
    return lambda view: replace(view, allocated={**view.allocated, row: length})


def committed(row: int, length: int) -> Change:
    return lambda view: replace(view, committed={**view.committed, row: length})


def more_free(*ids: int) -> Change:
    return lambda view: replace(view, free=[*view.free, *ids])


def fewer_free(*ids: int) -> Change:
    return lambda view: replace(view, free=[page for page in view.free if page not in ids])


def more_rows(*rows: int) -> Change:
    return lambda view: replace(view, free_rows=[*view.free_rows, *rows])


def fewer_rows(*rows: int) -> Change:
    return lambda view: replace(view, free_rows=[r for r in view.free_rows if r not in rows])


VIOLATIONS: dict[str, tuple[Change, tuple[str, str, str], str]] = {
    "reserved too little": (allocated(1, 13), ("K1", "wrong-value", "allocated"), ">= 14|13"),
    "committed beyond what is allocated": (
        committed(1, 17),
        ("K1", "wrong-value", "allocated"),
        ">= 14|16",
    ),
    "grew unasked": (allocated(2, 9), ("K1", "wrong-value", "allocated"), "8|9"),
    "shrank unasked": (allocated(2, 7), ("K1", "wrong-value", "allocated"), "8|7"),
    "beyond the row": (allocated(1, WIDTH + 1), ("K2", "overrun", "reserved"), "<= 64|65"),
    "another row": (
        slot(2, 3, 0),
        ("K3", "phantom-row", "table"),
        "position 3: slot 15|position 3: slot 0",
    ),
    "a row that nobody holds": (
        slot(3, 0, 7),
        ("K3", "phantom-row", "table"),
        "position 0: slot 0|position 0: slot 7",
    ),
    "the padding row": (
        slot(0, 0, 7),
        ("K3", "phantom-row", "table"),
        "position 0: slot 0|position 0: slot 7",
    ),
    "below the table": (
        slot(ROWS + 1, 0, 7),
        ("K3", "phantom-row", "table"),
        "position 0: slot 0|position 0: slot 7",
    ),
    "before what is new": (
        slot(1, 4, 9),
        ("K3", "phantom-row", "table"),
        "position 4: slot 8|position 4: slot 9",
    ),
    "behind what is new": (
        slot(1, 16, 28),
        ("K3", "phantom-row", "table"),
        "position 16: slot 0|position 16: slot 28",
    ),
    "a page that starts within one": (
        slot(1, 8, 21, 22, 23, 24),
        ("K4", "torn-page", "table"),
        "position 8: slot 20|position 8: slot 21",
    ),
    "a page out of order": (
        slot(1, 9, 22, 21),
        ("K4", "torn-page", "table"),
        "position 9: slot 21|position 9: slot 22",
    ),
    "a page not gone on with": (
        slot(1, 5, 20),
        ("K4", "torn-page", "table"),
        "position 5: slot 9|position 5: slot 20",
    ),
    "a page of another row": (
        slot(1, 8, 12, 13, 14, 15),
        ("K5", "wrong-owner", "pages"),
        "page 3 is row 1's|page 3 is also row 2's",
    ),
    "a page of its own twice": (
        slot(1, 12, 20, 21, 22, 23),
        ("K5", "wrong-owner", "pages"),
        "page 5 is row 1's|page 5 is also row 1's",
    ),
    "the padding page": (
        slot(1, 8, 0, 1, 2, 3),
        ("K5", "wrong-owner", "pages"),
        "page 0 is padding's|page 0 is also row 1's",
    ),
    "a page free twice": (
        more_free(9),
        ("K5", "double-free", "pages"),
        "free or held|[9] free twice",
    ),
    "a page free and held": (
        more_free(5),
        ("K5", "double-free", "pages"),
        "free or held|[5] free and row 1's",
    ),
    "pages neither free nor held": (
        fewer_free(9, 11),
        ("K5", "leaked-slot", "pages"),
        "free or held|[9, 11] neither",
    ),
    "a page that does not exist": (
        more_free(PAGES + 1),
        ("K5", "phantom-row", "pages"),
        "1 to 64|[65] free",
    ),
    "a row free twice": (
        more_rows(3),
        ("K5", "double-free", "rows"),
        "free rows [3]|free rows [3, 3]",
    ),
    "a row free and held": (
        more_rows(2),
        ("K5", "double-free", "rows"),
        "free rows [3]|free rows [2, 3]",
    ),
    "a row neither free nor held": (
        fewer_rows(3),
        ("K5", "leaked-slot", "rows"),
        "free rows [3]|free rows []",
    ),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_one_thing_that_cannot_follow_is_named(name: str) -> None:
    change, named, texts = VIOLATIONS[name]
    after = coming()
    after.seen = change(after.seen)
    violation = after.follow()
    assert violation is not None
    assert (violation.clause, violation.anomaly, violation.aspect) == named
    assert f"{violation.expected}|{violation.observed}" == texts


def test_without_the_change_it_may_follow() -> None:
    for after in (coming(), coming(ends=True)):
        assert after.follow() is None
        assert unaligned(after.seen, after.grown, PAGE) is None


LEFT: dict[str, tuple[Change, tuple[str, str, str]]] = {
    "its pages are not free": (fewer_free(3, 4), ("K5", "leaked-slot", "pages")),
    "one of its pages is not free": (fewer_free(4), ("K5", "leaked-slot", "pages")),
    "its pages are free twice": (more_free(3, 4), ("K5", "double-free", "pages")),
    "its row is not free": (fewer_rows(2), ("K5", "leaked-slot", "rows")),
    "its row is free twice": (more_rows(2), ("K5", "double-free", "rows")),
    "its row is cleared": (slot(2, 0, 0), ("K3", "phantom-row", "table")),
}


@pytest.mark.parametrize("name", LEFT)
def test_who_leaves_gives_back_everything_once_and_changes_no_table(name: str) -> None:
    change, named = LEFT[name]
    after = coming(ends=True)
    after.seen = change(after.seen)
    violation = after.follow()
    assert violation is not None
    assert (violation.clause, violation.anomaly, violation.aspect) == named


def test_who_does_not_leave_gives_nothing_back() -> None:
    after = coming(ends=True)
    after.left = []
    violation = after.follow()
    assert violation is not None
    assert (violation.clause, violation.anomaly) == ("K5", "double-free")
    assert violation.observed == "[3, 4] free and row 2's"


def test_who_may_not_grow_is_given_no_slots() -> None:
    after = coming()
    after.grown = []
    violation = after.follow()
    assert violation is not None
    assert (violation.clause, violation.anomaly) == ("K1", "wrong-value")
    assert violation.rows == ((1, "5", "16"),)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("reserved too little", ((1, ">= 14", "13"),)),
        ("another row", ((2, "position 3: slot 15", "position 3: slot 0"),)),
        ("a page not gone on with", ((1, "position 5: slot 9", "position 5: slot 20"),)),
        ("a page of another row", ((2, "a page of its own", "page 3"),)),
        ("a row free and held", ((2, "held", "free"),)),
        ("a row neither free nor held", ((3, "free", "held by nobody"),)),
    ],
)
def test_a_violation_says_which_rows_differ(
    name: str, rows: tuple[tuple[int, str, str], ...]
) -> None:
    after = coming()
    after.seen = VIOLATIONS[name][0](after.seen)
    violation = after.follow()
    assert violation is not None
    assert violation.rows == rows


@pytest.mark.parametrize("length", [14, 15, 17])
def test_what_is_reserved_ahead_is_whole_pages_where_it_grew(length: int) -> None:
    after = coming()
    seen = allocated(1, length)(after.seen)
    assert unaligned(after.seen, after.grown, PAGE) is None
    assert unaligned(seen, after.grown, 1) is None
    violation = unaligned(seen, after.grown, PAGE)
    assert violation is not None
    assert (violation.clause, violation.anomaly, violation.aspect) == (
        *("K4", "wrong-value"),
        "reserved",
    )
    assert (violation.expected, violation.observed) == ("a multiple of 4", str(length))
    still = [Growth(1, length, length)]
    assert unaligned(seen, still, PAGE) is None


@pytest.mark.parametrize("name", VIOLATIONS)
def test_after_a_violation_the_ledger_stays_as_it_was_and_says_nothing_more(name: str) -> None:
    after = coming()
    healthy = after.seen
    table, held = after.ledger.table.clone(), dict(after.ledger.held)
    after.seen = VIOLATIONS[name][0](healthy)
    assert after.follow() is not None
    assert after.ledger.lost
    assert after.follow() is None
    after.seen = replace(healthy, free=[], free_rows=[1, 1])
    assert after.follow() is None
    assert after.ledger.lost
    assert after.ledger.held == held
    assert torch.equal(after.ledger.table, table)


# -- lengths --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "page", "number"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2), (7, 1, 7)]
)
def test_tokens_are_held_in_whole_pages(tokens: int, page: int, number: int) -> None:
    assert pages(tokens, page) == number


@pytest.mark.parametrize(
    ("known", "held", "block", "page", "length"),
    [
        (6, 5, 4, 1, 14),
        (6, 5, 4, 4, 16),
        (8, 8, 4, 16, 16),
        (9, 16, 4, 16, 32),
        (1, 1, 1, 64, 64),
        (6, 40, 4, 4, 40),  # never less than it has
        (6, 41, 4, 4, 41),  # which may end within a page
    ],
)
def test_a_decode_reserves_two_blocks_ahead_in_whole_pages(
    known: int, held: int, block: int, page: int, length: int
) -> None:
    assert reserve(known, held, block, page) == length
