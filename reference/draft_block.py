"""What the kernels of a DFlash step must compute: block, acceptance, selector's walk, gather.

A step starts from one row per request: its bonus token, its KV length (the *prefix*) and its slot
in the request pool. It lays out a block of tokens for the draft model, the target model predicts a
token after each of them, and the longest prefix on which both agree is accepted. The token that the
target predicts after it is the next bonus token. With DFlash2 a *selector* picks the drafts: it
walks through the candidates of the block's positions, whose scores depend on the candidate before.

In SGLang: ``kernels/ops/speculative/dflash.py`` and ``gather_spec_extras.py`` (older trees keep
them below ``srt/speculative``).

Clauses of :mod:`reference.clauses`: the block's tokens (B1), positions (B2) and cache locations
(B3), acceptance (B4), the gather of an EAGLE family's relay rows (B5), the selector's walk (B6).

Shapes: n rows (requests), a block of b columns (1 <= b), s slots of a walk, k candidates each.
Token ids and prefixes are never negative. Every function works on all rows at once, on the device
of its arguments, changes none of them, and returns fresh tensors. A row's result depends on that
row's arguments alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

UNUSED = -1
"""Stands where no consumer may read; no token."""

EPSILON = 2.0**-22
"""What float32 loses of a cumulative probability, per candidate and per unit of the largest score
over temperature: the kernel divides, exponentiates and sums in float32."""


class Block(NamedTuple):
    """What the draft model is given, row by row.

    Attributes:
        ids: (n, b) int64 token ids.
        positions: (n, b) int64 places in the sequence.
        cache_locs: (n, b) int64 KV slots.
    """

    ids: Tensor
    positions: Tensor
    cache_locs: Tensor


class Acceptance(NamedTuple):
    """What one verified block comes to, row by row.

    Attributes:
        accepts: (n,) int32 drafts accepted, from 0 to b - 1.
        commits: (n,) int32 tokens committed: the accepted drafts and the bonus token.
        bonus: (n,) dtype of the targets.
        new_lens: (n,) dtype of the prefixes, the KV length after the step.
        tokens: (n, b) dtype of the targets; the first ``commits`` columns are the tokens committed,
            the others :data:`UNUSED`.
    """

    accepts: Tensor
    commits: Tensor
    bonus: Tensor
    new_lens: Tensor
    tokens: Tensor


def prepare_block(
    bonus_tokens: Tensor,
    prefix_lens: Tensor,
    slots: Tensor,
    req_to_token: Tensor,
    *,
    block: int,
    mask_token: int,
) -> Block:
    """B1-B3: the block starts with the bonus token, at the position that the prefix ends.

    Args:
        bonus_tokens: (n,) int32 or int64.
        prefix_lens: (n,) int64, also beyond the width of ``req_to_token``.
        slots: (n,) int64 rows of ``req_to_token``; requests may share one.
        req_to_token: (pool, width) int32, the KV slot of every position of every request.
        block: b.
        mask_token: what the draft model is to fill in.

    Errors:
        IndexError: a slot is not a row of the pool.
    """
    width = req_to_token.shape[1]
    columns = torch.arange(block, device=prefix_lens.device)
    ids = bonus_tokens.new_full((bonus_tokens.shape[0], block), mask_token, dtype=torch.int64)
    ids[:, 0] = bonus_tokens
    positions = prefix_lens[:, None] + columns
    cache_locs = req_to_token[slots[:, None], positions.clamp(max=width - 1)]
    return Block(ids, positions, cache_locs.masked_fill(positions >= width, 0).to(torch.int64))


def correct_drafts(candidates: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """B4: how many drafts the target agrees with, and what it says next.

    Args:
        candidates: (n, b) the block; column 0 is the token before the drafts.
        targets: (n, b), column j is what the target predicts after column j of the block.

    Returns:
        (n,) int32 length of the longest prefix with ``candidates[:, j + 1] == targets[:, j]``, and
        (n,) the target at that column, which is the bonus token.
    """
    last = candidates.shape[1] - 1
    columns = torch.arange(last + 1, dtype=torch.int32, device=candidates.device)
    agrees = candidates.roll(-1, dims=1) == targets
    # There is no draft after the last column, so the prefix ends there at the latest.
    ends = torch.where(agrees, last, columns)
    accepts = ends.amin(dim=1).to(torch.int32)
    bonus = targets.gather(1, accepts[:, None].to(torch.int64))[:, 0]
    return accepts, bonus


def accept_block(candidates: Tensor, targets: Tensor, prefix_lens: Tensor) -> Acceptance:
    """B4: commit the accepted drafts and the bonus token behind the prefix.

    Args:
        candidates, targets: as for :func:`correct_drafts`.
        prefix_lens: (n,) int64.
    """
    accepts, bonus = correct_drafts(candidates, targets)
    columns = torch.arange(candidates.shape[1], device=candidates.device)
    drafts = candidates.roll(-1, dims=1)
    tokens = torch.where(columns < accepts[:, None], drafts, UNUSED)
    tokens = torch.where(columns == accepts[:, None], bonus[:, None], tokens)
    return Acceptance(accepts, accepts + 1, bonus, prefix_lens + accepts + 1, tokens)


def gather_rows(indices: Tensor, *buffers: Tensor) -> tuple[Tensor, ...]:
    """B5: the rows ``indices`` (n,) int64 of every buffer (pool, ...), in their order.

    Errors:
        IndexError: an index is not a row of a buffer.
    """
    return tuple(buffer[indices] for buffer in buffers)


# -- the selector's walk --------------------------------------------------------------------------


def rows_on_path(scores: Tensor, path: Tensor) -> Tensor:
    """B6: the scores that a walk meets: at each slot the row of the candidate chosen before.

    Args:
        scores: (n, s, k, k) floats; ``scores[:, i, p, c]`` of candidate c at slot i after candidate
            p at slot i - 1. The walk enters slot 0 at row 0.
        path: (n, s) int64 candidates chosen, from 0 to k - 1.

    Returns:
        (n, s, k) float32.
    """
    before = path.roll(1, dims=1)
    before[:, 0] = 0
    chosen = before[:, :, None, None].expand(-1, -1, 1, scores.shape[3])
    return scores.gather(2, chosen)[:, :, 0].to(torch.float32)


def distribution(rows: Tensor, temperatures: Tensor, greedy: Tensor) -> Tensor:
    """B6: the probabilities that a walk drew from.

    A greedy request puts everything on the candidate that ``torch.argmax`` picks: the first NaN if
    there is one, else the first maximum. Any other draws from the softmax of score over
    temperature, which is NaN throughout where a score is NaN or infinite upwards, or all are
    infinite downwards.

    Args:
        rows: (n, s, k) float32 of :func:`rows_on_path`.
        temperatures: (n,) float32, positive.
        greedy: (n,) bool.

    Returns:
        (n, s, k) float64.
    """
    point = torch.zeros(rows.shape, dtype=torch.float64, device=rows.device)
    point.scatter_(2, rows.argmax(dim=2, keepdim=True), 1.0)
    spread = (rows.to(torch.float64) / temperatures[:, None, None]).softmax(dim=2)
    return torch.where(greedy[:, None, None], point, spread)


def uncertainty(rows: Tensor, temperatures: Tensor) -> Tensor:
    """How far float32 may put a cumulative probability from the truth.

    Nothing where the probabilities are exact: the scores are all equal or infinite downwards, and
    the number of equal ones is a power of two.

    Args:
        rows, temperatures: as for :func:`distribution`.

    Returns:
        (n, s, 1) float64.
    """
    candidates = rows.shape[2]
    top = rows == rows.amax(dim=2, keepdim=True)
    tied = top.sum(dim=2, keepdim=True)
    exact = (top | (rows == -torch.inf)).all(dim=2, keepdim=True) & ((tied & (tied - 1)) == 0)
    finite = torch.where(rows.isfinite(), rows, 0).abs().amax(dim=2, keepdim=True)
    scale = candidates + finite.to(torch.float64) / temperatures[:, None, None]
    return (EPSILON * scale).masked_fill(exact, 0.0)


def valid_picks(rows: Tensor, uniforms: Tensor, temperatures: Tensor, greedy: Tensor) -> Tensor:
    """B6: which candidates a walk may have chosen, slot by slot.

    Sampling inverts the cumulative distribution: the choice is the number of candidates whose
    cumulative probability the coin has reached, the last candidate at most. A cumulative
    probability is known up to :func:`uncertainty`; where it is NaN, every candidate is valid.

    Args:
        rows, temperatures, greedy: as for :func:`distribution`.
        uniforms: (n, s) float32 coins, 0 <= coin < 1.

    Returns:
        (n, s, k) bool.
    """
    probabilities = distribution(rows, temperatures, greedy)
    upper = probabilities.cumsum(dim=2)
    lower = upper.roll(1, dims=2)
    lower[:, :, 0] = 0.0
    slack = uncertainty(rows, temperatures)
    coins = uniforms[:, :, None]
    valid = (coins >= lower - slack) & (coins < upper + slack)
    valid[:, :, -1] |= coins[:, :, 0] >= lower[:, :, -1] - slack[:, :, 0]
    valid |= probabilities.isnan()
    return torch.where(greedy[:, None, None], probabilities > 0, valid)


def selector_walk(
    scores: Tensor, uniforms: Tensor, temperatures: Tensor, greedy: Tensor
) -> tuple[Tensor, Tensor]:
    """B6: one walk as the specification makes it, in float64.

    Other walks are as right where a coin lies within :func:`uncertainty` of a cumulative
    probability; :func:`valid_picks` along a given path is the judge of those.

    Args:
        scores, temperatures, greedy: as for :func:`rows_on_path` and :func:`distribution`.
        uniforms: (n, s) float32 coins.

    Returns:
        The path, (n, s) int64, and the probabilities along it, (n, s, k) float64.
    """
    path = torch.zeros(scores.shape[:2], dtype=torch.int64, device=scores.device)
    for slot in range(scores.shape[1]):
        here = rows_on_path(scores, path)[:, slot : slot + 1]
        probabilities = distribution(here, temperatures, greedy)
        reached = uniforms[:, slot : slot + 1, None] >= probabilities.cumsum(dim=2)
        drawn = reached.sum(dim=2).clamp(max=scores.shape[3] - 1)
        path[:, slot] = torch.where(greedy, here[:, 0].argmax(dim=1), drawn[:, 0])
    return path, distribution(rows_on_path(scores, path), temperatures, greedy)
