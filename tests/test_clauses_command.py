"""``dflash-conformance clauses``: the specification, and what the last run reached of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conformance import last_run
from conformance.last_run import FILE, SCHEMA, LastRun
from conformance.sut.source import NEWEST, Tree, locate
from conformance.words import FEATURES
from reference.clauses import CLAUSES

ROOT = Path(__file__).parent.parent
RUN = LastRun("matrix", "quick", 7, {"a": {"I1": 1_000, "I3": None}, "b": {"I1": 2, "I3": 3}})
GOOD = {"schema": SCHEMA, "command": "run", "profile": "quick", "seed": 0, "trees": {}}


def command(cache: Path, *arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    """The command line with a cache of its own, after `code`."""
    return subprocess.run(
        [sys.executable, "-c", f"from conformance import cli\n{code}\ncli.main()", *arguments],
        cwd=ROOT,
        env={**os.environ, "DFLASH_CONFORMANCE_CACHE": str(cache)},
        capture_output=True,
        text=True,
    )


def small(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A run or matrix with a smaller quick profile."""
    budget = "runner.Profile('quick', 5_000, 3_000, 0, kv=1_000)"
    code = f"from conformance import runner; runner.PROFILES['quick'] = {budget}"
    return command(cache, *arguments, code=code)


def printed(cache: Path) -> dict[str, str]:
    """What ``clauses`` says of every clause, lines joined; what comes before them under ""."""
    done = command(cache, "clauses")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert max(map(len, done.stdout.splitlines())) <= 100
    first, *rest = (" ".join(part.split()) for part in done.stdout.split("\n\n"))
    return {"": first, **{text.partition(" ")[0]: text for text in rest}}


def reached(said: dict[str, str], number: str) -> str:
    return said[number].rpartition(" reached ")[2]


def test_every_clause_has_a_source() -> None:
    for clause in CLAUSES.values():
        assert clause.source.strip() == clause.source != "", clause.number


def test_it_prints_every_clause_in_full(tmp_path: Path) -> None:
    said = printed(tmp_path)
    assert said.pop("") == "last run: no run yet"
    assert list(said) == list(CLAUSES)
    for number, clause in CLAUSES.items():
        box = "black box" if clause.black_box else "white box"
        parts = [number, clause.statement, "source", clause.source]
        parts += [f"checked at {', '.join(clause.calls)} ({box})"]
        if clause.wild:
            parts += ["wild", clause.wild, f"at {', '.join(clause.wild_calls)}"]
        if clause.needs:
            parts += ["needs", FEATURES.get(clause.needs, clause.needs.replace("_", " "))]
        assert said[number] == " ".join([*parts, "reached no run yet"])
    assert list(tmp_path.iterdir()) == []  # reading leaves nothing behind


def test_it_never_imports_torch(tmp_path: Path) -> None:
    last_run.save(tmp_path, RUN)
    code = "import atexit, os, sys; atexit.register(lambda: 'torch' in sys.modules and os._exit(9))"
    assert command(tmp_path, "clauses", code=code).returncode == 0


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b"[]",
        json.dumps({**GOOD, "schema": SCHEMA + 1}).encode(),
        json.dumps({**GOOD, "seed": True}).encode(),
        json.dumps({**GOOD, "more": 1}).encode(),
        json.dumps({**GOOD, "trees": {"a": {"I1": "many"}}}).encode(),
        json.dumps({**GOOD, "trees": {"a": [1]}}).encode(),
        json.dumps({"schema": SCHEMA}).encode(),
    ],
    ids=lambda text: text[:20].decode(errors="replace"),
)
def test_a_file_that_it_cannot_read_is_no_run(tmp_path: Path, text: bytes) -> None:
    (tmp_path / FILE).write_bytes(text)
    assert last_run.load(tmp_path) is None


def test_no_file_is_no_run(tmp_path: Path) -> None:
    assert last_run.load(tmp_path) is None
    assert last_run.load(tmp_path / "absent") is None
    (tmp_path / FILE).mkdir()
    assert last_run.load(tmp_path) is None
    assert printed(tmp_path)[""] == "last run: no run yet"
    (tmp_path / FILE).rmdir()
    (tmp_path / FILE).write_text("{")
    assert reached(printed(tmp_path), "R1") == "no run yet"


def test_what_is_saved_is_loaded_and_put_into_words(tmp_path: Path) -> None:
    cache = tmp_path / "new"
    last_run.save(cache, RUN)
    assert [path.name for path in cache.iterdir()] == [FILE]
    assert last_run.load(cache) == RUN
    said = printed(cache)
    assert said[""] == "last run: matrix, profile quick, seed 7: a, b"
    assert reached(said, "I1") == "1,002 times, applies to 2 of 2 trees"
    assert reached(said, "I3") == "3 times, applies to 1 of 2 trees"
    assert reached(said, "I2") == "not part of the last run"
    alone = LastRun("run", "quick", 0, {"a": {"I1": 12_345, "I3": None}})
    assert alone.reached("I1") == "12,345 times"
    assert alone.reached("I3") == "does not apply"


def test_a_cache_that_cannot_be_written_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    last_run.save(tmp_path / "file" / "cache", RUN)
    assert (tmp_path / "file").read_text() == "kept"
    (tmp_path / FILE).mkdir()  # in the place of the file, so that nobody can replace it
    last_run.save(tmp_path, RUN)
    assert {path.name for path in tmp_path.iterdir()} == {"file", FILE}


def test_processes_that_save_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from conformance import last_run\n"
        "counts = {f'I{n}': n for n in range(2_000)}\n"
        "run = last_run.LastRun('run', 'quick', int(sys.argv[2]), {'a': counts})\n"
        "for _ in range(100): last_run.save(Path(sys.argv[1]), run)\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), seed], cwd=ROOT)
        for seed in "123"
    ]
    while any(writer.poll() is None for writer in writers):
        if (tmp_path / FILE).exists():
            assert last_run.load(tmp_path) is not None
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    last = last_run.load(tmp_path)
    assert last is not None
    assert last.seed in (1, 2, 3)
    assert len(last.trees["a"]) == 2_000
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@pytest.fixture
def cache(tmp_path: Path, newest: Tree) -> Path:
    """A cache of its own with the releases of the real one."""
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "releases").symlink_to(newest.root.parent)
    return cache


def checked(report: Path) -> dict[str, dict[str, Any]]:
    """How often every clause was checked, by tree, as report.json has it."""
    trees = json.loads((report / "report.json").read_text())["trees"]
    return {t["label"]: {c["clause"]: c["checked"] for c in t["clauses"]} for t in trees}


def test_a_run_and_a_matrix_are_remembered(tmp_path: Path, cache: Path) -> None:
    locate("0.5.14")
    (cache / FILE).mkdir()  # nobody can replace it: the run goes on without
    done = small(cache, "run")
    assert done.returncode == 0, done.stderr + done.stdout
    assert not list(cache.glob(f"{FILE}?*"))
    (cache / FILE).rmdir()

    done = small(cache, "run", "--seed", "3", "--report", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr + done.stdout
    assert last_run.load(cache) == LastRun("run", "quick", 3, checked(tmp_path / "run"))
    said = printed(cache)
    assert said[""] == f"last run: run, profile quick, seed 3: {NEWEST}"
    assert reached(said, "I3").endswith(" times")

    # A fault of the suite is no run: what was there stays.
    assert command(cache, "run", "--sglang", "no/such/path").returncode == 2
    tiny = (
        "from conformance import runner; runner.PROFILES['quick'] = runner.Profile('q', 60, 0, 0)"
    )
    assert command(cache, "run", code=tiny).returncode == 3
    assert printed(cache) == said

    done = small(cache, "matrix", f"0.5.14,{NEWEST}", "--report", str(tmp_path / "matrix"))
    assert done.returncode == 0, done.stderr + done.stdout
    counts = checked(tmp_path / "matrix")
    assert last_run.load(cache) == LastRun("matrix", "quick", 0, counts)
    said = printed(cache)
    total = sum(tree["R1"] for tree in counts.values())
    assert reached(said, "R1") == f"{total:,} times, applies to 2 of 2 trees"
    assert reached(said, "I3").endswith("applies to 1 of 2 trees")
