"""A run from end to end on the newest release: reports, determinism, waivers, dead workers."""

from __future__ import annotations

import ast
import datetime
import json
import os
import shutil
import signal
import textwrap
import time
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trees import copy_surface

from conformance import waivers
from conformance.declarations import read_declarations
from conformance.errors import UserError
from conformance.pool import Job, Pool
from conformance.report import document, files
from conformance.runner import Profile, SuiteFault, TreeReport, check_trees, supported
from conformance.sut.source import Tree, cache_root
from conformance.sut.worker import Config
from conformance.tables import read_tables
from generators.operations import Trace
from reference.clauses import CLAUSES

SMALL = Profile("small", 1_500, 700, 0)


def report_of(tree: Tree, pool: Pool, **options: Any) -> TreeReport:
    (report,) = check_trees([tree], options.pop("profile", SMALL), pool, **options)
    return report


def as_document(report: TreeReport, seed: int = 0) -> dict[str, Any]:
    return document.document([report], label="0.5.23", profile="small", seed=seed, wild=False)


@pytest.fixture(scope="module")
def healthy(newest: Tree, pool: Pool) -> TreeReport:
    return report_of(newest, pool, seed=5)


def test_the_newest_release_conforms(healthy: TreeReport) -> None:
    assert healthy.verdict == "conforms"
    assert healthy.operations >= 2_200
    assert healthy.calls > 2 * healthy.operations
    assert "sglang.srt.managers.overlap_utils" in healthy.surface["real"]
    assert healthy.surface["inert"]
    assert any("is_cuda" in name for name in healthy.surface["doubles"])


def test_the_same_seed_gives_the_same_report(healthy: TreeReport, newest: Tree, pool: Pool) -> None:
    again = as_document(report_of(newest, pool, seed=5), 5)
    first = as_document(healthy, 5)
    assert first.pop("timings") is not None
    assert again.pop("timings") is not None
    assert again == first
    other = as_document(report_of(newest, pool, seed=6), 6)
    assert other["trees"][0]["reached"] != first["trees"][0]["reached"]


def test_everything_the_tree_supports_is_named_and_a_missing_one_is_noticed(
    healthy: TreeReport,
) -> None:
    names = supported(healthy.features(), wild=False)
    assert "operation idle" in names
    assert not any("wild" in name for name in names)
    blind = replace(healthy, reached=healthy.reached.copy())
    del blind.reached["operation retract"]
    assert "operation retract" in blind.unreached(wild=False)
    counts = healthy.clause_counts(wild=False)
    reached = [healthy.reached[call] for call in CLAUSES["R1"].calls]
    assert all(reached)
    assert counts["R1"] == sum(reached)


@pytest.fixture(scope="module")
def faulty(newest: Tree, pool: Pool) -> TreeReport:
    return report_of(newest, pool, fault="merge-order-relayed")


def test_a_fault_deviates_and_its_report_explains_it(
    faulty: TreeReport, tmp_path: Path, newest: Tree, pool: Pool
) -> None:
    assert faulty.verdict == "deviates"
    written = files.write(tmp_path, as_document(faulty))
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["verdict"] == "deviates"
    assert report["schema"] == document.SCHEMA
    assert report["totals"]["operations"] == faulty.operations
    legal = [d for d in report["deviations"] if not d["waiver"]]
    assert {(d["clause"], d["mode"]) for d in legal} >= {("M1", "legal")}

    suites = ET.parse(tmp_path / "junit.xml").getroot()
    failed = [
        c.get("name", "")[:2] for c in suites.iter("testcase") if c.find("failure") is not None
    ]
    assert "M1" in failed
    summary = (tmp_path / "summary.md").read_text()
    assert "M1 wrong-owner" in summary
    assert "Not covered" in summary

    # The failure file alone replays: it deviates with the fault and conforms without.
    path = written["0.5.23-M1-wrong-owner"]
    trace = Trace.loads(path.read_text())
    assert len(trace.operations) <= 6
    for fault, deviates in (("merge-order-relayed", True), (None, False)):
        config = Config(str(newest.root), debug=trace.header.debug, fault=fault)
        (answer,) = pool.run([Job("replay", config, {"do": "replay", "trace": trace.as_json()})])
        assert answer.result is not None
        assert (answer.result["deviation"] is not None) is deviates


def test_a_waiver_covers_exactly_what_its_witness_shows(
    faulty: TreeReport, newest: Tree, pool: Pool
) -> None:
    (found,) = [
        d for d in faulty.deviations if d["clause"] == "M1" and d["anomaly"] == "wrong-owner"
    ]
    waiver = waivers.Waiver(
        "known",
        "M1",
        "wrong-owner",
        found["trace"],
        "link",
        "reason",
        "effect",
        "all",
        datetime.date.max,
    )
    report = report_of(newest, pool, fault="merge-order-relayed", waivers=[waiver])
    assert report.waivers == {"known": "active"}
    covered = [d for d in report.deviations if d["waiver"] == "known"]
    assert [(d["clause"], d["anomaly"]) for d in covered] == [("M1", "wrong-owner")]
    assert covered[0]["count"] > 1
    # Waived traces go on: with the model resynchronized nothing else deviates.
    assert report.verdict == "conforms"
    assert report.operations >= 2_200

    sound = report_of(newest, pool, waivers=[waiver])
    assert sound.waivers == {"known": "stale"}
    wrong = replace(waiver, anomaly="missing-row")
    assert (
        report_of(newest, pool, fault="merge-order-relayed", waivers=[wrong]).verdict == "deviates"
    )


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_dead_worker_is_a_deviation_that_says_where_it_was(newest: Tree, pool: Pool) -> None:
    killed: list[int] = []

    def kill(job: Job, operations: int) -> None:
        if not killed:
            worker = children_of(pool.server_pid)[0]
            killed.append(children_of(worker)[0])  # which serves the job
            os.kill(killed[0], signal.SIGSEGV)

    long = Profile("long", 5_000, 100, 0)
    report = report_of(newest, pool, profile=long, progress=kill)
    assert report.verdict == "deviates"
    (crash,) = report.deviations
    assert crash["anomaly"] == "crash"
    assert crash["difference"]["observed"] == "signal 11 (SIGSEGV)"
    trace = Trace.from_json(crash["trace"])
    assert trace.operations[-1].op == crash["difference"]["call"]
    # The pool goes on with the next job.
    assert report.modes.keys() == {"debug on"}


LOOP = "while new_indices.shape[0] == 2: pass"


def _endless(tree: ast.Module) -> ast.Module:
    """Filtering down to two rows never ends."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "filter_batch":
            node.body[:0] = ast.parse(LOOP).body
    return tree


def test_a_silent_worker_is_ended_and_its_deviation_says_where_it_was(
    newest: Tree, tmp_path: Path
) -> None:
    edits = {"sglang.srt.speculative.dflash_info_v2": _endless}
    tree = copy_surface(newest, tmp_path / "endless", edits)
    with Pool(cache_root(), size=1, stall=5.0) as pool:
        began = time.monotonic()
        report = report_of(tree, pool, profile=Profile("plain", 1_000, 0, 0))
        assert time.monotonic() - began < 60.0
        (crash,) = report.deviations
        assert (crash["clause"], crash["anomaly"]) == ("R1", "crash")
        assert crash["difference"]["observed"] == "no sign of life for 5 s, killed"
        trace = Trace.from_json(crash["trace"])
        assert trace.operations[-1].op == crash["difference"]["call"]

        # Replayed, it hangs at the same operation; a session goes on with another worker.
        with pool.session("session", Config(str(tree.root))) as session:
            session.send({"do": "replay", "trace": crash["trace"]})
            again = session.receive()
            assert again.crash is not None
            assert again.crash.how == crash["difference"]["observed"]
            assert again.crash.operation == len(trace.operations) - 1
            session.send({"do": "describe"})
            assert session.receive().result is not None


def test_a_tree_without_entry_points_says_so(tmp_path: Path, pool: Pool) -> None:
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    tree = Tree("empty", tmp_path, "checkout")
    with pytest.raises(UserError, match="overlap_utils") as error:
        report_of(tree, pool)
    assert error.value.exit_status == 125
    assert "\n" not in str(error.value)
    one, other = check_trees([tree, tree], SMALL, pool)
    assert one.verdict == other.verdict == "no entry point"


def test_a_suite_fault_is_told_from_a_deviation(newest: Tree, pool: Pool) -> None:
    with pytest.raises(SuiteFault):
        report_of(newest, pool, fault="no-such-fault")


def copy_of(tree: Tree, folder: Path, **additions: str) -> Tree:
    """A tree of its own with text appended to modules (named from sglang/srt with __)."""
    shutil.copytree(tree.root / "sglang", folder / "sglang")
    for name, text in additions.items():
        path = folder.joinpath("sglang", "srt", *name.split("__")).with_suffix(".py")
        path.write_text(path.read_text(encoding="utf-8") + textwrap.dedent(text), encoding="utf-8")
    return Tree("copy", folder, "checkout")


EXTRA = """

    def _with_marks(self, before=DFlashDraftInputV2.__post_init__):
        before(self)
        self.marks = torch.arange(self.new_seq_lens.shape[0])

    def _filter(self, new_indices, new_indices_cpu=None, before=DFlashDraftInputV2.filter_batch):
        before(self, new_indices, new_indices_cpu)
        if self.future_indices is None:
            self.marks = self.marks[new_indices]

    def _merge(self, spec_info, before=DFlashDraftInputV2.merge_batch):
        before(self, spec_info)
        if self.future_indices is None:
            self.marks = torch.cat([self.marks, spec_info.marks])

    DFlashDraftInputV2.__post_init__ = _with_marks
    DFlashDraftInputV2.filter_batch = _filter
    DFlashDraftInputV2.merge_batch = _merge
"""


def test_an_undeclared_attribute_costs_only_the_census(
    newest: Tree, pool: Pool, tmp_path: Path
) -> None:
    tree = copy_of(newest, tmp_path, speculative__dflash_info_v2=EXTRA)
    report = report_of(tree, pool)
    assert [(d["clause"], d["anomaly"]) for d in report.deviations] == [("F7", "undeclared")]
    assert "marks" in report.deviations[0]["difference"]["observed"]
    assert report.operations >= 2_200
    assert report.reached["resolve"] > 300

    path = tmp_path / "declared.toml"
    path.write_text('[[field]]\nowner = "draft"\nname = "marks"\nkind = "row"\n')
    declared = read_declarations(path)
    assert report_of(tree, pool, declared=declared).verdict == "conforms"


def test_a_declared_row_that_is_not_filtered_is_noticed(
    newest: Tree, pool: Pool, tmp_path: Path
) -> None:
    broken = EXTRA.replace("self.marks = self.marks[new_indices]", "pass")
    tree = copy_of(newest, tmp_path, speculative__dflash_info_v2=broken)
    report = report_of(tree, pool, declared=[["draft", "marks", "row"]])
    assert ("F1", "phantom-row") in {(d["clause"], d["anomaly"]) for d in report.deviations}


def test_a_tree_that_needs_what_the_harness_lacks_says_so(
    newest: Tree, pool: Pool, tmp_path: Path
) -> None:
    needy = """

    def _filter(self, *args, before=ScheduleBatch.filter_batch, **kwargs):
        [r.colour for r in self.reqs]
        before(self, *args, **kwargs)

    ScheduleBatch.filter_batch = _filter
    """
    tree = copy_of(newest, tmp_path, managers__schedule_batch=needy)
    with pytest.raises(UserError, match="colour") as error:
        report_of(tree, pool)
    assert error.value.exit_status == 125


@pytest.mark.parametrize("value", ["9" * 5_000, "[" * 20_000], ids=["digits", "brackets"])
def test_what_toml_cannot_hold_is_one_line(tmp_path: Path, value: str) -> None:
    path = tmp_path / "any.toml"
    path.write_text(f"field = {value}\n")
    with pytest.raises(UserError, match="is not TOML") as error:
        read_tables(path, "field", "--declare")
    assert "\n" not in str(error.value)
    assert error.value.exit_status == 2


def test_tables_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "any.toml"
    path.write_text("[[field]]\nname = 'a'\n", encoding="utf-8-sig")
    assert read_tables(path, "field", "--declare") == [{"name": "a"}]
    with pytest.raises(UserError, match="give a TOML file"):
        read_tables(Path(""), "field", "--declare")


def test_a_report_folder_is_looked_at_before_any_work(tmp_path: Path) -> None:
    for name in ("failures", "changes"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).symlink_to("nowhere")
        with pytest.raises(UserError, match="report folder"):
            files.open_folder(folder)
    (tmp_path / "good" / "changes").mkdir(parents=True)
    files.open_folder(tmp_path / "good")


def test_a_tree_whose_kv_pools_cannot_be_driven_is_told_in_one_line(
    newest: Tree, pool: Pool, tmp_path: Path
) -> None:
    moved = copy_surface(newest, tmp_path / "moved")
    (moved.root / "sglang/srt/mem_cache/allocator/token.py").unlink()
    report = report_of(moved, pool, profile=Profile("small", 300, 0, 0, kv=300))
    assert "kv_pool" not in report.features()
    (note,) = [n for n in report.surface["notes"] if "KV" in n]
    assert note.startswith("the KV clauses are not checked: ")
    assert "TokenToKVPoolAllocator" in note
    assert report.clause_counts(wild=False)["K5"] is None
    assert report.verdict == "conforms"


def test_what_is_not_covered_depends_on_the_device() -> None:
    def lines(device: str, *, kernels: bool, kv: bool = True, loop: bool = True) -> str:
        return "\n".join(document.not_covered(device, kernels=kernels, kv=kv, loop=loop))

    on_cpu, on_gpu = lines("cpu", kernels=True), lines("cuda", kernels=True)
    assert "inert on CPU tensors" in on_cpu
    assert "interpreter" in on_cpu
    assert "pinned" in on_cpu
    for words in ("CPU", "interpreter", "pinned"):
        assert words not in on_gpu
    assert "races between device streams" in on_gpu
    assert "captured graphs" in on_gpu
    for device in ("cpu", "cuda"):
        with_kernels, without = lines(device, kernels=True), lines(device, kernels=False)
        assert "2**31" in with_kernels
        assert "the Triton kernels" not in with_kernels
        assert "the Triton kernels: this run did not check them" in without
        assert "2**31" not in without
        assert "K1 to K7" not in with_kernels
        assert "K1 to K7" in lines(device, kernels=True, kv=False)
        assert "target and draft are toys" in with_kernels
        assert "the scheduler's own loop" not in with_kernels
        assert "the scheduler's own loop" in lines(device, kernels=True, loop=False)


def test_a_report_names_its_device(healthy: TreeReport) -> None:
    report = as_document(healthy)
    assert report["environment"]["device"] == report["trees"][0]["device"] == "cpu"
    assert report["not_covered"] == document.not_covered("cpu", kernels=False, kv=False, loop=False)
    kernels = {"prepare": {"module": "m", "digest": "d", "checked_on": "0.5.23"}}
    named = {**healthy.surface, "device": "NVIDIA H200"}
    gpu = as_document(replace(healthy, device="cuda", kernels=kernels, surface=named))
    assert gpu["environment"]["device"] == "NVIDIA H200"
    assert gpu["trees"][0]["device"] == "cuda"
    assert gpu["not_covered"] == document.not_covered("cuda", kernels=True, kv=False, loop=False)


WAIVER = """
[[waiver]]
name = "a"
clause = "R6"
anomaly = "missing-error"
witness = "w.json"
link = "l"
reason = "r"
effect = "e"
releases = "all"
expires = 2999-01-01
"""


def test_waiver_files(tmp_path: Path) -> None:
    path = tmp_path / "waivers.toml"
    witness = next(Path(waivers.PACKAGED.parent, "witnesses").glob("*.json")).read_text()
    (tmp_path / "w.json").write_text(witness)
    path.write_text(WAIVER)
    assert [w.name for w in waivers.load(path)] == ["a"]
    assert waivers.load(path, today=datetime.date(2999, 1, 1)) == []
    for change, reason in (
        (("R6", "Z9"), "no clause 'Z9'"),
        (('reason = "r"', ""), "'reason' is missing"),
        (("2999-01-01", '"soon"'), "'expires' must be a date"),
        (("w.json", "gone.json"), "gone.json"),
        (("[[waiver]]", "[[waiver"), "not TOML"),
    ):
        path.write_text(WAIVER.replace(*change))
        with pytest.raises(UserError, match=reason) as error:
            waivers.load(path)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="No such file"):
        waivers.load(tmp_path / "none.toml")


def test_packaged_waivers_are_sound() -> None:
    for waiver in waivers.load():
        assert waiver.link.startswith("https://")
        assert len(waiver.effect) > 40
