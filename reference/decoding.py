"""Sequential greedy decoding of a toy model: what any overlapped schedule must reproduce.

The toy target and the toy draft are integer functions of a request's tokens. The target's next
token depends on every token before it and on every position, so a token that is lost, doubled,
moved or taken from another request changes what follows. The draft knows the target's function; it
proposes the target's own continuation up to a length that the tokens decide too, and a wrong token
after it, so that every accept length from 0 to block - 1 occurs.

Clauses of :mod:`reference.clauses`: outputs (L1 to L3) and accept lengths (L4).

Tokens are integers from 0 to :data:`VOCABULARY` - 1; the draft's mask token is the one after them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

VOCABULARY = 61
MASK = VOCABULARY
"""The token that stands for what the draft is asked for; no request contains it."""

MODULUS = (1 << 31) - 1
BASE = 48_271
"""The state of a history is a polynomial in :data:`BASE` modulo :data:`MODULUS`, both prime."""

WIDTH = VOCABULARY + 1
"""Values that a token takes in a state, the mask included."""


@dataclass(frozen=True)
class Model:
    """A toy target and its draft.

    Attributes:
        seed: from 0; other seeds are other functions.
        agreement: how often the draft goes on being right, in eighths, from 0 (never) to 8
            (always).
    """

    seed: int
    agreement: int

    def state(self, tokens: Sequence[int]) -> int:
        """State after `tokens`, each at its place in the sequence."""
        state = self.seed + 1
        for position, token in enumerate(tokens):
            state = self.step(state, token, position)
        return state

    def step(self, state: int, token: int, position: int) -> int:
        """State after one token more."""
        return (state * BASE + position * WIDTH + token + 1) % MODULUS

    def token(self, state: int) -> int:
        """The target's next token."""
        return (state >> 7) % VOCABULARY

    def accepts(self, state: int, block: int) -> int:
        """How many of a block's drafts are right, from 0 to `block` - 1: for each of them the state
        throws a die with eight sides, and the first that is not below the agreement is wrong."""
        for right in range(block - 1):
            if (state * (2 * right + 1) % MODULUS >> 11) % 8 >= self.agreement:
                return right
        return block - 1

    def prompt(self, number: int, length: int) -> list[int]:
        """The prompt of request `number`; other numbers have other prompts."""
        state, tokens = self.step(self.seed + 1, VOCABULARY, number), list[int]()
        for position in range(length):
            state = self.step(state, number, position)
            tokens.append(self.token(state))
        return tokens


def continuation(model: Model, prompt: Sequence[int]) -> Iterator[int]:
    """The target's own greedy output, without end."""
    state, position = model.state(prompt), len(prompt)
    while True:
        token = model.token(state)
        yield token
        state = model.step(state, token, position)
        position += 1


def greedy(
    model: Model, prompt: Sequence[int], limit: int, stops: frozenset[int] = frozenset()
) -> list[int]:
    """L1: the output of one request that is decoded alone, one token at a time.

    Args:
        limit: tokens to put out at most, at least 1.
        stops: tokens after which the output ends; the last token is part of it.
    """
    output: list[int] = []
    for token in continuation(model, prompt):
        output.append(token)
        if len(output) >= limit or token in stops:
            break
    return output


def drafts_accepted(model: Model, tokens: Sequence[int], block: int) -> int:
    """L4: drafts that a step accepts after `tokens`, the bonus token being the last of them."""
    return model.accepts(model.state(tokens), block)
