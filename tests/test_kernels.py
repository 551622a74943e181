"""The kernels' reference, inputs, oracles and their place in a run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance import runner, waivers
from conformance.kernels import contracts, misuse, programs, sources
from conformance.kernels.catalog import KERNELS
from conformance.kernels.checker import Check
from conformance.pool import Job, Pool
from conformance.report import explain
from conformance.runner import Profile, check_trees
from conformance.sut.source import SUPPORTED, Tree, locate
from conformance.sut.worker import Config
from generators.kernel_inputs import FAMILIES, LAYOUTS, Case, CaseError, build
from reference import draft_block
from reference.clauses import CLAUSES

CPU = torch.device("cpu")
ONLY_KERNELS = Profile("kernels", 0, 0, 0, kernels=True)


# -- reference ------------------------------------------------------------------------------------


def test_a_block_past_its_row() -> None:
    table = torch.tensor([[0, 0, 0], [11, 12, 13]], dtype=torch.int32)
    block = draft_block.prepare_block(
        torch.tensor([7]), torch.tensor([2]), torch.tensor([1]), table, block=3, mask_token=9
    )
    assert [field.tolist() for field in block] == [[[7, 9, 9]], [[2, 3, 4]], [[13, 0, 0]]]
    assert {field.dtype for field in block} == {torch.int64}


@pytest.mark.parametrize(
    ("candidates", "targets", "accepts"),
    [
        ([5], [6], 0),
        ([5, 1, 2], [1, 2, 3], 2),
        ([5, 1, 9], [1, 2, 3], 1),
        ([5, 9, 2], [1, 2, 3], 0),  # a match behind a mismatch does not count
        ([3, 1, 2], [1, 2, 3], 2),  # column 0 is no draft, whatever the last target is
    ],
)
def test_acceptance_ends_at_the_first_mismatch(
    candidates: list[int], targets: list[int], accepts: int
) -> None:
    rows = torch.tensor([candidates]), torch.tensor([targets])
    found = draft_block.accept_block(*rows, torch.tensor([10]))
    unused = [draft_block.UNUSED] * (len(candidates) - accepts - 1)
    tokens = [*candidates[1 : accepts + 1], targets[accepts], *unused]
    assert found.accepts.tolist() == [accepts]
    assert found.commits.tolist() == [accepts + 1]
    assert found.bonus.tolist() == [targets[accepts]]
    assert found.new_lens.tolist() == [11 + accepts]
    assert found.tokens.tolist() == [tokens]


def walked(rows: list[float], coin: float, *, greedy: bool = False) -> list[int]:
    """The candidates that may be picked at one slot."""
    scores = torch.tensor(rows)[None, None]
    valid = draft_block.valid_picks(
        scores, torch.tensor([[coin]]), torch.tensor([1.0]), torch.tensor([greedy])
    )
    return [int(index) for index in valid[0, 0].nonzero().flatten()]


def test_picks() -> None:
    nan, down = float("nan"), float("-inf")
    assert walked([1.0, 3.0, 3.0], 0.9, greedy=True) == [1]
    assert walked([1.0, nan, nan], 0.0, greedy=True) == [1]
    assert walked([0.0, 0.0, 0.0, 0.0], 0.5) == [2]
    assert walked([0.0, 0.0, 0.0, 0.0], 0.0) == [0]
    assert walked([down, 0.0], 0.0) == [1]
    assert walked([0.0, down], 1 - 2.0**-24) == [0]
    assert walked([nan, 0.0], 0.5) == [0, 1]
    # A third is not exact in float32: a coin next to it may fall on either side.
    assert walked([0.0, 0.0, 0.0], 1 / 3) == [0, 1]
    assert walked([0.0, 0.0, 0.0], 1 / 3 + 1e-3) == [1]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_specified_walk_is_valid(family: str) -> None:
    given = build(Case("selector", 12, 4, family=family, width=4), CPU)
    rest = given["uniforms"], given["temperatures"], given["greedy"]
    path, probabilities = draft_block.selector_walk(given["scores"], *rest)
    rows = draft_block.rows_on_path(given["scores"], path)
    assert draft_block.valid_picks(rows, *rest).gather(2, path[..., None]).all()
    sums = probabilities.sum(dim=2)
    assert ((sums - 1).abs().lt(1e-9) | sums.isnan()).all()


# -- inputs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_case_is_json_and_a_row_depends_on_its_number_alone(kernel: str) -> None:
    case = Case(kernel, 7, 4, width=8, seed=3)
    assert Case.from_json(json.loads(json.dumps(case.as_json()))) == case
    whole, one = build(case, CPU), build(dataclasses.replace(case, first=4, batch=1), CPU)
    for name, value in whole.items():
        if isinstance(value, Tensor):
            expected = value[4:5] if name in KERNELS[kernel].rows else value
            assert expected.is_contiguous()
            assert torch.equal(expected.nan_to_num(), one[name].nan_to_num()), name


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "an object"),
        ({"kernel": "prepare", "batch": 1, "size": 2}, "an object"),
        ({"kernel": "prepare", "batch": "1"}, "wrong type"),
        ({"kernel": "prepare", "batch": True}, "wrong type"),
        ({"kernel": "prepare"}, "missing"),
        ({"kernel": "merge", "batch": 1}, "no kernel"),
        ({"kernel": "prepare", "batch": 1, "layout": "round"}, "cannot be"),
        ({"kernel": "prepare", "batch": -1}, ">= 0"),
    ],
)
def test_malformed_case_says_what_is_wrong(data: Any, message: str) -> None:
    with pytest.raises(CaseError, match=message):
        Case.from_json(data)


def test_the_list_is_small_and_varied() -> None:
    cases = [
        program
        for kernel in KERNELS
        for program in programs.listed(kernel, tokens="int64")
        if program.case.batch
    ]
    rows = sum(
        KERNELS[p.case.kernel].programs(p.case)
        * (2 * p.case.batch + (p.thorough and p.case.batch + (p.case.batch + 1) // 2))
        for p in cases
    )
    assert rows <= programs.LIMIT
    for kernel in KERNELS:
        mine = [program.case for program in cases if program.case.kernel == kernel]
        assert {case.layout for case in mine} >= {*LAYOUTS} - (
            {"strided"} if kernel == "fused" else set()
        )
        empty = [p for p in programs.listed(kernel, tokens="int64") if p.case.batch == 0]
        assert empty or kernel == "fused"  # launched directly: no wrapper says what it accepts
    blocks = {program.case.block for program in cases if program.case.kernel == "prepare"}
    assert {1, 2, 3, 16, 17, 100, 127, 128} <= blocks


# -- oracles --------------------------------------------------------------------------------------


def faithful(given: Mapping[str, Any]) -> dict[str, Tensor]:
    return draft_block.accept_block(**given)._asdict()


class Fake:
    """An acceptance kernel in torch that can be told to misbehave."""

    def __init__(self, spoil: str = "") -> None:
        self.spoil = spoil
        self.launches = 0

    def __call__(self, **arguments: Any) -> None:
        self.launches += 1
        into = {
            "accepts": arguments["accept_lens_out"],
            "commits": arguments["commit_lens_out"],
            "bonus": arguments["bonus_ids_out"],
            "new_lens": arguments["new_seq_lens_out"],
            "tokens": arguments["out_tokens_out"],
        }
        given = {
            "candidates": arguments["candidates"],
            "targets": arguments["target_top1"],
            "prefix_lens": arguments["prefix_lens"],
        }
        for name, value in faithful(given).items():
            into[name].copy_(value)
        tokens = into["tokens"]
        if self.spoil == "padding":
            tokens[tokens == draft_block.UNUSED] = 77
        elif self.spoil == "unwritten":
            tokens[:, -1] = -1_234_567_891 if self.launches % 2 else -987_654_323
        elif self.spoil == "outside":
            tokens.as_strided((1,), (1,), tokens.storage_offset() + tokens.numel()).zero_()
        elif self.spoil == "argument":
            given["candidates"][0, 0] += 1
        elif self.spoil == "neighbour" and tokens.shape[0] > 1:
            tokens[tokens == draft_block.UNUSED] = int(into["bonus"][0])
        elif self.spoil == "unstable":
            tokens[tokens == draft_block.UNUSED] = self.launches // 3
        elif self.spoil == "raises":
            raise IndexError("no")


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        ("", None),
        ("padding", None),
        ("unwritten", ("B7", "never-written")),
        ("outside", ("B7", "phantom-row")),
        ("argument", ("B7", "phantom-row")),
        ("neighbour", ("B4", "wrong-owner")),
        ("unstable", ("B4", "unstable")),
        ("raises", ("B4", "unexpected-error")),
    ],
)
def test_oracles(spoil: str, expected: tuple[str, str] | None) -> None:
    check = Check(KERNELS["accept"], Fake(spoil), CPU)
    found = check(Case("accept", 6, 5), thorough=True)
    assert (found and (found.clause, found.anomaly)) == expected


def test_every_misuse_can_be_carried_out() -> None:
    for record in misuse.MISUSES.values():
        assert record.clause in CLAUSES
        assert record.kind in contracts._KINDS
        assert record.kernel in KERNELS
        names = {output.name for output in KERNELS[record.kernel].outputs}
        assert record.argument in {*build(contracts.case_of(record), CPU), *names}


# -- trees ----------------------------------------------------------------------------------------


def test_seven_kernels_in_ten_releases() -> None:
    found: dict[str, set[str]] = {}
    for release in SUPPORTED:
        for kernel, source in sources.find(locate(release).root).items():
            found.setdefault(kernel, set()).add(source.digest)
    counts = {kernel: len(digests) for kernel, digests in found.items()}
    torch_forms = counts.pop("correct")
    assert counts == {"prepare": 2, "accept": 1, "fused": 1, "gather": 1, "selector": 2}
    assert torch_forms == 2


def test_a_matrix_checks_each_source_once(pool: Pool) -> None:
    trees = [locate(release) for release in ("0.5.20", "0.5.22", "0.5.23")]
    old, new, newest = check_trees(trees, ONLY_KERNELS, pool, waivers=waivers.load())
    assert [r.verdict for r in (old, new, newest)] == ["conforms"] * 3, newest.deviations
    assert old.waivers == {"selector-walk-nan": "active"}
    assert new.deviations == newest.deviations == []
    assert 0 < old.programs <= programs.LIMIT
    assert 0 < new.programs < 150  # the selector alone
    assert newest.programs == 0
    assert newest.kernels["selector"]["checked_on"] == "0.5.22"
    assert newest.kernels["prepare"]["checked_on"] == "0.5.20"
    counts = newest.clause_counts(wild=False)
    assert all(counts[number] for number in counts if number[0] == "B")


def test_without_the_waiver_the_old_selector_deviates(pool: Pool) -> None:
    (report,) = check_trees([locate("0.5.21")], ONLY_KERNELS, pool)
    (deviation,) = report.deviations
    assert (deviation["clause"], deviation["anomaly"]) == ("B6", "wrong-value")
    text = "\n".join(explain.lines(deviation))
    assert "scores = float32[1, 1, 1, 1] [nan]" in text
    assert "case (selector, batch 1, block 1, family nan" in text


def test_a_case_is_replayed_alone(pool: Pool, newest: Tree) -> None:
    case = Case("prepare", 2, 4).as_json()
    job = Job("replay", Config(str(newest.root)), {"do": "replay-case", "case": case})
    (answer,) = pool.run([job])
    assert answer.result is not None
    assert answer.result["deviation"] is None


def test_a_kernel_that_kills_its_process_is_a_result(pool: Pool, newest: Tree) -> None:
    name = "prepare with prefix_lens a row short"
    assert misuse.MISUSES[name].refuses
    job = Job("misuse", Config(str(newest.root)), {"do": "misuse", "name": name})
    (answer,) = pool.run([job])
    assert answer.crash is not None
    deviation = runner.crash_deviation(answer)
    assert (deviation["clause"], deviation["anomaly"]) == ("B7", "crash")
    assert deviation["mode"] == "wild"
    assert deviation["case"]["misuse"] == name
    assert name in "\n".join(explain.lines(deviation))
