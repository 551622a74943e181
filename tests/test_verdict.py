"""Every anomaly has a name that says what happened; agreement has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conformance.anomalies import ANOMALIES
from conformance.observation import Observation, Outcome
from conformance.verdict import Context, judge
from generators.operations import Admit, Adopt, Filter, Finish, Header, Operation, Step
from generators.protocol import State, apply
from generators.values import STRIDE
from reference.clauses import CLAUSES


class History:
    """Two requests, two steps; the last operation's context and true values."""

    def __init__(self, header: Header | None = None) -> None:
        self.state = State(header or Header(token_bits=63))
        rows = ((0, 1, 5), (1, 2, STRIDE + 5))
        self.apply(Admit(rows))
        self.prefill = self.effect
        self.apply(Adopt())
        self.apply(Step((1, 2)))
        self.first = self.effect
        self.apply(Step((0, 0)))

    def apply(self, operation: Operation) -> None:
        self.operation = operation
        self.effect = apply(self.state, operation)

    def context(self, **previous: torch.Tensor) -> Context:
        return Context(self.state, self.operation, self.effect, previous)

    def resolve(self, **changes: Any) -> tuple[Observation, Observation]:
        """What the second step must resolve (the first one's values), and with changes."""
        lengths = torch.tensor(self.first.lengths)
        aspects: dict[str, Any] = {
            "tokens": torch.tensor(self.first.tokens),
            "lengths": lengths,
            "aliased": [],
            "host": lengths.clone(),
            "host_sum": int(lengths.sum()),
            "relay_tokens": torch.arange(4),
            "relay_lengths": torch.arange(4),
        }
        return Observation("resolve", aspects), Observation("resolve", {**aspects, **changes})


@pytest.fixture
def history() -> History:
    return History()


def names(pair: tuple[Observation, Observation], context: Context) -> tuple[str, str] | None:
    difference = judge(*pair, context)
    if difference is None:
        return None
    assert difference.anomaly in ANOMALIES
    assert difference.clause in CLAUSES
    return difference.clause, difference.anomaly


def test_agreement_is_silent(history: History) -> None:
    assert names(history.resolve(), history.context()) is None


def test_resolved_tokens(history: History) -> None:
    a, b = history.first.tokens
    old = history.prefill.tokens[0]
    cases: list[tuple[Any, tuple[str, str]]] = [
        (torch.tensor([b, a]), ("R1", "wrong-owner")),
        (torch.tensor([old, b]), ("R2", "torn-row")),
        (torch.tensor([123456, b]), ("R1", "never-written")),
        (torch.tensor([a, b]).to(torch.int32), ("R3", "wrong-type")),
        (torch.tensor([a]), ("R3", "missing-row")),
        (torch.tensor([a, b, b]), ("R3", "phantom-row")),
        (torch.tensor([[a, a], [b, b]])[:, 0], ("R3", "wrong-type")),
    ]
    for tokens, expected in cases:
        assert names(history.resolve(tokens=tokens), history.context()) == expected, tokens


def test_stale_token_and_length_together_are_a_stale_read(history: History) -> None:
    pair = history.resolve(
        tokens=torch.tensor(history.prefill.tokens), lengths=torch.tensor(history.prefill.lengths)
    )
    assert names(pair, history.context()) == ("R1", "stale-read")


def test_narrowed_token(history: History) -> None:
    wide = History(Header(token_bits=63))
    value = wide.first.tokens[0]
    narrow = int(torch.tensor(value).to(torch.int32))
    assert narrow != value
    pair = wide.resolve(tokens=torch.tensor([narrow, wide.first.tokens[1]]))
    assert names(pair, wide.context()) == ("R1", "wrong-type")


def test_former_occupant_of_a_reused_slot(history: History) -> None:
    history.apply(Finish(0))
    history.apply(Filter())
    history.apply(Admit(((2, 1, 2 * STRIDE + 1),)))
    fresh = history.effect.tokens[0]
    lengths = torch.tensor(history.effect.lengths)
    good = {"tokens": torch.tensor([fresh]), "lengths": lengths}
    bad = {**good, "tokens": torch.tensor([history.first.tokens[0]])}
    pair = Observation("resolve", good), Observation("resolve", bad)
    assert names(pair, history.context()) == ("R8", "wrong-owner")


def test_host_lengths_sum_alias_and_relay(history: History) -> None:
    host = torch.tensor(history.first.lengths)
    touched = torch.tensor([9, 1, 2, 3])
    cases: list[tuple[dict[str, Any], tuple[str, str]]] = [
        ({"host": host + 1}, ("R7", "wrong-value")),
        ({"host": None}, ("R7", "wrong-value")),
        ({"host_sum": 1}, ("R7", "wrong-value")),
        ({"aliased": ["tokens"]}, ("R4", "shared-storage")),
        ({"relay_tokens": touched}, ("R5", "phantom-row")),
    ]
    for changes, expected in cases:
        assert names(history.resolve(**changes), history.context()) == expected


def test_errors_of_a_resolve_say_which_assertion_fired() -> None:
    debug = History(Header(debug=True))
    expected, _ = debug.resolve()

    def raised(during: str, kind: str, fresh: bool = True) -> tuple[str, str] | None:
        aspects = {"error": Outcome(kind, ""), "during": during, "fresh": fresh}
        return names((expected, Observation("resolve", aspects)), debug.context())

    assert raised("resolve_seq_lens_cpu", "AssertionError", False) == ("R12", "unexpected-error")
    assert raised("resolve_seq_lens_cpu", "AssertionError") == ("R2", "unexpected-error")
    assert raised("resolve_forward_inputs", "IndexError") == ("R1", "unexpected-error")
    assert raised("resolve_seq_lens_cpu", "RuntimeError") == ("R2", "double-consume")
    assert raised("resolve_forward_inputs", "RuntimeError") == ("R1", "double-consume")


def stash(history: History, before: list[int], want: list[int], got: list[int]) -> Any:
    previous = {"relay_tokens": torch.tensor(before)}
    pair = (
        Observation("stash", {"relay_tokens": torch.tensor(want), "copied": True}),
        Observation("stash", {"relay_tokens": torch.tensor(got), "copied": True}),
    )
    return names(pair, history.context(**previous))


def test_written_rows(history: History) -> None:
    old = history.first.tokens
    a, b = history.effect.tokens
    before, want = [0, *old, 0], [0, a, b, 0]
    assert stash(history, before, want, want) is None
    assert stash(history, before, want, [0, b, a, 0]) == ("P1", "wrong-owner")
    assert stash(history, before, want, [0, old[0], b, 0]) == ("P1", "lost-update")
    assert stash(history, [0, -1, -1, 0], want, [0, -1, b, 0]) == ("P1", "lost-update")
    assert stash(history, before, want, [0, a, b, 7]) == ("P2", "phantom-row")
    narrow = int(torch.tensor(a).to(torch.float32).to(torch.int64))
    assert narrow != a
    assert stash(history, before, want, [0, narrow, b, 0]) == ("P4", "wrong-type")


def test_wild_uses_must_be_refused_clearly(history: History) -> None:
    want = Observation("wild-relayed-with-stored", {"answers": []})
    for kind, expected in (
        ("AssertionError", None),
        ("AttributeError", ("M7", "unexpected-error")),
    ):
        seen = Observation("wild-relayed-with-stored", {"outcome": Outcome(kind, "")})
        assert names((want, seen), history.context()) == expected
    accepted = Observation("wild-relayed-with-stored", {"outcome": None})
    assert names((want, accepted), history.context()) == ("M7", "missing-error")
