"""The state machine: what it draws is legal, what it refuses it explains, traces round-trip."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from generators import protocol
from generators.operations import (
    ALPHABET,
    Admit,
    Adopt,
    Filter,
    Finish,
    Header,
    Idle,
    Law,
    Merge,
    Mixed,
    Operation,
    Preempt,
    Retract,
    Seed,
    Step,
    Sync,
    Trace,
    TraceError,
)
from generators.protocol import Capabilities, IllegalOperation, State, apply, refusal
from generators.strategies import Enough, generate, traces
from generators.values import STRIDE

ALL = Capabilities()
profile = settings(derandomize=True, max_examples=60, deadline=None)


@profile
@given(traces(ALL, wild=True))
def test_drawn_traces_are_legal_and_round_trip(trace: Trace) -> None:
    protocol.check(trace, ALL)
    assert Trace.loads(json.dumps(trace.as_json())) == trace


@profile
@given(traces(ALL))
def test_values_tell_their_writers_apart(trace: Trace) -> None:
    state = State(trace.header)
    lengths: set[int] = set()
    for operation in trace.operations:
        effect = apply(state, operation)
        if isinstance(operation, Admit | Seed | Step):
            assert len(set(effect.tokens)) == len(effect.tokens)
            assert all(0 <= t < 1 << trace.header.token_bits for t in effect.tokens)
            assert not lengths & set(effect.lengths)
            lengths |= set(effect.lengths)
            assert len(set(effect.slots)) == len(effect.slots)
            assert 0 not in effect.slots
    assert len(state.tokens.writer) == len(lengths)


@profile
@given(traces(Capabilities(idle=False)))
def test_a_tree_without_idle_batches_gets_none(trace: Trace) -> None:
    assert not any(isinstance(operation, Idle) for operation in trace.operations)


def test_every_operation_and_situation_is_drawn() -> None:
    reached: set[str] = set()
    count = 0

    def consume(trace: Trace) -> None:
        nonlocal count
        state = State(trace.header)
        for operation in trace.operations:
            reached.update(protocol.situations(state, operation))
            reached.add(operation.op)
            apply(state, operation)
            count += 1
        if count > 8000:
            raise Enough

    generate(traces(ALL, wild=True), 7, consume)
    assert reached == set(protocol.SITUATIONS) | set(ALPHABET)


def collect(seed: int) -> list[Trace]:
    found: list[Trace] = []

    def consume(trace: Trace) -> None:
        found.append(trace)
        if len(found) == 20:
            raise Enough

    generate(traces(ALL), seed, consume)
    return found


def test_the_same_seed_draws_the_same_traces() -> None:
    assert collect(3) == collect(3)
    assert collect(3) != collect(4)


ADMIT = Admit(((0, 1, 5), (1, 2, STRIDE + 5)))

ILLEGAL: list[tuple[list[Operation], str]] = [
    ([Adopt()], "no prefill batch"),
    ([Step(())], "running batch is empty"),
    ([Filter()], "running batch is empty"),
    ([Admit(())], "at least one request"),
    ([Admit(((0, 9, 5),))], "slot 9 is not free"),
    ([Admit(((0, 0, 5),))], "slot 0 is not free"),
    ([Admit(((0, 1, 5), (1, 1, STRIDE + 5)))], "given twice"),
    ([Admit(((0, 1, 5), (1, 2, 6)))], "length range"),
    ([Admit(((0, 1, 0),))], "no tokens"),
    ([ADMIT, ADMIT], "has not been merged"),
    ([ADMIT, Merge()], "running batch is empty"),
    ([ADMIT, Adopt(), Admit(((0, 3, 9 * STRIDE + 1),))], "already running"),
    ([Admit(((0, 1, 5), (0, 2, STRIDE + 5)))], "comes in twice"),
    ([ADMIT, Adopt(), Step((0,))], "2 rows run"),
    ([ADMIT, Adopt(), Step((0, 4))], "do not fit a block"),
    ([ADMIT, Adopt(), Step((0, 0), (7,))], "does not run"),
    ([ADMIT, Adopt(), Sync(), Finish(0), Step((0, 0))], "not been filtered"),
    ([ADMIT, Finish(5)], "r5 does not run"),
    ([ADMIT, Finish(0)], "yet to process the last result of r0"),
    ([ADMIT, Adopt(), Step((0, 0)), Finish(0)], "yet to process the last result of r0"),
    ([ADMIT, Adopt(), Sync(), Finish(0), Finish(0)], "r0 does not run"),
    ([Sync()], "no result is in flight"),
    ([ADMIT, Sync()], "has not been merged"),
    ([ADMIT, Adopt(), Sync(), Sync()], "no result is in flight"),
    ([ADMIT, Adopt(), Sync(), Step((0, 0), (0,))], "no result of r0 is in flight"),
    ([ADMIT, Adopt(), Sync(), Filter((0,))], "no result of r0 is in flight"),
    ([ADMIT, Adopt(), Retract((0,)), Filter()], "what was not retracted decodes first"),
    ([ADMIT, Adopt(), Filter((0,)), Retract((0,))], "do not run"),
    ([ADMIT, Adopt(), Preempt(())], "at least one request"),
    ([ADMIT, Adopt(), Preempt((3,))], "preempts requests that do not run"),
    ([Preempt((0,))], "running batch is empty"),
    ([Mixed(((0, 1, 5),))], "no running batch to take along"),
    ([ADMIT, Adopt(), Mixed(((2, 1, 2 * STRIDE + 5),))], "slot 1 is not free"),
    ([Seed(((0, 1, 5),))], "only a decode server"),
    ([ADMIT, Adopt(), Sync(), Finish(0), Filter(), Admit(((0, 3, 9 * STRIDE + 1),))], "has ended"),
    ([ADMIT, Adopt(), Retract((0, 1))], "retracts at least one"),
    ([ADMIT, Adopt(), Retract((4,))], "do not run"),
    ([ADMIT, Idle("prefill")], "has not been merged"),
    ([ADMIT, Adopt(), Idle("decode")], "decodes when the others do"),
    ([ADMIT, Law("filter", keep=(0,))], "no running batch"),
    ([ADMIT, Adopt(), Step((0, 0)), Law("filter", keep=(2,))], "do not run"),
    ([ADMIT, Adopt(), Step((0, 0)), Law("consume-twice")], "without debug"),
]


@pytest.mark.parametrize(("operations", "reason"), ILLEGAL, ids=[r for _, r in ILLEGAL])
def test_illegal_operations_are_refused_with_the_reason(
    operations: list[Operation], reason: str
) -> None:
    with pytest.raises(IllegalOperation, match=reason):
        protocol.check(Trace(Header(), tuple(operations)), ALL)


def test_an_unfinished_prompt_comes_first() -> None:
    start = [Admit(((0, 1, 5),), chunk=0), Adopt()]
    with pytest.raises(IllegalOperation, match="scheduled first"):
        protocol.check(Trace(Header(), (*start, Admit(((1, 2, STRIDE + 1),)))), ALL)
    protocol.check(Trace(Header(), (*start, Admit(((0, 1, 9),)), Adopt(), Step((0,)))), ALL)


def test_only_some_schedulers_decode_between_two_chunks() -> None:
    start = [Admit(((0, 1, 5),)), Adopt(), Admit(((1, 2, STRIDE + 5),), chunk=1), Merge()]
    trace = Trace(Header(), (*start, Step((0,))))
    protocol.check(trace, ALL)
    with pytest.raises(IllegalOperation, match="scheduled first"):
        protocol.check(trace, Capabilities(defers_prefill=False))


LEGAL_ON_SOME: list[tuple[str, Header, list[Operation], str]] = [
    ("idle", Header(), [Idle("decode")], "DP attention"),
    (
        "mixed",
        Header(),
        [ADMIT, Adopt(), Mixed(((2, 3, 2 * STRIDE + 5),))],
        "mixed prefill off",
    ),
    ("seed", Header(seeded=True), [Seed(((0, 1, 5),))], "no draft input"),
    ("skips_finishing", Header(), [ADMIT, Adopt(), Filter((0,))], "until it knows"),
]


@pytest.mark.parametrize(
    ("capability", "header", "operations", "reason"), LEGAL_ON_SOME, ids=lambda value: str(value)
)
def test_some_trees_refuse_what_others_issue(
    capability: str, header: Header, operations: list[Operation], reason: str
) -> None:
    trace = Trace(header, tuple(operations))
    protocol.check(trace, ALL)
    with pytest.raises(IllegalOperation, match=reason):
        protocol.check(trace, replace(ALL, **{capability: False}))


@pytest.mark.parametrize("last", [Admit(((2, 3, 2 * STRIDE + 5),)), Preempt((1,))])
def test_some_schedulers_admit_over_rows_that_have_ended(last: Operation) -> None:
    trace = Trace(Header(), (ADMIT, Adopt(), Sync(), Finish(0), last))
    protocol.check(trace, ALL)
    with pytest.raises(IllegalOperation, match="not been filtered"):
        protocol.check(trace, replace(ALL, filters_first=True))


def test_without_overlap_results_are_known_at_once() -> None:
    start = (ADMIT, Adopt(), Step((0, 0)))
    header = Header(overlap=False)
    protocol.check(Trace(header, (*start, Finish(0), Filter())), ALL)
    for more in (Step((0, 0), (1,)), Sync(), Filter((1,))):
        with pytest.raises(IllegalOperation, match="is in flight"):
            protocol.check(Trace(header, (*start, more)), ALL)


def test_a_decode_server_is_only_sent_prefilled_requests() -> None:
    header = Header(seeded=True)
    for operation in (ADMIT, Idle("prefill")):
        with pytest.raises(IllegalOperation, match="decode server does not prefill"):
            protocol.check(Trace(header, (operation,)), ALL)


def test_a_slot_is_free_as_soon_as_its_request_has_ended() -> None:
    """Its row stays until the next filter, so two rows may name one slot for a while."""
    state = State(Header(pool=4))
    over = Admit(((2, 1, 2 * STRIDE + 1),))
    for operation in (ADMIT, Adopt(), Step((0, 0)), Step((0, 0), (0,)), over, Merge()):
        apply(state, operation)
    assert [r.slot for r in state.running] == [1, 2, 1]
    assert [r.slot for r in apply(state, Filter()).requests] == [2, 1]


def test_a_request_that_finishes_in_flight_keeps_its_slot_until_then() -> None:
    state = State(Header(pool=3))
    for operation in (ADMIT, Adopt(), Step((0, 0)), Filter((0,))):
        apply(state, operation)
    assert state.free == []
    effect = apply(state, Step((0,)))
    assert state.free == [1]
    assert effect.landed == [(0, 1), (1, 2)]


def test_the_host_knows_lengths_one_launch_late() -> None:
    state = State(Header())
    for operation in (ADMIT, Adopt(), Step((3, 0))):
        apply(state, operation)
    assert apply(state, Step((0, 0))).committed == [5, STRIDE + 5]
    assert apply(state, Sync()).landed == [(0, 1), (1, 2)]
    assert apply(state, Step((0, 0))).committed == [10, STRIDE + 7]


def test_rows_that_have_ended_count_until_they_are_filtered_out() -> None:
    start = (ADMIT, Adopt(), Sync(), Finish(0))
    admit = Admit(((2, 1, 2 * STRIDE + 1),))
    with pytest.raises(IllegalOperation, match="more requests would run than the pool has slots"):
        protocol.check(Trace(Header(pool=3), (*start, admit)), ALL)
    protocol.check(Trace(Header(pool=3), (*start, Filter(), admit)), ALL)


def test_a_reused_slot_has_another_occupant_and_a_retracted_request_another_generation() -> None:
    state = State(Header())
    back = Admit(((0, 1, 2 * STRIDE + 1),))
    for operation in (ADMIT, Adopt(), Retract((1,)), Step((0,)), back):
        assert refusal(state, operation, ALL) is None
        apply(state, operation)
    assert state.live[0].generation == 1


GOOD = Trace(Header(), (ADMIT, Adopt(), Step((0, 1)))).as_json()

MALFORMED = {
    "not an object": ([], "JSON object"),
    "future schema": ({**GOOD, "schema": 99}, "schema 99"),
    "unknown operation": ({**GOOD, "operations": [{"op": "teleport"}]}, "alphabet"),
    "unknown field": ({**GOOD, "operations": [{"op": "adopt", "x": 1}]}, "unknown field 'x'"),
    "missing field": ({**GOOD, "operations": [{"op": "step"}]}, "'accepted' is missing"),
    "wrong type": ({**GOOD, "operations": [{"op": "step", "accepted": "0"}]}, "wrong type"),
    "boolean number": ({**GOOD, "operations": [{"op": "finish", "request": True}]}, "wrong type"),
    "operations": ({**GOOD, "operations": 3}, "list"),
    "header field": ({**GOOD, "header": {"pool": 4, "size": 3}}, "unknown field 'size'"),
    "algorithm": ({**GOOD, "header": {"algorithm": "EAGLE"}}, "only DFLASH"),
    "huge number": ({**GOOD, "operations": [{"op": "finish", "request": 1 << 80}]}, "between"),
    "header bounds": ({**GOOD, "header": {"pool": 1}}, "between"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_traces_are_refused_in_one_line(name: str) -> None:
    data, reason = MALFORMED[name]
    with pytest.raises(TraceError, match=reason) as error:
        Trace.from_json(data)
    assert "\n" not in str(error.value)


def test_failure_files_are_traces_too() -> None:
    assert Trace.loads(json.dumps({"clause": "R1", "trace": GOOD})).as_json() == GOOD


@profile
@given(traces(ALL), st.data())
def test_shrinking_keeps_traces_legal_and_reaches_a_minimum(
    trace: Trace, data: st.DataObject
) -> None:
    from generators.shrink import shrink

    steps = sum(isinstance(o, Step) for o in trace.operations)
    if not steps:
        return

    def fails(candidate: Trace) -> bool:
        protocol.check(candidate, ALL)
        return any(isinstance(o, Step) for o in candidate.operations)

    small = shrink(trace, fails, ALL)
    assert [o.op for o in small.operations] == ["admit", "adopt", "step"]
    assert small.operations[0] == Admit(((0, 1, 1),))
    assert small.header.pool == 2
