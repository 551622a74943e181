"""Schedules: legal, repeatable, readable again, and made small without becoming illegal."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace

import pytest

from generators.operations import TraceError
from generators.schedules import (
    SAMPLED_BLOCKS,
    Arrival,
    Schedule,
    Server,
    schedule_in,
    schedules,
    simpler,
)

SOME = Schedule(Server(), (Arrival(0, 1, 5, 9), Arrival(3, 2, 4, 6, stops=(7,))))


def drawn(count: int, seed: int = 0, *, everything: bool = True) -> list[Schedule]:
    found = schedules(seed, mixed=everything, idle=everything, debug=False)
    return list(itertools.islice(found, count))


def test_drawn_schedules_are_legal_and_can_be_read_again() -> None:
    for schedule in drawn(500):
        assert all(schedule.header.refusal(request) is None for request in schedule.requests)
        assert schedule_in(json.dumps(schedule.as_json())) == schedule
        assert all(schedule.output(request) for request in schedule.requests)


def test_the_same_seed_draws_the_same() -> None:
    assert drawn(30) == drawn(30)
    assert drawn(30) != drawn(30, seed=1)


def test_settings_vary_and_keep_to_what_the_tree_can_do() -> None:
    headers = [schedule.header for schedule in drawn(500)]
    for name in ("page", "overlap", "mixed", "idle", "needs_cpu_seq_lens", "plan_stream"):
        assert len({getattr(header, name) for header in headers}) > 1, name
    blocks = Counter(header.block for header in headers)
    assert set(blocks) == {4, *SAMPLED_BLOCKS}
    assert blocks[4] > 5 * sum(count for block, count in blocks.items() if block != 4)
    plain = drawn(200, everything=False)
    assert not any(schedule.header.mixed or schedule.header.idle for schedule in plain)


def test_what_is_simpler_is_legal_and_says_less() -> None:
    for schedule in drawn(60):
        size = sum(request.prompt + request.limit for request in schedule.requests)
        for other in simpler(schedule):
            assert other != schedule
            assert Schedule.from_json(other.as_json()) == other
            assert sum(request.prompt + request.limit for request in other.requests) <= size


def test_lines_tell_who_arrives_when() -> None:
    assert SOME.lines() == [
        "r0 arrives in turn 1: prompt 5, up to 9 tokens",
        "r3 arrives in turn 2: prompt 4, up to 6 tokens, stops at 7",
    ]
    assert "block 4, page 1" in SOME.header.line()


def test_what_is_no_schedule_is_left_to_others() -> None:
    for text in ("", "[]", "{", '{"header": {}, "operations": []}', '{"case": {}}'):
        assert schedule_in(text) is None
    assert schedule_in(json.dumps({"trace": SOME.as_json()})) == SOME


def changed(**values: object) -> dict[str, object]:
    return {**SOME.as_json(), **values}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (changed(schema=7), "schema 7 is not the supported"),
        (changed(requests=[]), "a schedule needs a request"),
        (changed(requests=[7]), "request 0: an object is expected"),
        (changed(header=None), "header: an object is expected"),
        (changed(header={"blocks": 4}), "unknown field 'blocks'"),
        (changed(header={"block": 1}), "'block' must be between 2 and 64"),
        (changed(requests=[{"number": 0, "at": 1, "prompt": 5}]), "'limit' is missing"),
        (changed(requests=[{"number": 0, "at": 0, "prompt": 5, "limit": 1}]), "'at' must be"),
        (
            changed(requests=[{"number": 0, "at": 1, "prompt": 95, "limit": 1}]),
            "a prompt of 95 tokens is too long for context 96",
        ),
        (
            changed(requests=[{"number": 0, "at": 1, "prompt": 50, "limit": 60}]),
            "50 prompt tokens and 60 more do not fit",
        ),
        (
            changed(requests=[{"number": 0, "at": 1, "prompt": 5, "limit": 1}] * 2),
            "two requests of a schedule have the same number",
        ),
    ],
)
def test_malformed_schedules_are_refused_in_one_line(data: object, message: str) -> None:
    with pytest.raises(TraceError, match=message) as refused:
        Schedule.from_json(data)
    assert "\n" not in str(refused.value)


def test_a_request_must_fit_the_pool_alone() -> None:
    server = Server(kv_tokens=32, page=16, context=96)
    assert server.refusal(Arrival(0, 1, 10, 40)) is not None
    assert replace(server, kv_tokens=512).refusal(Arrival(0, 1, 10, 40)) is None
