"""The state machine: what it draws is legal, what it refuses it explains, traces round-trip."""

from __future__ import annotations

import json

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
    Operation,
    Retract,
    Step,
    Trace,
    TraceError,
)
from generators.protocol import Capabilities, IllegalOperation, State
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
        effect = state.apply(operation)
        if isinstance(operation, Admit | Step):
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
            state.apply(operation)
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
    ([ADMIT, Adopt(), Step((0,))], "2 rows run"),
    ([ADMIT, Adopt(), Step((0, 4))], "do not fit a block"),
    ([ADMIT, Adopt(), Step((0, 0), (7,))], "does not run"),
    ([ADMIT, Adopt(), Finish(0), Step((0, 0))], "not been filtered"),
    ([ADMIT, Finish(5)], "r5 does not run"),
    ([ADMIT, Finish(0), Finish(0)], "finished already"),
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


def test_without_overlap_nothing_is_redundant() -> None:
    trace = Trace(Header(overlap=False), (ADMIT, Adopt(), Step((0, 0), (1,))))
    with pytest.raises(IllegalOperation, match="without overlap"):
        protocol.check(trace, ALL)


def test_a_reused_slot_has_another_occupant_and_a_retracted_request_another_generation() -> None:
    state = State(Header())
    for operation in (ADMIT, Adopt(), Retract((1,)), Admit(((0, 1, 2 * STRIDE + 1),))):
        assert state.refusal(operation, ALL) is None
        state.apply(operation)
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
