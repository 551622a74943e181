"""The judge of the loop: every name it gives, on services that are made by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest

from conformance.loop_checks import compare, judge, situations
from conformance.sut.loop import Result, Row, Service
from generators.schedules import Arrival, Schedule, Server
from reference.decoding import continuation, drafts_accepted
from reference.kv_ledger import View

SERVER = Server(rows=2, kv_tokens=64, agreement=6)
SCHEDULE = Schedule(SERVER, (Arrival(0, 1, 5, 12), Arrival(1, 1, 3, 7)))


def house(**changed: object) -> View:
    """A KV cache in which nobody is left."""
    free = list(range(1, SERVER.kv_tokens + 1))
    whole = {"table": None, "free": free, "free_rows": [2, 1], "committed": {}, "allocated": {}}
    return View(**{**whole, **changed})  # type: ignore[arg-type]


def served(schedule: Schedule = SCHEDULE) -> Service:
    """What a loop without a fault makes of a schedule: each request alone, one after the other."""
    service = Service(house=house())
    launch = 0
    for request in schedule.requests:
        prompt = schedule.prompt(request)
        tokens = list(islice(continuation(schedule.header.model, prompt), 40))
        end = len(schedule.output(request))
        known, rows = 0, []
        while known < end:
            commits = None
            more = 1
            if known:
                history = prompt + tokens[:known]
                block = schedule.header.block
                commits = more = drafts_accepted(schedule.header.model, history, block) + 1
            rows.append(Row(request.number, known, tuple(tokens[known:][:more]), commits, False))
            known += more
        rows.append(Row(request.number, known, (), 1, True))  # the redundant step
        for row in rows:
            launch += 1
            kind = "prefill" if row.commits is None else "decode"
            service.results.append(Result(launch, kind, (row,)))
        service.outputs[request.number] = tokens[:end]
        service.reasons[request.number] = "FINISH_LENGTH"
        service.slots[request.number] = [1]
    return service


def with_row(index: int, **changed: object) -> Service:
    """A service in which one result is another."""
    service = served()
    result = service.results[index]
    (row,) = result.rows
    service.results[index] = replace(result, rows=(replace(row, **changed),))  # type: ignore[arg-type]
    return service


def names(service: Service) -> list[tuple[str, str]]:
    return [(d.clause, d.anomaly) for d in judge(SCHEDULE, service, Counter())]


def a_decode(least: int = 2) -> tuple[int, Row]:
    """A decode with at least so many tokens, that does not end its request."""
    for index, result in enumerate(served().results):
        (row,) = result.rows
        inside = row.before + len(row.tokens) < 12 and row.number == 0
        if row.commits and inside and len(row.tokens) >= least:
            return index, row
    raise AssertionError("no such step")


def test_what_is_right_is_silent_and_counted() -> None:
    counts: Counter[str] = Counter()
    assert list(judge(SCHEDULE, served(), counts)) == []
    assert counts["loop-output"] > 4
    assert counts["loop-accept"] > 2
    assert counts["loop-house"] == 1


def test_a_wrong_token_ends_the_judgement_of_its_request() -> None:
    index, row = a_decode()
    wrong = ((row.tokens[0] + 1) % 61, *row.tokens[1:])
    assert names(with_row(index, tokens=wrong)) == [("L1", "wrong-value")]
    (difference,) = judge(SCHEDULE, with_row(index, tokens=wrong), Counter())
    (told,) = difference.rows
    assert (told.row, told.request) == (row.before, "r0")
    assert (told.expected, told.observed) == (row.tokens[0], wrong[0])


def test_another_requests_tokens_have_an_owner() -> None:
    index, row = a_decode()
    theirs = tuple(SCHEDULE.output(SCHEDULE.requests[1])[: len(row.tokens)])
    assert theirs != row.tokens
    assert names(with_row(index, tokens=theirs)) == [("L1", "wrong-owner")]


def test_its_own_earlier_tokens_are_stale() -> None:
    index, row = a_decode()
    earlier = tuple(SCHEDULE.output(SCHEDULE.requests[0])[: len(row.tokens)])
    assert names(with_row(index, tokens=earlier)) == [("L1", "stale-read")]


@pytest.mark.parametrize(("more", "anomaly"), [(-1, "lost-speed"), (1, "wrong-value")])
def test_other_accept_lengths_leave_the_text_alone(more: int, anomaly: str) -> None:
    index, row = a_decode()
    assert row.commits is not None
    assert names(with_row(index, commits=row.commits + more)) == [("L4", anomaly)]


def test_tokens_that_a_step_committed_and_the_host_did_not_learn() -> None:
    index, row = a_decode()
    found = names(with_row(index, tokens=row.tokens[:1]))
    assert found[0] == ("L1", "cut-short")


def test_tokens_after_the_end() -> None:
    last = len(served().results) - 1
    assert names(with_row(last, tokens=(3,))) == [("L1", "past-end")]


@pytest.mark.parametrize(
    ("output", "anomaly"),
    [
        (lambda output: [*output, 9], "past-end"),
        (lambda output: output[:-1], "cut-short"),
        (lambda output: [*output[:-1], (output[-1] + 1) % 61], "wrong-value"),
    ],
)
def test_the_output_at_the_end(output: object, anomaly: str) -> None:
    service = served()
    service.outputs[1] = output(service.outputs[1])  # type: ignore[operator]
    assert names(service) == [("L1", anomaly)]


def test_a_request_must_end_for_its_own_reason() -> None:
    service = served()
    service.reasons[0] = "FINISH_ABORT"
    assert names(service) == [("L1", "cut-short")]


def test_an_error_is_told_after_what_was_wrong_before() -> None:
    service = served()
    service.error, service.house = "IndexError in run_batch: out of range", None
    assert names(service) == [("L1", "unexpected-error")]
    index, row = a_decode()
    service = with_row(index, tokens=tuple((t + 1) % 61 for t in row.tokens))
    service.error, service.house = "IndexError in run_batch: out of range", None
    assert names(service) == [("L1", "wrong-value"), ("L1", "unexpected-error")]


def test_a_decode_brings_a_token_unless_its_request_was_retracted() -> None:
    index, _ = a_decode()
    assert names(with_row(index, tokens=()))[0] == ("L1", "cut-short")
    retracted = names(with_row(index, tokens=(), retracted=True))
    assert retracted[0] == ("L1", "lost-update")  # as nothing was prefilled again


def test_the_reason_must_be_the_right_one() -> None:
    service = served()
    service.reasons[0], service.matched[0] = "FINISH_MATCHED_TOKEN", 7
    assert names(service) == [("L1", "wrong-value")]
    stop = served().outputs[0][-1]
    first, *others = SCHEDULE.requests
    stopping = Schedule(SERVER, (replace(first, limit=30, stops=(stop,)), *others))
    service = served()
    service.outputs[0] = stopping.output(stopping.requests[0])
    if len(service.outputs[0]) == len(served().outputs[0]):
        told = [(d.clause, d.anomaly) for d in judge(stopping, service, Counter())]
        assert ("L1", "wrong-value") in told


@pytest.mark.parametrize(
    ("changed", "anomaly"),
    [
        ({"free": list(range(2, 65))}, "leaked-slot"),
        ({"free": [1, *range(1, 65)]}, "double-free"),
        ({"free": list(range(65))}, "phantom-row"),
        ({"free_rows": [1]}, "leaked-slot"),
        ({"free_rows": [1, 2, 2]}, "double-free"),
    ],
)
def test_the_house_must_be_empty(changed: dict[str, object], anomaly: str) -> None:
    service = served()
    service.house = house(**changed)
    assert names(service) == [("K5", anomaly)]


def test_two_ways_of_serving_are_compared() -> None:
    first, second = served(), served()
    assert not list(compare("L3", "loop-overlap", first, second, [0, 1]))
    second.outputs[1] = second.outputs[1][:-1]
    (found,) = compare("L2", "loop-company", first, second, [0, 1])
    assert (found.clause, found.anomaly, found.aspect) == ("L2", "wrong-value", "output of r1")


def test_situations_are_told() -> None:
    found = Counter(situations(SCHEDULE, served()))
    assert found["loop redundant step"] == 2
    assert found["loop prefill"] == 2
    assert found["loop reused row"] == 1
