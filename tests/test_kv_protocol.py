"""The rules where there is a KV pool: it fills up, and requests have a longest length."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from generators import protocol
from generators.operations import (
    KV_LAWS,
    LAWS,
    Admit,
    Adopt,
    Filter,
    Finish,
    Header,
    Law,
    Merge,
    Mixed,
    Operation,
    Retract,
    Step,
    Sync,
    Trace,
    TraceError,
    Wild,
)
from generators.protocol import (
    KV_SITUATIONS,
    Capabilities,
    Effect,
    IllegalOperation,
    State,
    apply,
    kv,
    situations,
)
from generators.shrink import repair, shrink
from generators.strategies import Enough, generate, traces
from generators.values import STRIDE
from reference.kv_lengths import pages

ALL = Capabilities()
ROOMY = Header(pool=4, block=4, kv_tokens=99, context=24)
TIGHT = replace(ROOMY, kv_tokens=34)  # as few as one request needs
APART = replace(ROOMY, overlap=False)


def test_lengths_follow_from_the_context() -> None:
    assert kv.longest_prompt(ROOMY) == 17
    assert kv.longest_decoding(ROOMY) == 20
    assert kv.least_tokens(ROOMY.context, ROOMY.block, 1) == TIGHT.kv_tokens
    assert kv.least_tokens(24, 4, 16) == 4 * 16
    assert kv.least_tokens(24, 8, 16) == 5 * 16


# -- what is refused ------------------------------------------------------------------------------


def alone(length: int) -> list[Operation]:
    return [Admit(((0, 1, length),)), Adopt()]


def both(first: int, second: int) -> list[Operation]:
    return [Admit(((0, 1, first), (1, 2, second))), Adopt()]


THREE: list[Operation] = [Admit(((0, 1, 10), (1, 2, 10), (2, 3, 10))), Adopt()]
OVER = "r0 has its longest length and ends first"
LAST = "the result of r0 in flight is its last: it has no room left"
SKIPPED = "r0 finishes in flight by its length and is left out"
PROMPTS = "the KV pool has too few pages left for the prompts"
DECODE = "the KV pool has too few pages left for a decode: it retracts first"

# In every row: what comes first, what is refused then and why, and what is not.
REFUSED: dict[str, tuple[Header, list[Operation], Operation, str, Operation]] = {
    "longest prompt": (
        *(ROOMY, [], Admit(((0, 1, 18),)), "the prompt of r0 is longer than the context allows"),
        Admit(((0, 1, 17),)),
    ),
    "longest prompt in pieces": (
        *(ROOMY, [Admit(((0, 1, 9),), chunk=0), Adopt()], Admit(((0, 1, 18),))),
        *("the prompt of r0 is longer than the context allows", Admit(((0, 1, 17),))),
    ),
    "longest chunk": (
        *(ROOMY, [], Admit(((0, 1, 17),), chunk=0), "the prompt of r0 cannot go on"),
        Admit(((0, 1, 16),), chunk=0),
    ),
    "longest length": (*(ROOMY, [*alone(17), Step((3,)), Sync()], Step((0,)), OVER, Finish(0)),),
    "longest length at once": (APART, [*alone(17), Step((3,))], Step((0,)), OVER, Finish(0)),
    "longest length in a mixed batch": (
        *(ROOMY, [*alone(17), Step((3,)), Sync()], Mixed(((1, 2, 1),)), OVER),
        Admit(((1, 2, 1),)),
    ),
    "longest length in a law": (
        *(ROOMY, [*alone(17), Step((3,)), Sync()], Law("bookkeeping"), OVER, Finish(0)),
    ),
    "last result in flight": (
        *(ROOMY, [*alone(17), Step((3,))], Step((0,)), LAST, Step((0,), (0,))),
    ),
    "last result in flight of a mixed batch": (
        *(ROOMY, [*alone(17), Step((3,))], Mixed(((1, 2, 1),)), LAST),
        Mixed(((1, 2, 1),), None, (0,)),
    ),
    "finishing in flight": (
        *(ROOMY, [*alone(17), Step((2,)), Sync(), Step((0,))], Step((0,), (0,)), SKIPPED),
        Filter((0,)),
    ),
    "prompts": (
        *(TIGHT, [], Admit(((0, 1, 17), (1, 2, 17))), PROMPTS),
        Admit(((0, 1, 17), (1, 2, 16))),
    ),
    "prompts beside others": (
        *(TIGHT, alone(17), Admit(((1, 2, 17),)), PROMPTS, Admit(((1, 2, 16),))),
    ),
    "prompts in pieces": (
        *(TIGHT, [Admit(((0, 1, 17), (1, 2, 9)), chunk=1), Adopt()], Admit(((1, 2, 17),))),
        *(PROMPTS, Admit(((1, 2, 16),))),
    ),
    "prompts in whole pages": (
        *(replace(ROOMY, page=16, kv_tokens=80), both(17, 1), Admit(((2, 3, 17),)), PROMPTS),
        Admit(((2, 3, 16),)),
    ),
    "padding is no page": (
        *(replace(ROOMY, page=16, kv_tokens=79), both(17, 1), Admit(((2, 3, 1),)), PROMPTS),
        Step((0, 0)),
    ),
    "decode": (TIGHT, both(10, 9), Step((0, 0)), DECODE, Retract((1,))),
    "decode in a law": (TIGHT, both(10, 9), Law("penalties"), DECODE, Retract((0,))),
    "mixed batch": (*(TIGHT, alone(10), Mixed(((1, 2, 16),)), PROMPTS, Mixed(((1, 2, 15),))),),
    "retraction that keeps too many": (TIGHT, THREE, Retract((0, 1)), DECODE, Retract((0,))),
    "law without a pool": (
        *(Header(), alone(5), Law("bookkeeping"), "it is no law of a loop without a KV pool"),
        Law("keep-all"),
    ),
    "law with a pool": (
        *(ROOMY, alone(5), Law("keep-all"), "it is no law of a loop with a KV pool"),
        Law("penalties"),
    ),
    "wild use": (
        *(ROOMY, alone(5), Wild("filter-nothing"), "wild uses are tried without a KV pool"),
        Step((3,)),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_pool_does_not_allow_is_refused_with_the_reason(name: str) -> None:
    header, start, refused, reason, allowed = REFUSED[name]
    protocol.check(Trace(header, (*start, allowed)), ALL)
    with pytest.raises(IllegalOperation) as error:
        protocol.check(Trace(header, (*start, refused)), ALL)
    last = len(start) + 1
    assert str(error.value) == f"operation {last} ({refused.line()}): {reason}"


@pytest.mark.parametrize("header", [ROOMY, APART])
def test_some_trees_decode_once_more_what_has_its_length_in_flight(header: Header) -> None:
    start = (*alone(17), Step((2,)), *([Sync()] if header.overlap else []))
    protocol.check(Trace(header, (*start, Step((0,)))), ALL)
    if header.overlap:
        more = Trace(header, (*start, Step((0,)), Step((0,), (0,))))
        protocol.check(more, replace(ALL, skips_finishing=False))
        with pytest.raises(IllegalOperation, match=SKIPPED):
            protocol.check(more, ALL)


@pytest.mark.parametrize(("kv_tokens", "context"), [(64, 0), (0, 24)])
def test_a_header_has_a_pool_and_a_context_or_neither(kv_tokens: int, context: int) -> None:
    data = Trace(replace(ROOMY, kv_tokens=kv_tokens, context=context)).as_json()
    with pytest.raises(TraceError, match="header: 'kv_tokens' and 'context' go together"):
        Trace.from_json(data)


@pytest.mark.parametrize("name", ["kv_tokens", "context"])
def test_a_pool_has_bounds(name: str) -> None:
    data = Trace(replace(ROOMY, **{name: 1 << 21})).as_json()  # type: ignore[arg-type]
    with pytest.raises(TraceError, match=f"header: '{name}' must be between 0 and"):
        Trace.from_json(data)


# -- what an operation does -----------------------------------------------------------------------


def after(header: Header, *operations: Operation) -> tuple[State, Effect]:
    """State and last effect of a legal trace."""
    protocol.check(Trace(header, operations), ALL)
    state, effect = State(header), Effect()
    for operation in operations:
        effect = apply(state, operation)
    return state, effect


def learned(effect: Effect) -> list[tuple[int, int]]:
    return [(request.number, length) for request, length in effect.learned]


def ended(effect: Effect) -> list[int]:
    return [request.number for request in effect.ended]


@pytest.mark.parametrize("header", [ROOMY, APART])
def test_the_result_of_a_chunk_is_learned_by_nobody(header: Header) -> None:
    start = [Admit(((0, 1, 5), (1, 2, 9)), chunk=0), Adopt(), Admit(((0, 1, 11),)), Merge()]
    chunk, rest = [after(header, *start[:n])[1] for n in (1, 3)]
    if header.overlap:  # one launch late
        assert chunk.landed is None
        assert not chunk.learned
        chunk, rest = rest, after(header, *start, Sync())[1]
        assert chunk.landed == [(0, 1), (1, 2)]
    assert learned(chunk) == [(1, 9)]
    assert learned(rest) == [(0, 11)]


def test_a_chunk_may_land_when_its_prompt_has_gone_on() -> None:
    state, effect = after(
        ROOMY, Admit(((0, 1, 5),), chunk=0), Adopt(), Admit(((0, 1, 9),), chunk=0), Adopt()
    )
    assert state.live[0].committed == 9
    assert state.live[0].allocated == 9
    effect = apply(state, Sync())
    assert not effect.learned
    assert state.live[0].committed == 9


@pytest.mark.parametrize("header", [ROOMY, APART])
def test_the_lengths_of_a_step_are_learned(header: Header) -> None:
    start = [*both(5, 7), Step((3, 0))]
    _, effect = after(header, *start)
    if header.overlap:
        assert learned(effect) == [(0, 5), (1, 7)]
        _, effect = after(header, *start, Sync())
    assert learned(effect) == [(0, 9), (1, 8)]


def test_a_mixed_batch_is_learned_of_in_row_order() -> None:
    start = [*alone(5), Mixed(((1, 2, 7), (2, 3, 4)), chunk=2), Adopt()]
    _, effect = after(ROOMY, *start, Sync())
    assert learned(effect) == [(1, 7), (0, 6)]
    assert effect.landed_tails == [0]


@pytest.mark.parametrize(
    ("header", "operations", "fits"),
    [
        (TIGHT, THREE, False),
        (replace(TIGHT, kv_tokens=54), THREE, True),
        (replace(TIGHT, kv_tokens=53), THREE, False),
        (TIGHT, both(9, 9), True),
        (TIGHT, both(10, 9), False),
        (TIGHT, [*both(9, 8), Step((0, 0)), Sync()], False),
        (Header(), [Admit(((0, 1, 5), (1, 2, STRIDE + 5))), Adopt()], True),
    ],
)
def test_a_retraction_says_whether_a_decode_would_have_fitted(
    header: Header, operations: list[Operation], fits: bool
) -> None:
    before = after(header, *operations)[0]
    found = situations(before, Retract((0,)))
    assert found == ([] if fits else ["pool too small"])
    state, effect = after(header, *operations, Retract((0,)))
    assert effect.fits is fits
    assert [request.number for request in effect.requests] == [0]
    if header.kv_tokens:
        assert kv.free_pages(state) == header.kv_tokens - state.live[0].allocated


def test_who_ends_is_said_with_what_lands() -> None:
    assert ended(after(ROOMY, *both(5, 7), Sync(), Finish(1))[1]) == [1]
    assert ended(after(ROOMY, *both(5, 7), Step((0, 0)), Step((0, 0), (1,)))[1]) == [1]
    assert ended(after(ROOMY, *both(5, 7), Step((0, 0)), Filter((1,)))[1]) == []
    left = after(ROOMY, *both(5, 7), Step((0, 0)), Filter((1,)), Step((0,)))[1]
    assert ended(left) == [1]
    assert learned(left) == [(0, 6), (1, 8)]
    mixed = after(ROOMY, *both(5, 7), Step((0, 0)), Mixed(((2, 3, 4),), None, (0,)))[1]
    assert ended(mixed) == [0]
    assert ended(after(ROOMY, Admit(((0, 1, 5),), chunk=0), Finish(0))[1]) == [0]


@pytest.mark.parametrize(("page", "held"), [(1, 5 + 1 + 8), (16, 16), (64, 64)])
def test_from_its_first_decode_on_a_request_has_whole_pages_ahead(page: int, held: int) -> None:
    header = replace(ROOMY, page=page, kv_tokens=4 * 64)
    state = State(header)
    for operation in (*alone(5), Sync()):
        apply(state, operation)
    whole = header.kv_tokens // page
    assert state.live[0].allocated == 5
    assert kv.free_pages(state) == whole - pages(5, page)
    apply(state, Step((0,)))
    apply(state, Sync())
    apply(state, Step((3,)))
    assert state.live[0].allocated == held
    assert kv.free_pages(state) == whole - held // page
    apply(state, Sync())
    apply(state, Finish(0))
    assert kv.free_pages(state) == whole


REACHED: dict[str, tuple[Header, list[Operation], Operation, list[Operation]]] = {
    # What comes before, what reaches the situation, and what comes before where it does not.
    "longest request": (
        *(ROOMY, [*alone(17), Step((2,)), Sync()], Step((0,))),
        [*alone(17), Step((1,)), Sync()],
    ),
    "last pages": (TIGHT, both(9, 8), Step((0, 0)), both(8, 7)),
    "pool too small": (TIGHT, both(10, 9), Retract((0,)), both(5, 5)),
    "stop inside a block": (
        *(ROOMY, [*alone(5), Step((2,)), Sync()], Finish(0)),
        [*alone(5), Step((1,)), Sync()],
    ),
}


def test_every_situation_of_a_pool_is_tried_here() -> None:
    assert REACHED.keys() == KV_SITUATIONS.keys()


@pytest.mark.parametrize("name", REACHED)
def test_a_situation_is_seen_where_it_is_reached(name: str) -> None:
    header, start, operation, other = REACHED[name]
    for operations, reached in ((start, True), (other, False)):
        state, _ = after(header, *operations)
        assert protocol.refusal(state, operation, ALL) is None
        assert (name in situations(state, operation)) is reached


# -- what is drawn --------------------------------------------------------------------------------


OLDEST = Capabilities(
    idle=False,
    defers_prefill=False,
    skips_finishing=False,
    mixed=False,
    seed=False,
)
TREES = {
    "all": ALL,
    "newest": replace(ALL, filters_first=True),
    "oldest": OLDEST,
    "without reserve": replace(OLDEST, reserves_two_blocks=False),
}
DRAWN = 300


def collect(capabilities: Capabilities, count: int, seed: int = 5) -> list[Trace]:
    found: list[Trace] = []

    def consume(trace: Trace) -> None:
        found.append(trace)
        if len(found) == count:
            raise Enough

    generate(traces(capabilities, kv_pool=True), seed, consume)
    return found


def states(trace: Trace) -> Iterator[tuple[State, Operation, Effect]]:
    """The state before each operation, then the same after it with what it did."""
    state = State(trace.header)
    for operation in trace.operations:
        effect = apply(state, operation)
        yield state, operation, effect


@pytest.mark.parametrize("name", TREES)
def test_drawn_traces_are_legal_and_stay_within_the_pool(name: str) -> None:
    capabilities = TREES[name]
    drawn = collect(capabilities, DRAWN)
    for trace in drawn:
        header = trace.header
        assert header.kv_tokens >= kv.least_tokens(header.context, header.block, header.page)
        assert not header.kv_tokens % header.page
        assert not header.seeded
        protocol.check(trace, capabilities)
        assert Trace.loads(json.dumps(trace.as_json())) == trace
        longest = kv.longest_decoding(header) + header.block
        for state, operation, _ in states(trace):
            held = sum(pages(r.allocated, header.page) for r in state.live.values())
            assert held <= header.kv_tokens // header.page, operation.line()
            assert kv.free_pages(state) == header.kv_tokens // header.page - held
            assert all(r.length <= longest for r in state.live.values())
            assert all(r.committed <= r.allocated for r in state.live.values())
            assert all(0 <= r.past_stop < r.learned for r in state.live.values())


def test_every_situation_of_a_pool_is_drawn_and_every_operation() -> None:
    reached: Counter[str] = Counter()
    for trace in collect(ALL, DRAWN):
        state = State(trace.header)
        for operation in trace.operations:
            reached.update(situations(state, operation))
            reached[operation.name] += 1
            apply(state, operation)
    assert KV_SITUATIONS.keys() <= reached.keys()
    assert all(reached[name] > DRAWN // 20 for name in KV_SITUATIONS), reached
    laws = {f"law-{law}" for law in LAWS}
    assert laws & reached.keys() == {f"law-{law}" for law in KV_LAWS}
    assert not any(name.startswith(("wild", "seed")) for name in reached)
    wanted = {"admit", "chunk", "mixed", "adopt", "merge", "step", "redundant", "sync", "finish"}
    assert wanted | {"filter", "leave", "retract", "preempt", "idle"} <= reached.keys()


def test_pools_are_drawn_full_where_a_tree_may_have_them_so() -> None:
    full = {
        name: sum(
            protocol.situations(state, operation).count("pool too small")
            for trace in collect(TREES[name], 100)
            for state, operation in before(trace)
        )
        for name in ("all", "oldest", "without reserve")
    }
    assert full["all"] > 0
    assert full["oldest"] > 0
    assert full["without reserve"] == 0


def before(trace: Trace) -> Iterator[tuple[State, Operation]]:
    """Each operation and the state that it finds."""
    state = State(trace.header)
    for operation in trace.operations:
        yield state, operation
        apply(state, operation)


def test_the_same_seed_draws_the_same_traces() -> None:
    assert collect(ALL, 20, 3) == collect(ALL, 20, 3)
    assert collect(ALL, 20, 3) != collect(ALL, 20, 4)


# -- what is made small ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", TREES)
def test_what_is_left_of_a_trace_is_made_legal(name: str) -> None:
    capabilities, choice = TREES[name], random.Random(1)
    kept = 0
    for trace in collect(capabilities, DRAWN):
        some: list[tuple[Operation, dict[int, int]]] = [
            (operation, {}) for operation in trace.operations if choice.random() < 0.7
        ]
        block = 1 + choice.randrange(trace.header.block)
        for header in (trace.header, replace(trace.header, page=1, block=block)):
            repaired = repair(header, some, capabilities)
            protocol.check(repaired, capabilities)
            kept += len(repaired.operations)
    assert kept > DRAWN


@settings(derandomize=True, max_examples=15, deadline=None)
@given(traces(ALL, kv_pool=True, longest=30), st.sampled_from([Step, Retract, Finish]))
def test_shrinking_keeps_traces_legal_and_reaches_a_minimum(
    trace: Trace, kind: type[Operation]
) -> None:
    if not any(isinstance(o, kind) for o in trace.operations):
        return

    def fails(candidate: Trace) -> bool:
        protocol.check(candidate, ALL)
        return any(isinstance(o, kind) for o in candidate.operations)

    small = shrink(trace, fails, ALL)
    assert len(small.operations) <= 3 + (kind is Finish), small.lines()
    assert small.header.kv_tokens == trace.header.kv_tokens
