"""Traces drawn by Hypothesis (the only module that imports it).

Hypothesis decides the structure: a word of bytes per operation, from which the protocol's choices
are taken digit by digit. Token values are not drawn at all; they follow from the header's seed.
"""

from __future__ import annotations

from collections.abc import Callable

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from generators.operations import Header, Trace
from generators.protocol import Capabilities, State, apply, draw, kv

_ENTROPY = 1 << 64


class Digits:
    """Choices taken from one integer, most significant meaning first; 0 gives the simplest."""

    def __init__(self, value: int) -> None:
        self._value = self._seed = value

    def below(self, n: int) -> int:
        if n < 2:
            return 0
        if self._value < n:
            # Out of digits: stretch the integer, deterministically. Zero stays zero.
            self._seed = (
                self._seed * 0xDA942042E4DD58B5 + 0x2545F491 * bool(self._seed)
            ) % _ENTROPY
            self._value = self._seed
        self._value, digit = divmod(self._value, n)
        return digit


_WORD = 8
"""Bytes of structure per operation."""

_POOLS = (2, 3, 4, 5, 6, 8, 9, 17, 33, 65, 129, 257, 513)
_BLOCKS = (1, 2, 3, 4, 5, 8, 16, 32)
_PAGES = (1, 16, 64)


def _header(digits: Digits, capabilities: Capabilities, *, debug: bool, compiled: bool) -> Header:
    """Settings of a trace; most pools are small, so that slots are reused."""
    large = digits.below(16) == 15
    return Header(
        pool=_POOLS[digits.below(len(_POOLS) if large else 8)],
        block=_BLOCKS[digits.below(len(_BLOCKS))],
        page=_PAGES[digits.below(len(_PAGES))],
        overlap=digits.below(4) != 3,
        seeded=capabilities.seed and digits.below(6) == 5,
        needs_cpu_seq_lens=digits.below(3) != 2,
        debug=debug,
        compiled=compiled,
        token_bits=capabilities.token_bits,
        seed=digits.below(1 << 20),
    )


_CONTEXTS = (24, 40, 72, 136)


def _kv_header(
    digits: Digits, capabilities: Capabilities, *, debug: bool, compiled: bool
) -> Header:
    """Settings of a trace with a KV pool; many pools are nearly full with two requests."""
    pool = (3, 4, 5, 6, 9)[digits.below(5)]
    block = _BLOCKS[digits.below(len(_BLOCKS))]
    page = _PAGES[digits.below(len(_PAGES))]
    context = _CONTEXTS[digits.below(len(_CONTEXTS))]
    least = kv.least_tokens(context, block, page)
    tight = capabilities.reserves_two_blocks and digits.below(4)
    tokens = least + digits.below(least) if tight else least * pool
    return Header(
        pool=pool,
        block=block,
        page=page,
        overlap=digits.below(6) != 5,
        needs_cpu_seq_lens=digits.below(3) != 2,
        debug=debug,
        compiled=compiled,
        token_bits=capabilities.token_bits,
        seed=digits.below(1 << 20),
        kv_tokens=tokens // page * page,
        context=context,
        plan_stream=digits.below(4) == 3,
    )


@st.composite
def traces(
    draw_: st.DrawFn,
    capabilities: Capabilities,
    *,
    debug: bool = False,
    compiled: bool = False,
    wild: bool = False,
    kv_pool: bool = False,
    longest: int = 120,
) -> Trace:
    """Legal traces (with `wild`, also with wild operations) of at most `longest` operations.

    With `kv_pool` they have one, and no wild operations.
    """
    # One draw of fixed size for the whole structure. With a draw per operation Hypothesis would
    # spend most of its examples on copying operations about within the example before; and
    # integers it also picks from constants of whatever source files it finds.
    size = _WORD * (longest + 1)
    tape = draw_(st.binary(min_size=size, max_size=size))
    words = [
        Digits(int.from_bytes(tape[start : start + _WORD], "big"))
        for start in range(0, size, _WORD)
    ]
    settle = _kv_header if kv_pool else _header
    header = settle(words[0], capabilities, debug=debug, compiled=compiled)
    state = State(header)
    operations = []
    for digits in words[1 : 2 + words[0].below(longest)]:
        operation = draw(state, digits, capabilities, wild=wild)
        apply(state, operation)
        operations.append(operation)
    return Trace(header, tuple(operations))


class Enough(Exception):
    """Raised by a consumer that needs no more traces."""


def generate(
    strategy: st.SearchStrategy[Trace], seed: int, consume: Callable[[Trace], None]
) -> None:
    """Feed traces to `consume` until it raises :class:`Enough`. The same seed gives the same ones.

    Hypothesis only generates here: what fails is shrunk on the trace itself
    (:mod:`generators.shrink`), so that traces from files and other engines shrink the same way.
    """
    round_, done = 0, False
    while True:

        @settings(
            max_examples=500,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @hypothesis.given(strategy)
        def run(trace: Trace) -> None:
            nonlocal done
            if done:  # Hypothesis asks once more for the example that raised
                raise Enough
            try:
                consume(trace)
            except Enough:
                done = True
                raise

        # Rounds of bounded size: Hypothesis remembers every example of a run.
        try:
            hypothesis.seed(seed * 1_000_003 + round_)(run)()
        except Enough:
            return
        round_ += 1
