"""Emitted tests: each fails on the tree it was written for and passes on a right one, by itself."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import multiprocessing
import os
import pickle
import runpy
import shutil
import subprocess
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from conformance import faults
from conformance.emit import target
from conformance.errors import UserError
from conformance.faults import FAULTS, Fault
from conformance.sut.source import NEWEST, Tree, locate, release_range

ROOT = Path(__file__).parent.parent
OPERATIONS, SEED = 6000, 1
BY_NAME = {fault.name: fault for fault in FAULTS}
ASSERTED = [fault.name for fault in FAULTS if fault.expect[0] != "F7"]
REGISTER = "sglang.test.ci.ci_register"
UTILITIES = "sglang.test.test_utils"
PRELOADED = ["torch._inductor.config", "triton", "conformance.engine", "pytest", "hypothesis"]
LONGEST = 240  # lines of an emitted file


# -- a process with one tree, in which files run ---------------------------------------------------


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("the emitted test leans on the harness")


def open_bare(root: Path, debug: bool, fault: str | None) -> Any:
    """Load a tree so that nothing but the loader of the harness is there for an emitted file.

    Server arguments and allocation refuse, and torch is as it is; only its compiler does what
    ``TORCHDYNAMO_DISABLE`` makes of it, which torch asks for before it can be set here.
    """
    import torch

    from conformance.sut.device import PlainDevice
    from conformance.sut.surface import open_tree

    torch.set_num_threads(1)
    device = PlainDevice()
    torch.compile = lambda function=None, **_: function or (lambda same: same)  # type: ignore
    edits = faults.apply(BY_NAME[fault].edits) if fault else {}
    surface = open_tree(root, device, debug=debug, edits=edits)
    assert edits.keys() <= surface.loader.loaded.keys(), "an edited module was never loaded"
    loader = surface.loader
    loader.real = (*loader.real, REGISTER)
    loader.doubles = {
        **loader.doubles,
        f"{UTILITIES}.maybe_stub_sgl_kernel": lambda: None,
    }
    return surface


def lean_on_nothing(surface: Any) -> None:
    vars(surface.settings).clear()
    for module in list(sys.modules.values()):
        if module.__name__.startswith("sglang.") and type(module) is types.ModuleType:
            for name in ("alloc_token_slots", "assign_req_to_token_pool_func"):
                if name in vars(module):
                    setattr(module, name, refuse)


def run_file(path: str) -> tuple[int, str]:
    """``python path``, here; its exit status and what it printed."""
    output = io.StringIO()
    sys.argv = [path]
    with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as done:
            return int(done.code or 0), output.getvalue()
    return -1, output.getvalue()


def in_fork(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a fork of this process and return its result."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer: Any = function(*arguments)
        except BaseException:
            answer = AssertionError(traceback.format_exc())
        with os.fdopen(writer, "wb") as stream:
            stream.write(pickle.dumps(answer))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        answer = pickle.load(stream)
    os.waitpid(child, 0)
    if isinstance(answer, AssertionError):
        raise answer
    return answer


_tree: Any = None
"""The tree of a process that runs emitted files."""


def load(root: Path, debug: bool, fault: str | None) -> None:
    global _tree
    _tree = open_bare(root, debug, fault)


def find_and_emit() -> tuple[str, dict[str, Any]]:
    """The emitted test of the tree's first deviation, and the deviation."""
    from conformance.emit.emitted import emit
    from conformance.engine import check

    _tree.device.prepare(compiled=False)
    (deviation, *_) = check(_tree, operations=OPERATIONS, seed=SEED, stop_at_first=True).deviations
    return emit(_tree, deviation.as_json()), deviation.as_json()


def emit_this(deviation: dict[str, Any]) -> str:
    from conformance.emit.emitted import emit

    try:
        return emit(_tree, deviation)
    except UserError as error:
        return f"refused: {error}"


def run_alone(path: str) -> tuple[int, str]:
    lean_on_nothing(_tree)
    return run_file(path)


def parse(path: str) -> tuple[list[tuple[str, Any]], bool]:
    """What the tree's own parser finds in a file: (backend, suite) of each registration, and
    whether the file runs anything as a program."""
    import importlib

    registries, runs = importlib.import_module(REGISTER).ut_parse_one_file(path)
    return [(entry.backend.name, entry.effective_suite) for entry in registries], runs


class Process:
    """A process that holds one tree; each call happens in a fork of it."""

    def __init__(self, fault: Fault, *, faulty: bool) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._arguments = locate(fault.release).root, fault.debug, fault.name if faulty else None
        self._pool = ProcessPoolExecutor(
            1, mp_context=context, initializer=load, initargs=self._arguments
        )

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._pool.submit(in_fork, function, *arguments).result(timeout=180)

    def close(self) -> None:
        self._pool.shutdown()


@pytest.fixture(scope="module")
def clean() -> Iterator[Callable[[Fault], Process]]:
    """The process with a fault's release as it is."""
    held: dict[tuple[str, bool], Process] = {}

    def process(fault: Fault) -> Process:
        key = (fault.release, fault.debug)
        if key not in held:
            held[key] = Process(fault, faulty=False)
        return held[key]

    yield process
    for one in held.values():
        one.close()


@pytest.mark.parametrize("name", ASSERTED)
def test_the_emitted_test_tells_the_faulty_tree_from_the_right_one(
    name: str, clean: Callable[[Fault], Process], tmp_path: Path
) -> None:
    fault = BY_NAME[name]
    path = tmp_path / "test_emitted.py"
    process = Process(fault, faulty=True)
    try:
        text, deviation = process(find_and_emit)
        path.write_text(text)
        status, output = process(run_alone, str(path))
    finally:
        process.close()
    assert (deviation["clause"], deviation["anomaly"]) in (fault.expect, *fault.also)
    assert status == 1, output
    assert "FAILED (failures=1)" in output, output
    assert "\nAssertionError: " in output
    status, output = clean(fault)(run_alone, str(path))
    assert (status, output.splitlines()[-1]) == (0, "OK"), output
    assert "Ran 1 test" in output
    assert clean(fault)(parse, str(path)) == ([("CPU", "base-a-test-cpu")], True)
    assert len(text.splitlines()) <= LONGEST
    assert max(map(len, text.splitlines())) <= 100
    assert "conformance" not in text


# -- other trees -----------------------------------------------------------------------------------

RUNNING: list[dict[str, Any]] = [
    {"op": "admit", "rows": [[0, 1, 5], [1, 3, 16390]]},
    {"op": "adopt"},
]


def difference(**changes: Any) -> dict[str, Any]:
    base = {
        "clause": "R1",
        "anomaly": "stale-read",
        "call": "resolve",
        "aspect": "tokens",
        "expected": "",
        "observed": "",
        "rows": [],
    }
    return {**base, **changes}


def deviation_of(
    mode: str = "legal",
    debug: bool = False,
    operations: list[dict[str, Any]] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """A deviation that no tree showed, in the form of one that did."""
    trace = {
        "schema": 1,
        "header": {"pool": 4, "block": 2, "debug": debug},
        "operations": operations or [*RUNNING, {"op": "step", "accepted": [1, 0]}],
    }
    one = difference(**changes)
    return {
        "clause": one["clause"],
        "anomaly": one["anomaly"],
        "mode": mode,
        "waiver": None,
        "count": 1,
        "difference": one,
        "trace": trace,
    }


STEP: dict[str, Any] = {"op": "step", "accepted": [1, 0]}
CLAIMS = {
    "step": deviation_of(debug=True, operations=[*RUNNING, STEP, STEP]),
    "filter": deviation_of(
        debug=True,
        operations=[*RUNNING, STEP, {"op": "finish", "request": 0}, {"op": "filter"}],
        call="filter",
        aspect="future",
    ),
    "retract": deviation_of(
        debug=True,
        operations=[*RUNNING, {"op": "retract", "keep": [1]}],
        call="retract",
        aspect="held",
    ),
    "compose": deviation_of(
        debug=True,
        operations=[*RUNNING, {"op": "law", "law": "filter", "mirrors": True, "keep": [1]}],
        call="law-filter",
        aspect="sums",
    ),
    "consume": deviation_of(
        debug=True,
        operations=[*RUNNING, {"op": "law", "law": "consume-twice"}],
        call="consume-twice",
        aspect="tokens",
    ),
    "idle": deviation_of(
        debug=True,
        operations=[*RUNNING, {"op": "idle", "during": "prefill"}],
        call="idle-signals",
        aspect="unchanged",
    ),
}
"""Deviations of every kind of call that releases spell differently."""


def emit_unseen(deviation: dict[str, Any]) -> str:
    """Emit without asking whether it shows."""
    from conformance.emit import emitted

    emitted._try = lambda surface, text: ""
    return emitted.emit(_tree, deviation)


@pytest.mark.parametrize("release", release_range("0.5.14..0.5.23"))
def test_emitted_tests_fit_the_tree_they_are_written_for(release: str, tmp_path: Path) -> None:
    process = Process(Fault("right", "", (), ("", ""), release, debug=True), faulty=False)
    path = tmp_path / "test_emitted.py"
    try:
        for name, deviation in CLAIMS.items():
            path.write_text(process(emit_unseen, deviation))
            status, output = process(run_alone, str(path))
            assert (status, output.splitlines()[-1]) == (0, "OK"), f"{name}: {output}"
            assert process(parse, str(path)) == ([("CPU", "base-a-test-cpu")], True)
    finally:
        process.close()


# -- what is not written ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("deviation", "reason"),
    [
        (deviation_of(clause="F7", anomaly="undeclared", aspect="undeclared"), "census"),
        (deviation_of(mode="wild"), "contract gap"),
        (deviation_of(), "it would not fail but pass"),
    ],
    ids=["census", "wild", "does not show"],
)
def test_what_no_test_can_assert_is_refused(
    deviation: dict[str, Any], reason: str, clean: Callable[[Fault], Process]
) -> None:
    answer = clean(BY_NAME["stash-reversed"])(emit_this, deviation)
    assert answer.startswith("refused: no test was written: ")
    assert reason in answer


def test_a_crash_is_emitted_unseen_and_only_has_to_end(
    clean: Callable[[Fault], Process], tmp_path: Path
) -> None:
    process = clean(BY_NAME["stash-reversed"])
    crash = deviation_of(anomaly="crash", call="step", aspect="process")
    path = tmp_path / "test_emitted.py"
    path.write_text(process(emit_this, crash))
    assert "relay.stash(running" in path.read_text()
    status, output = process(run_alone, str(path))
    assert (status, output.splitlines()[-1]) == (0, "OK"), output


# -- the command -----------------------------------------------------------------------------------


def replay(*arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "conformance", "replay", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "120"},
        capture_output=True,
        text=True,
    )


def test_the_command_writes_the_test_and_keeps_its_status(newest: Tree, tmp_path: Path) -> None:
    fault = BY_NAME["merge-int32"]
    tree = tmp_path / "checkout" / "python" / "sglang"
    shutil.copytree(newest.root / "sglang", tree, copy_function=os.link)
    for module, transform in faults.apply(fault.edits).items():
        source = tree.parent.joinpath(*module.split(".")).with_suffix(".py")
        text = ast.unparse(transform(ast.parse(source.read_bytes())))
        source.unlink()  # the file itself is the release's
        source.write_text(text)
    operations: list[dict[str, Any]] = [
        {"op": "admit", "rows": [[0, 1, 5]]},
        {"op": "adopt"},
        {"op": "admit", "rows": [[1, 2, 16390]]},
        {"op": "merge"},
    ]
    trace, file = tmp_path / "trace.json", tmp_path / "test_emitted.py"
    trace.write_text(json.dumps(deviation_of(operations=operations)["trace"]))
    done = replay(trace, "--sglang", tree.parent.parent, "--emit-test", file)
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[0].startswith("M5 wrong-type: deviation")
    assert done.stdout.splitlines()[-1] == f"wrote {file}"
    assert "(torch.int64, [1, 2])" in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("place", ["missing/test_emitted.py", "folder"])
def test_a_file_that_cannot_be_written_is_one_line(place: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=r"^--emit-test .*; give a file that can be written$"):
        target.write(tmp_path / place, "text")
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]


def test_a_conforming_trace_gives_no_test(newest: Tree, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps(deviation_of()["trace"]))
    done = replay(trace, "--emit-test", tmp_path / "test_emitted.py")
    assert done.returncode == 2
    assert done.stderr == f"error: no test was written: the trace conforms on {NEWEST}\n"
    assert list(tmp_path.iterdir()) == [trace]
