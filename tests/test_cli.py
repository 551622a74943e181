"""The command line: exit statuses, and one line for everything that is the caller's to solve."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conformance.sut.source import NEWEST, Tree
from generators.operations import SCHEMA

ROOT = Path(__file__).parent.parent


def call(*arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "conformance", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "120", **environment},
        capture_output=True,
        text=True,
    )


GOOD = {
    "schema": SCHEMA,
    "header": {"pool": 4, "block": 2},
    "operations": [
        {"op": "admit", "rows": [[0, 1, 5]]},
        {"op": "adopt"},
        {"op": "step", "accepted": [1]},
    ],
}


def trace_file(folder: Path, **changes: Any) -> Path:
    path = folder / "trace.json"
    path.write_text(json.dumps({**GOOD, **changes}))
    return path


def refused(done: subprocess.CompletedProcess[str], reason: str, status: int = 2) -> None:
    assert done.returncode == status, done.stderr + done.stdout
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert reason in lines[0]
    assert "Traceback" not in done.stdout


def test_help_and_clauses_answer() -> None:
    assert "Exit status" in call("--help").stdout
    printed = call("clauses").stdout
    assert "R1   Every row receives its own request's last token." in printed


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("run", "--sglang", "9.9.9"), "9.9.9"),
        (("run", "--sglang", "no/such/path"), "no/such/path"),
        (("matrix", "0.5.23..0.5.14"), "0.5.23..0.5.14"),
        (("matrix", "1.0..2.0"), "1.0"),
        (("run", "--device", "cuda"), "no GPU"),
        (("run", "--imports", "real"), "isolated only"),
        (("run", "--map", "nonsense"), "MODULE=PATH"),
        (("run", "--declare", "no-such.toml"), "no-such.toml"),
        (("run", "--waivers", "no-such.toml"), "no-such.toml"),
        (("replay", "no-such.json"), "no-such.json"),
        (("run", "--report", ""), "give --report a folder"),
        (("run", "--waivers", ""), "give --waivers a TOML file"),
        (("run", "--waivers", "."), "give a TOML file"),
        (("gate", "--base", "a", "--head", "b", "--accept", ""), "give --accept a TOML file"),
        (("replay", ""), "give a trace file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_bad_requests_are_refused_in_one_line(arguments: tuple[str, ...], reason: str) -> None:
    refused(call(*arguments), reason)


def test_a_path_without_sglang(tmp_path: Path) -> None:
    refused(call("run", "--sglang", tmp_path), str(tmp_path))


def test_a_corrupt_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "sglang-0.5.23-py3-none-any.whl"
    wheel.write_bytes(b"PK\x03\x04 not really")
    refused(call("run", "--sglang", wheel), wheel.name)


def test_no_network_and_an_empty_cache(tmp_path: Path) -> None:
    done = call(
        "run",
        DFLASH_CONFORMANCE_CACHE=str(tmp_path),
        PIP_CONFIG_FILE=os.devnull,
        PIP_INDEX_URL="http://127.0.0.1:9/simple",
        PIP_RETRIES="0",
    )
    refused(done, NEWEST)
    refused(call("run", "--offline", DFLASH_CONFORMANCE_CACHE=str(tmp_path / "x")), "offline")


def test_malformed_traces(tmp_path: Path, newest: Tree) -> None:
    path = tmp_path / "trace.json"
    path.write_text("{")
    refused(call("replay", path), "not JSON")
    refused(call("replay", trace_file(tmp_path, schema=SCHEMA + 1)), "schema 2")
    refused(call("replay", trace_file(tmp_path, operations=[{"op": "warp"}])), "alphabet")
    illegal = trace_file(tmp_path, operations=[{"op": "adopt"}])
    refused(call("replay", illegal), "no prefill batch")


def test_an_operation_the_tree_lacks(tmp_path: Path, newest: Tree) -> None:
    idle = trace_file(tmp_path, operations=[{"op": "idle"}])
    assert call("replay", idle).returncode == 0
    # git bisect skips it: whether such a tree is good or bad, the trace cannot tell.
    refused(call("replay", idle, "--sglang", "0.5.14"), "no idle batch occurs", status=125)
    assert call("replay", idle, "--sglang", "0.5.14", "--wild").returncode == 0


def test_fetch_takes_releases_only(tmp_path: Path) -> None:
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").write_text("")
    refused(call("fetch", tmp_path), "not a release")


def test_an_unwritable_report_folder(tmp_path: Path, newest: Tree) -> None:
    (tmp_path / "file").write_text("")
    refused(call("run", "--report", tmp_path / "file" / "report"), "report folder")
    assert not (tmp_path / "file" / "report").exists()
    (tmp_path / "half").mkdir()
    for name in ("failures", "changes"):
        (tmp_path / "half" / name).write_text("")
        refused(call("run", "--report", tmp_path / "half"), "report folder")
        (tmp_path / "half" / name).unlink()
        if name == "failures":
            (tmp_path / "half" / name).mkdir()


def test_replay_of_a_sound_trace(tmp_path: Path, newest: Tree) -> None:
    done = call("replay", trace_file(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "step accepted [1]" in done.stdout
    assert "conforms" in done.stdout


def test_replay_of_a_witness_is_waived(newest: Tree) -> None:
    done = call("replay", ROOT / "conformance" / "witnesses" / "consume-twice-compiled.json")
    assert done.returncode == 0, done.stderr
    assert "waived: consume-once-assertion-compiled-away" in done.stdout


NAN = ROOT / "conformance" / "witnesses" / "selector-nan.json"


def test_replay_of_a_kernel_case(tmp_path: Path, newest: Tree) -> None:
    done = call("replay", NAN, "--sglang", "0.5.20")
    assert done.returncode == 0, done.stderr
    assert "B6 wrong-value: deviation, waived: selector-walk-nan  on 0.5.20" in done.stdout
    assert "case (selector, batch 1, block 1, family nan, pool 1, width 1)" in done.stdout
    assert "scores = float32[1, 1, 1, 1] [nan]" in done.stdout

    done = call("replay", NAN, "--sglang", "0.5.23")
    assert done.returncode == 0, done.stderr
    case = "selector, batch 1, block 1, family nan, pool 1, width 1"
    assert done.stdout.splitlines() == [case, "conforms: 0.5.23"]

    refused(call("replay", NAN, "--sglang", "0.5.14"), "this tree has no", status=125)
    test = tmp_path / "test_it.py"
    refused(call("replay", NAN, "--sglang", "0.5.20", "--emit-test", test), "only traces")
    assert not test.exists()


def test_replay_of_a_kernel_case_that_no_waiver_covers(tmp_path: Path) -> None:
    # As a failure file has it; the waiver of the same clause has a witness that conforms.
    failure = tmp_path / "failure.json"
    case = json.loads(NAN.read_text())["case"]
    failure.write_text(json.dumps({"clause": "B6", "trace": None, "case": case}))
    (tmp_path / "w.json").write_text(json.dumps({"case": {**case, "family": "edges"}}))
    text = (ROOT / "conformance" / "waivers.toml").read_text()
    (own,) = [part for part in text.split("[[waiver]]") if "selector-nan.json" in part]
    own = "[[waiver]]" + own.replace("witnesses/selector-nan.json", "w.json")
    (tmp_path / "waivers.toml").write_text(own)
    code = (
        "from pathlib import Path; from conformance import cli, waivers\n"
        f"waivers.load.__defaults__ = (Path({str(tmp_path / 'waivers.toml')!r}),)\n"
        "cli.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "replay", str(failure), "--sglang", "0.5.20"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    assert "B6 wrong-value: deviation  on 0.5.20" in done.stdout


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({"kernel": "warp", "batch": 1}, "no kernel 'warp'"),
        ({"kernel": "selector", "batch": "1"}, "wrong type"),
        ({"kernel": "selector", "batch": 1, "misuse": "x"}, "has no misuse 'x'"),
    ],
)
def test_malformed_kernel_cases(
    tmp_path: Path, newest: Tree, case: dict[str, Any], reason: str
) -> None:
    (tmp_path / "case.json").write_text(json.dumps({"case": case}))
    refused(call("replay", tmp_path / "case.json"), reason)


def test_replay_of_a_tree_without_entry_points(tmp_path: Path) -> None:
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").write_text("")
    refused(call("replay", trace_file(tmp_path), "--sglang", tmp_path), "overlap_utils", 125)


def test_nothing_is_written_outside_report_and_cache(tmp_path: Path, newest: Tree) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "conformance", "replay", str(trace_file(tmp_path))],
        cwd=work,
        env={
            **os.environ,
            "HOME": str(home),
            "PYTHONPATH": str(ROOT),
            "DFLASH_CONFORMANCE_CACHE": str(newest.root.parent.parent),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert list(home.rglob("*")) == []
    assert list(work.rglob("*")) == []


def with_budget(plain: int, debug: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line with a smaller quick profile."""
    code = (
        "import sys; from conformance import cli, runner\n"
        f"runner.PROFILES['quick'] = runner.Profile('quick', {plain}, {debug}, 0, kv=1_000)\n"
        "cli.main()"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True
    )


def test_a_run_that_reaches_too_little_is_a_fault_of_the_suite(newest: Tree) -> None:
    done = with_budget(60, 60, "run")
    assert done.returncode == 3
    assert "never reached" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_small_run_and_its_report(tmp_path: Path, newest: Tree) -> None:
    done = with_budget(5_000, 3_000, "run", "--report", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr + done.stdout
    assert "conforms: 0.5.23" in done.stdout
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "report.json",
        "junit.xml",
        "summary.md",
        "annotations.txt",
        "failures",
    }


def test_clauses_become_pytest_items(tmp_path: Path, newest: Tree) -> None:
    (tmp_path / "smaller.py").write_text(
        "from conformance import runner\n"
        "runner.PROFILES['quick'] = runner.Profile('quick', 3_000, 2_000, 100, kv=1_000)\n"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "--pyargs", "conformance.suite", "--sglang", NEWEST),
            *("-p", "smaller", "-p", "no:cacheprovider", "-q", "-c", os.devnull),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "3 xfailed" in done.stdout  # R6, K2 and K7 have waivers
    assert "failed," not in done.stdout
