"""The toy networks: what they promise, and that the device's are the reference's."""

from __future__ import annotations

import random

import pytest
import torch

from conformance.sut.toy_model import Attention, cells, logits
from reference.decoding import (
    MASK,
    VOCABULARY,
    WIDTH,
    Model,
    continuation,
    drafts_accepted,
    greedy,
)

MODEL = Model(seed=5, agreement=5)
LONGEST = 60


def histories(count: int) -> list[list[int]]:
    dice = random.Random(7)
    return [
        [dice.randrange(VOCABULARY) for _ in range(dice.randint(1, LONGEST - 16))]
        for _ in range(count)
    ]


def test_greedy_stops_at_the_limit_and_at_a_stop_token() -> None:
    whole = greedy(MODEL, [1, 2, 3], 12)
    assert len(whole) == 12
    stop = whole[4]
    first = whole.index(stop)
    assert greedy(MODEL, [1, 2, 3], 12, frozenset({stop})) == whole[: first + 1]
    assert greedy(MODEL, [1, 2, 3], 1) == whole[:1]


def test_every_token_and_every_place_decide_what_follows() -> None:
    history = histories(1)[0]
    state = MODEL.state(history)
    for place, token in enumerate(history):
        for other in range(WIDTH):
            changed = [*history[:place], other, *history[place + 1 :]]
            assert (MODEL.state(changed) == state) is (other == token)
    assert MODEL.state(history[1:]) != state
    assert MODEL.state([*history, MASK]) != state


def test_continuation_is_greedy_without_an_end() -> None:
    prompt = MODEL.prompt(3, 5)
    going = continuation(MODEL, prompt)
    assert [next(going) for _ in range(9)] == greedy(MODEL, prompt, 9)


def test_prompts_of_different_requests_differ() -> None:
    prompts = {tuple(MODEL.prompt(number, 12)) for number in range(50)}
    assert len(prompts) == 50
    assert all(0 <= token < VOCABULARY for prompt in prompts for token in prompt)


@pytest.mark.parametrize("block", [2, 4, 16])
def test_every_accept_length_occurs(block: int) -> None:
    agreed = {
        agreement: {
            drafts_accepted(Model(5, agreement), history, block) for history in histories(600)
        }
        for agreement in (0, 6, 8)
    }
    assert agreed[0] == {0}
    assert agreed[8] == {block - 1}
    assert agreed[6] == set(range(block))


def test_the_device_computes_the_reference() -> None:
    attention = Attention(MODEL, LONGEST, torch.device("cpu"))
    dice = random.Random(3)
    known = histories(40)
    # Slots in any order, and a table in which each history's are spread.
    slots = list(range(1, 40 * LONGEST + 1))
    dice.shuffle(slots)
    table = torch.tensor(slots).view(40, LONGEST)
    cache = torch.full((40 * LONGEST + 1,), 12345)
    for row, history in enumerate(known):
        tokens = torch.tensor(history)
        cache[table[row, : len(history)]] = cells(tokens, torch.arange(len(history)))
    lengths = torch.tensor([len(history) for history in known])
    states = attention.states(cache, table, lengths)
    assert states.tolist() == [MODEL.state(history) for history in known]
    assert attention.tokens(states).tolist() == [greedy(MODEL, h, 1)[0] for h in known]
    for block in (2, 4, 16):
        expected = [drafts_accepted(MODEL, history, block) for history in known]
        assert attention.accepts(states, block).tolist() == expected
    following = attention.after(states, cells(torch.full((40,), 7), lengths))
    assert following.tolist() == [MODEL.state([*history, 7]) for history in known]


def test_a_history_of_nothing_is_the_start() -> None:
    attention = Attention(MODEL, LONGEST, torch.device("cpu"))
    rows = torch.zeros((1, 4), dtype=torch.int64)
    state = attention.states(torch.zeros(2, dtype=torch.int64), rows, torch.tensor([0]))
    assert state.tolist() == [MODEL.state([])]


def test_scores_choose_their_token() -> None:
    tokens = torch.tensor([0, 3, VOCABULARY - 1, MASK])
    assert logits(tokens).argmax(-1).tolist() == tokens.tolist()
