"""Judge what a tree's loop made of a schedule: outputs, accept lengths, and what is left behind.

:func:`judge` yields every :class:`~conformance.difference.Difference` in the order of time. What is
expected follows from each request alone (:mod:`reference.decoding`), whatever the scheduler did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

from conformance.difference import Difference, RowDifference
from conformance.sut.loop import Result, Row, Service
from generators.schedules import Arrival, Schedule
from reference.decoding import continuation, drafts_accepted

CALLS = ("loop-output", "loop-accept", "loop-house", "loop-overlap", "loop-company")
"""What is judged here, as clauses name it."""

_TAIL = 12
"""Tokens that are printed of an output."""


class Truth:
    """What must become of each request of a schedule, when it is decoded alone."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._by_number = {request.number: request for request in schedule.requests}
        self.ends = {r.number: schedule.output(r) for r in schedule.requests}
        self._goes_on: dict[int, list[int]] = {}

    def request(self, number: int) -> Arrival:
        """The request called `number`."""
        return self._by_number[number]

    def tokens(self, number: int) -> list[int]:
        """The output and, behind its end, what a block may still contain."""
        if number not in self._goes_on:
            prompt = self._schedule.prompt(self.request(number))
            length = len(self.ends[number]) + self._schedule.header.block
            output = continuation(self._schedule.header.model, prompt)
            self._goes_on[number] = list(islice(output, length))
        return self._goes_on[number]

    def commits(self, number: int, known: int) -> int:
        """Tokens that a step commits when `known` output tokens came before it."""
        header = self._schedule.header
        history = self._schedule.prompt(self.request(number)) + self.tokens(number)[:known]
        return drafts_accepted(header.model, history, header.block) + 1


def judge(schedule: Schedule, service: Service, counts: Counter[str]) -> Iterator[Difference]:
    """What differs, in the order of time.

    Args:
        counts: how often each call was judged; added to.
    """
    truth = Truth(schedule)
    astray: set[int] = set()
    known = dict.fromkeys(truth.ends, 0)
    for result in service.results:
        for row in result.rows:
            if row.number not in astray:
                found = list(_row(truth, result, row, known[row.number], counts))
                known[row.number] = row.before + len(row.tokens)
                # What follows a wrong output follows from it.
                astray |= {row.number for difference in found if difference.clause == "L1"}
                yield from found
    if service.error is not None:
        yield Difference(
            "L1", "unexpected-error", "loop-output", "loop", "the loop runs", service.error
        )
        return
    for number, output in sorted(service.outputs.items()):
        counts["loop-output"] += 1
        if number not in astray:
            yield from _output(truth, service, number, output)
    yield from _house(schedule, service, counts)


def _row(
    truth: Truth, result: Result, row: Row, known: int, counts: Counter[str]
) -> Iterator[Difference]:
    """One row of one result: the tokens that it brought, and how many a step committed.

    Args:
        known: output tokens that earlier results brought.
    """
    where = f"r{row.number} in launch {result.launch} ({result.kind})"
    if row.before != known:
        yield Difference(
            *("L1", "lost-update", "loop-output", f"output tokens before {where}"),
            expected=str(known),
            observed=str(row.before),
        )
        return
    if row.finished:
        if row.tokens:
            yield Difference(
                *("L1", "past-end", "loop-output", where),
                expected="nothing: it has ended",
                observed=str(list(row.tokens)),
            )
        return
    if not row.tokens:
        # A chunk brings none, nor a step of a request that was retracted meanwhile.
        if result.kind == "decode" and not row.retracted:
            yield Difference(
                *("L1", "cut-short", "loop-output", f"output tokens of {where}"),
                str(truth.tokens(row.number)[row.before : row.before + 1]),
                "none",
            )
        return
    counts["loop-output"] += 1
    end = row.before + len(row.tokens)
    expected = truth.tokens(row.number)[row.before : end]
    wrong = [
        RowDifference(row.before + i, f"r{row.number}", want, got)
        for i, (want, got) in enumerate(zip(expected, row.tokens, strict=False))
        if want != got
    ]
    if wrong or len(expected) < len(row.tokens):
        yield Difference(
            "L1",
            _whose(truth, row) if wrong else "past-end",
            "loop-output",
            f"output tokens of {where}",
            str(expected),
            str(list(row.tokens)),
            wrong,
        )
        return
    if row.commits is None:
        return
    counts["loop-accept"] += 1
    commits = truth.commits(row.number, row.before)
    counts[f"situation loop accepts {commits - 1}"] += 1
    if row.commits != commits:
        yield Difference(
            "L4",
            "lost-speed" if row.commits < commits else "wrong-value",
            "loop-accept",
            f"drafts accepted of {where}, after {row.before} output tokens",
            str(commits - 1),
            str(row.commits - 1),
        )
    elif len(row.tokens) < commits and end < len(truth.ends[row.number]):
        yield Difference(
            *("L1", "cut-short", "loop-output", f"output tokens of {where}"),
            str(truth.tokens(row.number)[row.before : row.before + commits]),
            str(list(row.tokens)),
        )


def _whose(truth: Truth, row: Row) -> str:
    """Name for wrong tokens: another request's, if a run of them is."""
    run = list(row.tokens)
    if len(run) > 1:
        for number in truth.ends:
            theirs = truth.tokens(number)
            places = range(len(theirs) - len(run) + 1)
            if any(theirs[place : place + len(run)] == run for place in places):
                return "wrong-owner" if number != row.number else "stale-read"
    return "wrong-value"


def _output(
    truth: Truth, service: Service, number: int, observed: list[int]
) -> Iterator[Difference]:
    """The output that a request ended with, and why it is said to have ended."""
    expected, request = truth.ends[number], truth.request(number)
    reason, matched = service.reasons[number], service.matched.get(number)
    if observed == expected and reason in _ENDS:
        stopped, limited = expected[-1] in request.stops, len(expected) == request.limit
        # A token that does both may be called either.
        named = (reason == "FINISH_MATCHED_TOKEN" and stopped and matched == expected[-1]) or (
            reason == "FINISH_LENGTH" and limited
        )
        if not named:
            yield Difference(
                *("L1", "wrong-value", "loop-output", f"reason for which r{number} ended"),
                f"stop token {expected[-1]}" if stopped else "its limit",
                f"{reason}{f' {matched}' if matched is not None else ''}",
            )
        return
    if observed[: len(expected)] == expected and len(observed) > len(expected):
        anomaly = "past-end"
    elif observed == expected[: len(observed)]:
        anomaly = "cut-short"
    else:
        anomaly = "wrong-value"
    yield Difference(
        *("L1", anomaly, "loop-output", f"output of r{number}"),
        f"{len(expected)} tokens, {_tail(expected)}",
        f"{len(observed)} tokens, {_tail(observed)}, ended by {reason or 'nothing'}",
    )


_ENDS = ("FINISH_LENGTH", "FINISH_MATCHED_TOKEN")
"""Reasons for which a request ends here."""


def _tail(tokens: Sequence[int]) -> str:
    return f"{'..., ' * (len(tokens) > _TAIL)}{', '.join(map(str, tokens[-_TAIL:]))}"


def _house(schedule: Schedule, service: Service, counts: Counter[str]) -> Iterator[Difference]:
    """K5: nobody is left, and all that was given out has come back, once."""
    house, header = service.house, schedule.header
    if house is None:
        return
    counts["loop-house"] += 1
    page = header.page
    for what, free, whole in (
        ("pages", [int(p) for p in house.free], range(1, header.kv_tokens // page + 1)),
        ("rows", house.free_rows, range(1, header.rows + 1)),
    ):
        twice = sorted(item for item, count in Counter(free).items() if count > 1)
        strange = sorted(set(free) - set(whole))
        lost = sorted(set(whole) - set(free))
        for items, anomaly, text in (
            (twice, "double-free", "twice"),
            (strange, "phantom-row", "that nobody may be given"),
            (lost, "leaked-slot", "missing"),
        ):
            if items:
                yield Difference(
                    *("K5", anomaly, "loop-house"),
                    f"free {what} when all requests have ended",
                    f"each of the {len(whole)} once",
                    f"{_some(items)} {text}",
                )
                break


def _some(items: list[int]) -> str:
    return f"{', '.join(map(str, items[:_TAIL]))}{', ...' * (len(items) > _TAIL)}"


def compare(
    clause: str, call: str, first: Service, second: Service, numbers: Sequence[int]
) -> Iterator[Difference]:
    """L2, L3: the same requests, served in two ways, have the same outputs."""
    for number in numbers:
        one, other = first.outputs.get(number), second.outputs.get(number)
        if one != other and first.error is None and second.error is None:
            yield Difference(
                *(clause, "wrong-value", call, f"output of r{number}"),
                expected=f"as {_SECOND[call]}: {_tail(other or [])}",
                observed=_tail(one or []),
            )


_SECOND = {"loop-overlap": "the other loop puts out", "loop-company": "it puts out alone"}


def situations(schedule: Schedule, service: Service) -> Iterator[str]:
    """What a run of the loop went through, once per occurrence, of
    :data:`generators.schedules.SITUATIONS` and more.
    """
    truth = Truth(schedule)
    header = schedule.header
    if not header.overlap:
        yield "loop without overlap"
    if header.block > 4:
        yield "loop with a large block"
    yield from ["loop retraction"] * service.retracted
    yield from ["loop starved pool"] * service.starved
    for result in service.results:
        yield f"loop {result.kind}"
        for row in result.rows:
            if row.finished and result.kind == "decode":
                yield "loop redundant step"
            if result.kind == "prefill" and not row.tokens and not row.finished:
                yield "loop chunk"
            end = len(truth.ends[row.number])
            if row.tokens and row.before < end < row.before + (row.commits or 0):
                stopped = truth.ends[row.number][-1] in truth.request(row.number).stops
                yield f"loop {'stop' if stopped else 'limit'} inside a block"
    for request in schedule.requests:
        if request.prompt + len(truth.ends[request.number]) >= header.context - 2:
            yield "loop longest request"
    taken = Counter(slot for slots in service.slots.values() for slot in slots)
    yield from ["loop reused row"] * sum(count - 1 for count in taken.values())
