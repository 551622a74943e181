"""Small scopes and the algebra: nothing is left out, and what counts as alike is alike."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from generators import algebra, protocol
from generators.exhaustive import Part, traces
from generators.operations import KV_LAWS, LAWS, Admit, Adopt, Header, Law, Sync
from generators.protocol import Capabilities, State, apply
from generators.small_scope import Scope, explore, operations, signature, tours

ALL = Capabilities()
OLD = Capabilities(idle=False, defers_prefill=False, skips_finishing=False, mixed=False, seed=False)
SCOPES = [
    (Header(pool=3), Scope(2, 3), ALL),
    (Header(pool=3), Scope(2, 2), OLD),
    (Header(pool=3, overlap=False), Scope(2, 3), ALL),
    (Header(pool=3, seeded=True), Scope(2, 3), ALL),
    (Header(pool=4), Scope(3, 3), Capabilities(filters_first=True)),
    (Header(pool=4, seeded=True, overlap=False), Scope(3, 4), ALL),
]
IDS = ["overlap", "old", "no overlap", "decode server", "three slots", "four requests"]


@pytest.mark.parametrize(("header", "scope", "capabilities"), SCOPES, ids=IDS)
def test_every_pair_of_operations_follows_each_other_in_every_state(
    header: Header, scope: Scope, capabilities: Capabilities
) -> None:
    """Counted from the traces alone, without the graph that they were made from."""
    states = set()
    pairs = set()
    possible: dict[object, int] = {}
    for trace in tours(explore(header, scope, capabilities)):
        protocol.check(trace, capabilities)
        state = State(header)
        before = None
        for operation in trace.operations:
            here = signature(state)
            states.add(here)
            choices = list(operations(state, scope, capabilities))
            possible[here] = len(choices)
            if operation not in choices:
                break  # what settles the end of a trace may be data of another kind
            number = choices.index(operation)
            if before is not None:
                pairs.add((*before, number))
            before = (here, number)
            apply(state, operation)
    graph = explore(header, scope, capabilities)
    assert len(states) == len(graph.follow)
    assert sum(possible.values()) == graph.edges
    assert len(pairs) == graph.pairs


@pytest.mark.parametrize(("header", "scope", "capabilities"), SCOPES, ids=IDS)
def test_states_that_count_as_one_behave_as_one(
    header: Header, scope: Scope, capabilities: Capabilities
) -> None:
    """Whatever their history, they allow as many operations, which lead to the same states."""
    behaviour: dict[object, list[object]] = {}
    for trace in itertools.islice(tours(explore(header, scope, capabilities)), 0, None, 7):
        state = State(header)
        for count, operation in enumerate(trace.operations):
            if count % 5 == 0:
                after: list[object] = []
                for choice in operations(state, scope, capabilities):
                    there = State(header)
                    for earlier in (*trace.operations[:count], choice):
                        apply(there, earlier)
                    after.append((choice.op, signature(there)))
                assert behaviour.setdefault(signature(state), after) == after
            apply(state, operation)
    assert len(behaviour) > 20


def test_names_lengths_and_values_do_not_tell_states_apart() -> None:
    one, other = State(Header(pool=5)), State(Header(pool=5, seed=9))
    apply(one, Admit(((0, 1, 3), (1, 2, (1 << 14) + 1))))
    apply(other, Admit(((7, 4, 9), (3, 1, (5 << 14) + 2))))
    assert signature(one) == signature(other)
    for state in (one, other):
        apply(state, Adopt())
    apply(other, Sync())
    assert signature(one) != signature(other)


def test_a_larger_scope_has_more_states() -> None:
    sizes = [
        len(explore(Header(pool=slots + 1), Scope(slots, requests), ALL).follow)
        for slots, requests in ((1, 1), (1, 2), (2, 2), (2, 3), (3, 3))
    ]
    assert sizes == sorted(set(sizes))


def test_shares_add_up_to_the_whole() -> None:
    def played(part: Part) -> list[object]:
        return list(traces(part, ALL, debug=False, compiled=False)[0])

    whole = Part(slots=2, requests=2, arrivals=2)
    shares = [Part(slots=2, requests=2, arrivals=2, share=i, shares=3) for i in range(3)]
    assert sorted(map(repr, played(whole))) == sorted(
        repr(trace) for share in shares for trace in played(share)
    )


def test_a_tree_without_decode_servers_gets_no_traces_of_one() -> None:
    part = Part(slots=2, requests=2, arrivals=2, seeded=True)
    found, size = traces(part, OLD, debug=False, compiled=False)
    assert (list(found), size) == ([], {})


@pytest.mark.parametrize("overlap", [True, False])
def test_the_algebra_is_every_instance_of_every_law(overlap: bool) -> None:
    header = Header(pool=5, overlap=overlap)
    laws: Counter[str] = Counter()
    seen = set()
    for trace in algebra.instances(header, 4):
        protocol.check(trace, ALL)
        rows = len(trace.operations[0].rows)  # type: ignore[attr-defined]
        for law in trace.operations[2:]:
            assert isinstance(law, Law)
            laws[law.law] += 1
            seen.add((rows, law))
    assert len(seen) == laws.total()
    # Forms and mirrors: 4. Of four rows, 64 ordered selections, 24 of them permutations.
    assert laws["keep-all"] == laws["neutral"] == 4 * 4
    assert laws["permute"] == 4 * (1 + 2 + 6 + 24)
    assert laws["filter"] == 4 * (0 + 2 + 9 + 40)
    assert laws["merge"] == laws["associate"] == 4 * (2 + 3 + 4 + 5)
    assert laws["lookup"] == overlap * (2 * 1 + 3 * 4 + 4 * 15 + 5 * 64)
    left_out = {"consume-twice", *KV_LAWS, *(() if overlap else ["lookup"])}
    assert set(laws) == set(LAWS) - left_out
