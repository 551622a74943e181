"""The reference model does what its docstrings say, and refuses what they forbid."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from reference import draft_input
from reference.clauses import CLAUSES
from reference.draft_input import DraftInput, MixedForms, OneSidedMirror
from reference.relay import POISON, NothingFresh, Relay


def stored(*tokens: int) -> DraftInput:
    values = torch.tensor(tokens, dtype=torch.int64)
    return draft_input.live(values, values * 10)


def relayed(*slots: int) -> DraftInput:
    return replace(stored(*range(len(slots))), future_indices=torch.tensor(slots))


def test_filter_takes_rows_in_the_order_of_keep() -> None:
    kept = draft_input.filter_rows(stored(5, 6, 7), torch.tensor([2, 0]))
    assert kept.tokens.tolist() == [7, 5]
    assert kept.lengths.tolist() == [70, 50]
    assert kept.topk_p.shape == (2, 0)


def test_filter_of_the_relayed_form_addresses_future_indices_alone() -> None:
    draft = relayed(3, 4, 5)
    kept = draft_input.filter_rows(draft, torch.tensor([1]))
    assert kept.future_indices is not None
    assert kept.future_indices.tolist() == [4]
    assert kept.rows == 1
    assert kept.tokens is draft.tokens


def test_mirrors_follow_filter_and_merge() -> None:
    draft = replace(relayed(1, 2), mirrors={"m": torch.tensor([7, 8])})
    kept = draft_input.filter_rows(draft, torch.tensor([1]))
    assert kept.sums == {"m": 8}
    assert draft_input.merge(draft, kept).mirrors["m"].tolist() == [7, 8, 8]


@pytest.mark.parametrize("make", [stored, relayed])
def test_an_idle_input_is_neutral_for_merge(make) -> None:  # type: ignore[no-untyped-def]
    draft, idle = make(1, 2, 3), draft_input.idle(torch.int64, torch.device("cpu"))
    if draft.future_indices is not None:
        idle = replace(idle, future_indices=torch.empty(0, dtype=torch.int64))
    for merged in (draft_input.merge(draft, idle), draft_input.merge(idle, draft)):
        assert merged.rows == 3
        assert merged.lengths.dtype == torch.int64
        if draft.future_indices is None:
            assert merged.tokens.tolist() == [1, 2, 3]


def test_merge_is_associative_and_filter_distributes() -> None:
    a, b, c = stored(1, 2), stored(3), stored(4, 5)
    left = draft_input.merge(draft_input.merge(a, b), c)
    right = draft_input.merge(a, draft_input.merge(b, c))
    assert left.tokens.tolist() == right.tokens.tolist() == [1, 2, 3, 4, 5]
    whole = draft_input.filter_rows(left, torch.tensor([0, 4]))
    parts = draft_input.merge(
        draft_input.filter_rows(a, torch.tensor([0])), draft_input.filter_rows(c, torch.tensor([1]))
    )
    assert whole.tokens.tolist() == parts.tokens.tolist() == [1, 5]


def test_merge_refuses_mixed_forms_and_one_sided_mirrors() -> None:
    with pytest.raises(MixedForms):
        draft_input.merge(stored(1), relayed(1))
    with pytest.raises(OneSidedMirror):
        draft_input.merge(replace(relayed(1), mirrors={"m": torch.tensor([1])}), relayed(2))


def relay(*, poison: bool = False) -> Relay:
    return Relay(
        torch.full((4,), POISON),
        torch.full((4,), POISON),
        poison_tokens=poison,
        poison_lengths=poison,
    )


def test_relay_writes_addressed_rows_and_resolves_copies() -> None:
    it, slots = relay(), torch.tensor([3, 1])
    source = torch.tensor([30, 10])
    it.publish(slots, source)
    it.stash(slots, torch.tensor([33, 11]))
    source.zero_()
    assert it.lengths.tolist() == [-1, 10, -1, 30]
    resolved = it.resolve_tokens(slots)
    assert resolved.tolist() == [33, 11]
    resolved.zero_()
    assert it.tokens.tolist() == [-1, 11, -1, 33]


def test_relay_refuses_to_be_consumed_twice_under_debug() -> None:
    it, slots = relay(poison=True), torch.tensor([2])
    it.publish(slots, torch.tensor([5]))
    assert it.resolve_lengths(slots).tolist() == [5]
    with pytest.raises(NothingFresh):
        it.resolve_lengths(slots)
    with pytest.raises(NothingFresh):
        it.resolve_tokens(slots)  # never stashed


def test_clauses_are_numbered_once_and_say_where_they_are_checked() -> None:
    from conformance.kernels.catalog import KERNELS
    from conformance.kernels.misuse import CALL, WILD_CALL
    from conformance.loop_checks import CALLS
    from conformance.verdict import CHECKS

    kernels = {kernel.call_name for kernel in KERNELS.values()}
    checked = {*CHECKS, *CALLS, *kernels, CALL, WILD_CALL, "kernel-nothing"}
    for clause in CLAUSES.values():
        assert clause.calls
        assert clause.statement.endswith(".")
        assert set(clause.calls + clause.wild_calls) <= checked, clause.number
    named = {call for clause in CLAUSES.values() for call in clause.calls + clause.wild_calls}
    assert named == checked
