"""Arguments for the kernels: a small JSON record, from which the tensors are made on any device.

A :class:`Case` names a kernel, sizes, a family of values, a memory layout and a seed; :func:`build`
makes its arguments. A row's values depend on the seed and the row's number alone, so a case with
``first=3, batch=1`` is the fourth row of the larger one by itself. Edge values are dealt to the
rows in turn; the rest comes from a hash of (seed, row, column), the same on every device.

Families: ``edges`` (in the domain of the kernel, every special value included) and, for the
selector, ``nan`` (scores with NaN) and ``exact`` (probabilities that are exact, with coins on their
cumulative boundaries).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

LAYOUTS = ("plain", "offset", "strided")
"""How arguments lie in memory: contiguous and aligned; shifted by one element; with gaps between
the rows, of a different size for every argument."""

FAMILIES = ("edges", "nan", "exact")

_TOKENS = ("int32", "int64")
_FLOATS = ("float32", "bfloat16", "float16")
_NO_FLOATS = "none"

_INT31 = 2**31 - 1


class CaseError(ValueError):
    """A record that describes no case; the message says why, in one line."""


@dataclass(frozen=True)
class Case:
    """One launch of a kernel.

    Attributes:
        kernel: name of the kernel.
        batch: rows.
        block: columns of a block; slots of a walk; elements of a hidden state in a gather.
        family: of :data:`FAMILIES`.
        layout: of :data:`LAYOUTS`.
        tokens: type of the token channel, ``int32`` or ``int64``.
        pool: rows of the request pool, or of the gathered buffers.
        width: columns of the pool; candidates per slot of a walk; top-k columns of a gather.
        floats: type of scores and of hidden states; ``none`` for a gather without those.
        first: number of the first row.
        seed: of everything that is not dealt.
        misuse: a way to pass the arguments that the wrapper may refuse, or "".
    """

    kernel: str
    batch: int
    block: int = 4
    family: str = "edges"
    layout: str = "plain"
    tokens: str = "int64"
    pool: int = 7
    width: int = 64
    floats: str = "float32"
    first: int = 0
    seed: int = 0
    misuse: str = ""

    def __post_init__(self) -> None:
        if self.kernel not in _BUILDERS:
            raise CaseError(f"there is no kernel {self.kernel!r}")
        known: dict[str, tuple[str, ...]] = {
            "layout": LAYOUTS,
            "family": FAMILIES,
            "tokens": _TOKENS,
            "floats": (*_FLOATS, _NO_FLOATS),
        }
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise CaseError(f"{name} cannot be {getattr(self, name)!r}")
        if min(self.batch, self.first) < 0 or min(self.block, self.pool, self.width) < 1:
            raise CaseError("a case needs batch and first >= 0, block, pool and width >= 1")

    def as_json(self) -> dict[str, Any]:
        """The record."""
        return asdict(self)

    def line(self) -> str:
        """The case on one line; what is at its default is left out."""
        words = [f"{self.kernel}, batch {self.batch}, block {self.block}"]
        for field in fields(self)[3:]:
            value = getattr(self, field.name)
            if value != field.default:
                words.append(f"{field.name} {value}")
        return ", ".join(words)

    @classmethod
    def from_json(cls, data: Any) -> Case:
        """Read a record.

        Raises:
            CaseError: it is none.
        """
        types = {field.name: str if field.type == "str" else int for field in fields(cls)}
        if not isinstance(data, dict) or not data.keys() <= types.keys():
            raise CaseError("a kernel case is an object with the fields of Case")
        if any(type(value) is not types[key] for key, value in data.items()):
            raise CaseError("a field of the kernel case has the wrong type")
        try:
            return cls(**data)
        except TypeError as error:
            raise CaseError(f"kernel case: {error}") from None


def build(case: Case, device: torch.device | str) -> dict[str, Any]:
    """The arguments of a case by the names that :mod:`reference.draft_block` gives them.

    Returns:
        Tensors on `device`, contiguous (the layout is for who passes them on), and numbers.
    """
    return _BUILDERS[case.kernel](case, torch.device(device))


# -- numbers --------------------------------------------------------------------------------------


def _rows(case: Case, device: torch.device) -> Tensor:
    """(batch,) the rows' numbers."""
    return torch.arange(case.first, case.first + case.batch, device=device)


def _signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


_STEPS = tuple(_signed(v) for v in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _noise(case: Case, stream: int, *columns: int, device: torch.device) -> Tensor:
    """(batch, *columns) int64 hashes from 0 to 2**62 - 1 of seed, stream, row and column.

    The SplitMix64 finalizer in wrapping int64 arithmetic, which every device does alike.
    """
    step, mix, mix_more = _STEPS
    number = _rows(case, device).reshape(-1, *(1 for _ in columns))
    for depth, count in enumerate(columns):
        shape = [1] * (len(columns) + 1)
        shape[depth + 1] = count
        number = number * (count + 1) + torch.arange(count, device=device).reshape(shape)
    value = number * step + _signed((case.seed * 1_000_003 + stream * 7_919 + 1) * _STEPS[1])
    value = (value ^ ((value >> 30) & (2**34 - 1))) * mix
    value = (value ^ ((value >> 27) & (2**37 - 1))) * mix_more
    return (value ^ ((value >> 31) & (2**33 - 1))) & (2**62 - 1)


def _dealt(case: Case, values: list[int], turn: int, device: torch.device) -> Tensor:
    """(batch,) int64, the values in turn; `turn` offsets one argument's turns against another's."""
    table = torch.tensor(values, device=device)
    return table[(_rows(case, device) * turn + case.seed) % len(values)]


_DRAWN = -1
"""Among dealt values: draw one instead."""


def _dealt_or(drawn: Tensor, case: Case, values: list[int], turn: int) -> Tensor:
    """(batch,) int64, the values in turn, and what was drawn where it is the turn of none."""
    dealt = _dealt(case, values, turn, drawn.device)
    return torch.where(dealt == _DRAWN, drawn, dealt)


_VOCABULARY = 151_936


def _token_edges(case: Case) -> list[int]:
    if case.tokens == "int32":
        return [_DRAWN, 0, _INT31, _DRAWN, 1, 2**24 + 1]
    return [_DRAWN, 0, _INT31, 2**31, _DRAWN, 2**53 + 1, 2**62 + 3, 1]


# -- prepare --------------------------------------------------------------------------------------


def _prepare(case: Case, device: torch.device) -> dict[str, Any]:
    width, block = case.width, case.block
    drawn = _noise(case, 1, device=device) % width
    # The prefix at 0, where the block just fits, where its last column does not, in the last
    # column, at the width, past it, and past what int32 holds.
    ends = (0, width - block, width - block + 1, width - 1, width, width + 3, 2**31 - 2, 2**33)
    prefixes = [_DRAWN, *(max(0, end) for end in ends)]
    cells = torch.arange(1, case.pool * width + 1, device=device).reshape(case.pool, width)
    cells[:, -1] = _INT31 - torch.arange(case.pool, device=device)
    tokens = _noise(case, 2, device=device) % _VOCABULARY
    slots = _noise(case, 3, device=device) % case.pool
    return {
        "bonus_tokens": _dealt_or(tokens, case, _token_edges(case), 1).to(_dtype(case.tokens)),
        "prefix_lens": _dealt_or(drawn, case, prefixes, 1),
        # The padding row, the last row, and one slot that several rows share.
        "slots": _dealt_or(slots, case, [case.pool - 1, _DRAWN, 0, _DRAWN, case.pool // 2], 2),
        "req_to_token": cells.to(torch.int32),
        "block": block,
        "mask_token": (151_669, 0, 1, _INT31)[case.seed % 4],
    }


# -- acceptance -----------------------------------------------------------------------------------


def _verified(case: Case, device: torch.device) -> dict[str, Any]:
    """Candidates and targets that agree on a prefix of every length."""
    block, last = case.block, case.block - 1
    row, column = _rows(case, device)[:, None], torch.arange(block, device=device)
    edges = torch.tensor([e for e in _token_edges(case) if e != _DRAWN], device=device)
    targets = _noise(case, 4, block, device=device) % _VOCABULARY
    # One edge value a row, near the end of the prefix, so that it is compared, or is the bonus.
    lengths = _dealt_or(
        _noise(case, 5, device=device) % block,
        case,
        [last, 0, min(1, last), _DRAWN, block // 2, max(0, last - 1)],
        1,
    )[:, None]
    edge = edges[(row + case.seed) % len(edges)]
    targets = torch.where(column == (lengths - row % 2).clamp(min=0), edge, targets)
    # The draft after column j answers the target at column j. Behind the first mismatch they
    # agree again in two rows of three: a count of matches is not the length of a prefix.
    wrong = torch.where(row % 3 == 0, column >= lengths, column == lengths)
    # Another token; one that is the same in its low 32 bits; the next one.
    apart = torch.tensor([97, 2**32 if case.tokens == "int64" else 5, 1], device=device)
    drafts = torch.where(wrong, targets ^ apart[(row + column) % 3], targets)
    candidates = drafts.roll(1, dims=1)
    candidates[:, 0] = _noise(case, 6, device=device) % _VOCABULARY
    return {"candidates": candidates, "targets": targets}


def _accept(case: Case, device: torch.device) -> dict[str, Any]:
    drawn = _noise(case, 7, device=device) % 100_000
    prefixes = _dealt_or(drawn, case, [0, _DRAWN, _INT31 - 1, 2**33, 1], 1)
    return {**_verified(case, device), "prefix_lens": prefixes}


# -- gather ---------------------------------------------------------------------------------------


def _gather(case: Case, device: torch.device) -> dict[str, Any]:
    pool = Case("gather", case.pool, tokens=case.tokens, seed=case.seed)
    top_p = _noise(pool, 8, case.width, device=device).to(torch.int32).view(torch.float32)
    hidden = None
    if case.floats != _NO_FLOATS:
        floats = _dtype(case.floats)
        integers = torch.int16 if floats.itemsize == 2 else torch.int32
        hidden = _noise(pool, 9, case.block, device=device).to(integers).view(floats)
    tokens = _dealt_or(_noise(pool, 10, device=device), pool, _token_edges(case), 1)
    indices = _noise(case, 11, device=device) % case.pool
    return {
        "indices": _dealt_or(indices, case, [0, case.pool - 1, _DRAWN, 0, _DRAWN], 1),
        # Any bits, NaN with a payload included: a gather copies.
        "topk_p": top_p,
        "topk_index": _noise(pool, 12, case.width, device=device) - 2**61,
        "output_tokens": tokens.to(_dtype(case.tokens)),
        "hidden_states": hidden,
    }


# -- selector -------------------------------------------------------------------------------------

_BELOW_ONE = 1.0 - 2.0**-24


def _selector(case: Case, device: torch.device) -> dict[str, Any]:
    slots, top = case.block, case.width
    shape = (slots, top, top)
    noise = _noise(case, 13, *shape, device=device)
    row = _rows(case, device)
    candidate = torch.arange(top, device=device)
    # The score's kind changes with row, slot and the candidate before it.
    kind = row[:, None] + torch.arange(slots, device=device) + case.seed
    kind = kind[:, :, None] + torch.arange(top, device=device)
    fine = (noise % 4096).to(torch.float32) / 256 - 8
    coarse = (noise % 3).to(torch.float32)
    scores = _scores(case.family, kind[..., None], fine, coarse, noise, candidate)
    coins = (_noise(case, 14, slots, device=device) % 2**24).to(torch.float32) * 2.0**-24
    steps = (_noise(case, 15, slots, device=device) % top).to(torch.float32) / top
    turn = (row[:, None] * 3 + torch.arange(slots, device=device) + case.seed) % 4
    if case.family == "exact":
        # Half the coins lie on a boundary; an untouched coin is 0.
        coins = torch.where(turn % 2 == 0, steps, coins)
    coins = torch.where(turn == 1, 0.0, coins)
    coins = torch.where(turn == 3, _BELOW_ONE, coins)
    names = _noise(case, 16, slots, device=device) % 2**20
    # All different within a slot, and not in order: 3 has no factor in common with a power of two.
    order = (candidate * 3 + row[:, None, None]) % top
    temperatures = torch.tensor([1.0, 0.5, 1e-5, 2.0, 0.75], device=device)
    return {
        "candidate_ids": names[:, :, None] * top + order,
        "scores": scores.to(_dtype(case.floats)),
        "uniforms": coins,
        "temperatures": temperatures[(row + case.seed) % 5],
        "greedy": (row + case.seed) % (2 if case.family != "exact" else 4) == 0,
    }


def _scores(
    family: str, kind: Tensor, fine: Tensor, coarse: Tensor, noise: Tensor, candidate: Tensor
) -> Tensor:
    """(n, s, k, k) float32."""
    down, up = -torch.inf, torch.inf
    if family == "exact":
        # All equal; a point mass; two halves, so that two candidates share the probability.
        point = torch.where(candidate == noise[..., :1] % candidate.numel(), 0.0, down)
        half = torch.where(candidate // 2 == candidate.numel() // 4, 0.5, down)
        equal = torch.zeros_like(fine)
        return torch.where(kind % 3 == 0, equal, torch.where(kind % 3 == 1, point, half))
    if family == "nan":
        one = torch.where(candidate == noise[..., :1] % candidate.numel(), torch.nan, fine)
        some = torch.where(noise % 3 == 0, torch.nan, up)
        every = torch.full_like(fine, torch.nan)
        return torch.where(kind % 3 == 0, one, torch.where(kind % 3 == 1, some, every))
    zeros = torch.where(noise % 2 == 0, -0.0, 0.0).to(torch.float32)
    upward = torch.where(noise % 3 == 0, up, fine)
    downward = torch.where(noise % 3 == 0, down, fine)
    nothing = torch.full_like(fine, down)
    kinds = (fine, coarse, zeros, fine, downward, torch.ones_like(fine), upward, nothing)
    scores = fine
    for number, values in enumerate(kinds):
        scores = torch.where(kind % len(kinds) == number, values, scores)
    return scores


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


_BUILDERS: dict[str, Callable[[Case, torch.device], dict[str, Any]]] = {
    "prepare": _prepare,
    "accept": _accept,
    "correct": _verified,
    "fused": _verified,
    "gather": _gather,
    "selector": _selector,
}
