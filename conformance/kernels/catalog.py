"""The kernels under test, one record each: how they are called and what they must answer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conformance.kernels.buffers import same
from generators.kernel_inputs import Case
from reference import draft_block as reference

Arguments = Mapping[str, Any]
"""A case's tensors and numbers, by the names of :func:`generators.kernel_inputs.build`."""


@dataclass(frozen=True)
class Verdict:
    """What one output must hold.

    Attributes:
        expected: the specification's answer, for people too.
        wrong: bool of the output's shape: where another value stands.
    """

    expected: Tensor
    wrong: Tensor


@dataclass(frozen=True)
class Output:
    """One tensor that a kernel writes.

    Attributes:
        name: what it is called in reports.
        clause: of :mod:`reference.clauses`.
        shape: from a case.
        dtype: from a case; None where any integer type will do.
    """

    name: str
    clause: str
    shape: Callable[[Case], tuple[int, ...]]
    dtype: Callable[[Case], torch.dtype | None]


@dataclass(frozen=True)
class Kernel:
    """One kernel or wrapper.

    Attributes:
        name: in :data:`conformance.kernels.sources.ENTRIES`.
        outputs: in the order in which differences count.
        call: runs it: (function of the tree, arguments, outputs to fill) to its outputs by name.
            Where the wrapper allocates, there is nothing to fill.
        judge: arguments and outputs to a verdict per output.
        rows: arguments with one row per request; the others do not depend on the batch.
        strided: arguments that may have gaps between their rows.
        allocates: whether the wrapper makes its outputs itself.
        programs: grid instances per row of a case, in the interpreter.
    """

    name: str
    outputs: tuple[Output, ...]
    call: Callable[[Any, Arguments, dict[str, Tensor]], Mapping[str, Tensor]]
    judge: Callable[[Arguments, Mapping[str, Tensor]], dict[str, Verdict]]
    rows: frozenset[str]
    strided: frozenset[str]
    allocates: bool = False
    programs: Callable[[Case], int] = lambda _: 1

    @property
    def clauses(self) -> tuple[str, ...]:
        """The clauses of its answers, in order."""
        return tuple(dict.fromkeys(output.clause for output in self.outputs))

    @property
    def call_name(self) -> str:
        """The call that a difference names."""
        return f"kernel-{self.name}"


def _rows(case: Case) -> tuple[int, ...]:
    return (case.batch,)


def _block(case: Case) -> tuple[int, ...]:
    return (case.batch, case.block)


def _int32(_: Case) -> torch.dtype:
    return torch.int32


def _int64(_: Case) -> torch.dtype:
    return torch.int64


def _tokens(case: Case) -> torch.dtype:
    return torch.int32 if case.tokens == "int32" else torch.int64


def _floats(case: Case) -> torch.dtype:
    dtype = getattr(torch, case.floats)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _exactly(observed: Mapping[str, Tensor], **expected: Tensor) -> dict[str, Verdict]:
    return {name: Verdict(want, observed[name] != want) for name, want in expected.items()}


# -- prepare --------------------------------------------------------------------------------------


def _call_prepare(function: Any, given: Arguments, into: dict[str, Tensor]) -> Mapping[str, Tensor]:
    named = {
        "prefix_lens": given["prefix_lens"],
        "req_pool_indices": given["slots"],
        "req_to_token": given["req_to_token"],
        "block_ids_out": into["ids"],
        "positions_out": into["positions"],
        "cache_loc_out": into["cache_locs"],
        "mask_token_id": given["mask_token"],
    }
    # The one argument left is called after the tree's token channel.
    (token,) = inspect.signature(function).parameters.keys() - named.keys()
    function(**named, **{token: given["bonus_tokens"]})
    return into


def _judge_prepare(given: Arguments, observed: Mapping[str, Tensor]) -> dict[str, Verdict]:
    return _exactly(observed, **reference.prepare_block(**given)._asdict())


PREPARE = Kernel(
    "prepare",
    (
        Output("ids", "B1", _block, _int64),
        Output("positions", "B2", _block, _int64),
        Output("cache_locs", "B3", _block, _int64),
    ),
    _call_prepare,
    _judge_prepare,
    rows=frozenset({"bonus_tokens", "prefix_lens", "slots"}),
    strided=frozenset({"bonus_tokens", "prefix_lens", "slots", "req_to_token"}),
)


# -- acceptance -----------------------------------------------------------------------------------


def _call_accept(function: Any, given: Arguments, into: dict[str, Tensor]) -> Mapping[str, Tensor]:
    function(
        candidates=given["candidates"],
        target_top1=given["targets"],
        accept_lens_out=into["accepts"],
        commit_lens_out=into["commits"],
        bonus_ids_out=into["bonus"],
        out_tokens_out=into["tokens"],
        prefix_lens=given["prefix_lens"],
        new_seq_lens_out=into["new_lens"],
    )
    return into


def _judge_accept(given: Arguments, observed: Mapping[str, Tensor]) -> dict[str, Verdict]:
    expected = reference.accept_block(**given)
    verdicts = _exactly(observed, **expected._asdict())
    # What stands behind the committed tokens is nobody's business.
    tokens = verdicts["tokens"]
    wrong = tokens.wrong & (expected.tokens != reference.UNUSED)
    return {**verdicts, "tokens": Verdict(expected.tokens, wrong)}


ACCEPT = Kernel(
    "accept",
    (
        Output("accepts", "B4", _rows, _int32),
        Output("commits", "B4", _rows, _int32),
        Output("bonus", "B4", _rows, _tokens),
        Output("new_lens", "B4", _rows, _int64),
        Output("tokens", "B4", _block, _int64),
    ),
    _call_accept,
    _judge_accept,
    rows=frozenset({"candidates", "targets", "prefix_lens"}),
    strided=frozenset({"prefix_lens"}),
)


def _call_correct(function: Any, given: Arguments, _: dict[str, Tensor]) -> Mapping[str, Tensor]:
    accepts, bonus = function(candidates=given["candidates"], target_predict=given["targets"])
    return {"accepts": accepts, "bonus": bonus}


def _judge_correct(given: Arguments, observed: Mapping[str, Tensor]) -> dict[str, Verdict]:
    accepts, bonus = reference.correct_drafts(given["candidates"], given["targets"])
    return _exactly(observed, accepts=accepts, bonus=bonus)


def _call_fused(function: Any, given: Arguments, into: dict[str, Tensor]) -> Mapping[str, Tensor]:
    batch, block = given["candidates"].shape
    # As the tree's wrapper launches it for CUDA tensors.
    lanes = 1 << (max(block - 1, 1) - 1).bit_length()
    function[(batch,)](
        given["candidates"],
        given["targets"],
        into["accepts"],
        into["bonus"],
        block,
        BLOCK=lanes,
    )
    return into


_VERIFIED = frozenset({"candidates", "targets"})

CORRECT = Kernel(
    "correct",
    (
        # Of torch operations it is int64 in some releases; whoever takes it converts it.
        Output("accepts", "B4", _rows, lambda _: None),
        Output("bonus", "B4", _rows, _int64),
    ),
    _call_correct,
    _judge_correct,
    rows=_VERIFIED,
    strided=_VERIFIED,
    allocates=True,
    programs=lambda _: 0,  # of CPU tensors it is torch operations
)

FUSED = Kernel(
    "fused",
    (Output("accepts", "B4", _rows, _int32), Output("bonus", "B4", _rows, _int64)),
    _call_fused,
    _judge_correct,
    rows=_VERIFIED,
    strided=frozenset(),
)


# -- gather ---------------------------------------------------------------------------------------

_GATHERED = ("topk_p", "topk_index", "output_tokens", "hidden_states")


def _call_gather(function: Any, given: Arguments, _: dict[str, Tensor]) -> Mapping[str, Tensor]:
    gathered = function(given["indices"], *(given[name] for name in _GATHERED))
    return {name: rows for name, rows in zip(_GATHERED, gathered, strict=True) if rows is not None}


def _judge_gather(given: Arguments, observed: Mapping[str, Tensor]) -> dict[str, Verdict]:
    names = [name for name in _GATHERED if given[name] is not None]
    rows = reference.gather_rows(given["indices"], *(given[name] for name in names))
    return {
        name: Verdict(want, ~same(observed[name], want))
        for name, want in zip(names, rows, strict=True)
    }


GATHER = Kernel(
    "gather",
    (
        Output("topk_p", "B5", lambda c: (c.batch, c.width), lambda _: torch.float32),
        Output("topk_index", "B5", lambda c: (c.batch, c.width), _int64),
        Output("output_tokens", "B5", _rows, _tokens),
        Output("hidden_states", "B5", _block, _floats),
    ),
    _call_gather,
    _judge_gather,
    rows=frozenset({"indices"}),
    strided=frozenset({"indices"}),
    allocates=True,
    # A program copies at most 1,024 columns of each buffer.
    programs=lambda c: -(-max(c.width, c.block if c.floats != "none" else 1) // 1024),
)


# -- selector -------------------------------------------------------------------------------------


def _call_selector(function: Any, given: Arguments, _: dict[str, Tensor]) -> Mapping[str, Tensor]:
    tokens, probabilities = function(
        candidate_ids=given["candidate_ids"],
        scores=given["scores"],
        uniforms=given["uniforms"],
        temperatures=given["temperatures"],
        greedy_mask=given["greedy"],
    )
    return {"tokens": tokens, "probabilities": probabilities}


def _judge_selector(given: Arguments, observed: Mapping[str, Tensor]) -> dict[str, Verdict]:
    """Judge the walk that was made: every choice, given the choices before it."""
    names, greedy = given["candidate_ids"], given["greedy"]
    temperatures = given["temperatures"]
    rest = (given["uniforms"], temperatures, greedy)
    chosen = names == observed["tokens"][:, :, None]
    path = chosen.to(torch.int8).argmax(dim=2)
    rows = reference.rows_on_path(given["scores"], path)
    # A name that is no candidate's has no place in `chosen`, so it is never valid.
    valid = (chosen & reference.valid_picks(rows, *rest)).any(dim=2)
    # A choice after an invalid one continues a walk that is wrong already.
    wrong = ~valid & (valid.cumprod(dim=1).roll(1, dims=1).index_fill(1, _first(valid), 1) == 1)
    want, _ = reference.selector_walk(given["scores"], *rest)
    truth = reference.distribution(rows, temperatures, greedy)
    seen = observed["probabilities"].to(torch.float64)
    slack = reference.uncertainty(rows, temperatures).masked_fill(greedy[:, None, None], 0.0)
    apart = ~((seen - truth).abs() <= slack) & ~(truth.isnan() & seen.isnan())
    return {
        "tokens": Verdict(names.gather(2, want[:, :, None])[:, :, 0], wrong),
        "probabilities": Verdict(truth.to(torch.float32), apart & valid[:, :, None]),
    }


def _first(values: Tensor) -> Tensor:
    return torch.zeros(1, dtype=torch.int64, device=values.device)


SELECTOR = Kernel(
    "selector",
    (
        Output("tokens", "B6", _block, _int64),
        Output(
            "probabilities", "B6", lambda c: (c.batch, c.block, c.width), lambda _: torch.float32
        ),
    ),
    _call_selector,
    _judge_selector,
    rows=frozenset({"candidate_ids", "scores", "uniforms", "temperatures", "greedy"}),
    strided=frozenset({"candidate_ids", "scores", "uniforms", "temperatures", "greedy"}),
    allocates=True,
)

KERNELS = {kernel.name: kernel for kernel in (PREPARE, ACCEPT, CORRECT, FUSED, GATHER, SELECTOR)}
"""Every kernel by name."""
