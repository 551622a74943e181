"""The loop on real trees: every release is served, by its own code, and nothing is made up."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trees import copy_surface

from conformance import waivers
from conformance.pool import Job, Pool
from conformance.report import explain
from conformance.runner import crash_deviation
from conformance.sut.source import NEWEST, SUPPORTED, Tree, locate
from conformance.sut.surface import SCHEDULER, WORKER
from conformance.sut.worker import Config
from generators.schedules import Arrival, Schedule, Server

WAIVERS = [w for w in waivers.load() if "requests" in w.trace]
WITNESS = Path(waivers.PACKAGED).parent / "witnesses" / "stop-behind-limit.json"
RUN_BY_THE_LOOP = (
    "managers.scheduler",
    "managers.schedule_batch",
    "managers.schedule_policy",
    "managers.scheduler_components.batch_result_processor",
    "managers.overlap_utils",
    "speculative.dflash_worker_v2",
    "speculative.dflash_info",
    "speculative.dflash_info_v2",
    "mem_cache.memory_pool",
    "model_executor.forward_batch_info",
)
"""Modules of the tree that serving a request runs; they must be its own."""


def serve(pool: Pool, root: Path, *, steps: int = 100, seed: int = 3, **given: Any) -> Any:
    """The answer of a worker whose tree serves random schedules."""
    debug = given.pop("debug", False)
    waived = [waiver.request() for waiver in WAIVERS]
    request = {"do": "loop", "steps": steps, "seed": seed, "waivers": waived, **given}
    (answer,) = pool.run([Job("tree", Config(str(root), debug=debug), request)])
    assert answer.result is not None, answer.error or answer.crash
    return answer.result


def replayed(pool: Pool, root: Path, schedule: Schedule) -> Any:
    request = {"do": "replay", "trace": schedule.as_json()}
    (answer,) = pool.run([Job("tree", Config(str(root)), request)])
    return answer


@pytest.mark.parametrize("release", SUPPORTED)
def test_every_release_serves_schedules_as_greedy_decoding_says(release: str, pool: Pool) -> None:
    result = serve(pool, locate(release).root)
    assert not [d for d in result["deviations"] if d["waiver"] is None]
    assert result["steps"] >= 100
    assert "loop" in result["surface"]["features"]
    assert not [note for note in result["surface"]["notes"] if "loop" in note or "served" in note]
    real = result["surface"]["real"]
    assert {f"sglang.srt.{name}" for name in RUN_BY_THE_LOOP} <= set(real)
    for call in ("loop-output", "loop-accept", "loop-overlap", "loop-company", "loop-house"):
        assert result["reached"][call] > 0
    assert {f"situation loop accepts {drafts}" for drafts in range(4)} <= result["reached"].keys()


@pytest.mark.parametrize("release", ["0.5.16", NEWEST])
def test_debug_assertions_never_fire_in_the_loop(release: str, pool: Pool) -> None:
    result = serve(pool, locate(release).root, debug=True, steps=60)
    assert not [d for d in result["deviations"] if d["waiver"] is None]


def test_the_same_seed_serves_the_same(pool: Pool, newest: Tree) -> None:
    one, other = (serve(pool, newest.root, steps=60) for _ in range(2))
    assert one["reached"] == other["reached"]
    assert one["steps"] == other["steps"]


def test_the_witness_shows_on_the_releases_that_the_waiver_names(pool: Pool) -> None:
    schedule = Schedule.from_json(json.loads(WITNESS.read_text("utf-8")))
    for release, shows in (("0.5.14", True), ("0.5.17", True), ("0.5.18", False), (NEWEST, False)):
        deviation = replayed(pool, locate(release).root, schedule).result["deviation"]
        assert (deviation is not None) is shows, release
        if deviation is not None:
            assert (deviation["clause"], deviation["anomaly"]) == ("L1", "past-end")


SMALL = Schedule(Server(rows=1, agreement=8), (Arrival(0, 1, 3, 6),))


def test_what_a_tree_cannot_be_asked_for_is_said(pool: Pool) -> None:
    mixed = replace(SMALL, header=replace(SMALL.header, mixed=True))
    answer = replayed(pool, locate("0.5.18").root, mixed)
    assert answer.error["status"] == 125
    assert "asks for mixed batches" in answer.error["message"]


def test_a_setting_that_the_harness_does_not_know_costs_schedules_not_the_run(
    pool: Pool, newest: Tree, tmp_path: Path
) -> None:
    def asks(module: ast.Module) -> ast.Module:
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef) and node.name == "update_running_batch":
                asked = "if self.forward_ct == 9:\n    get_schedule().never_heard_of"
                node.body = [*ast.parse(asked).body, *node.body]
        return ast.fix_missing_locations(module)

    tree = copy_surface(newest, tmp_path / "asks", {SCHEDULER: asks})
    result = serve(pool, tree.root, steps=40)
    assert any("some schedules are not served" in note for note in result["surface"]["notes"])
    assert not result["deviations"]


def test_a_tree_whose_loop_cannot_be_built_says_so_and_is_checked_otherwise(
    pool: Pool, newest: Tree, tmp_path: Path
) -> None:
    def needs_more(module: ast.Module) -> ast.Module:
        for node in ast.walk(module):
            if isinstance(node, ast.Attribute) and node.attr == "_use_triton_prepare_block":
                node.attr = "_renamed_switch"
        return module

    tree = copy_surface(newest, tmp_path / "renamed", {WORKER: needs_more})
    result = serve(pool, tree.root)
    assert "loop" not in result["surface"]["features"]
    (note,) = [n for n in result["surface"]["notes"] if "loop clauses are not checked" in n]
    assert "_use_triton_prepare_block" in note
    assert result["steps"] == 0


def test_a_kernel_that_the_worker_gives_up_is_a_deviation(
    pool: Pool, newest: Tree, tmp_path: Path
) -> None:
    def refuses(module: ast.Module) -> ast.Module:
        for node in ast.walk(module):
            if (
                isinstance(node, ast.FunctionDef)
                and node.name == "_prepare_dflash_draft_block_unchecked"
            ):
                node.body = ast.parse("raise ValueError('no such kernel')").body
        return ast.fix_missing_locations(module)

    kernels = "sglang.kernels.ops.speculative.dflash"
    tree = copy_surface(newest, tmp_path / "refuses", {kernels: refuses})
    deviation = replayed(pool, tree.root, SMALL).result["deviation"]
    assert (deviation["clause"], deviation["anomaly"]) == ("L1", "unexpected-error")
    assert "gave up a Triton kernel" in deviation["difference"]["observed"]


def test_a_dead_process_is_told_with_its_schedule(pool: Pool, newest: Tree, tmp_path: Path) -> None:
    def dies(module: ast.Module) -> ast.Module:
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef) and node.name == "update_running_batch":
                death = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
                node.body = ast.parse(death).body
        return ast.fix_missing_locations(module)

    tree = copy_surface(newest, tmp_path / "dies", {SCHEDULER: dies})
    answer = replayed(pool, tree.root, SMALL)
    assert answer.crash is not None
    assert Schedule.from_json(answer.crash.trace).requests
    deviation = crash_deviation(answer)
    assert (deviation["clause"], deviation["anomaly"]) == ("L1", "crash")
    assert any("r0 arrives in turn 1" in line for line in explain.lines(deviation))


def replay(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "conformance", "replay", *arguments],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "COLUMNS": "120"},
        capture_output=True,
        text=True,
    )


def test_replay_of_a_schedule() -> None:
    waived = replay(str(WITNESS), "--sglang", "0.5.17")
    assert waived.returncode == 0, waived.stderr
    assert "L1 past-end: deviation, waived: stop-behind-limit  on 0.5.17" in waived.stdout
    assert "r0 arrives in turn 1: prompt 1, up to 3 tokens, stops at 40" in waived.stdout
    right = replay(str(WITNESS))
    assert right.returncode == 0
    assert f"conforms: {NEWEST}" in right.stdout


def test_bad_schedules_are_refused_in_one_line(tmp_path: Path) -> None:
    refused = replay(str(WITNESS), "--emit-test", str(tmp_path / "test.py"))
    assert refused.returncode == 2
    assert "holds a schedule; only traces become tests" in refused.stderr
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps({**SMALL.as_json(), "requests": []}))
    refused = replay(str(bad))
    assert refused.returncode == 2
    assert refused.stderr.strip().endswith("bad.json: a schedule needs a request")
