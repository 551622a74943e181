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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from conformance import faults
from conformance.emit import target
from conformance.errors import UserError
from conformance.faults import DROP, FAULTS, Edit, Fault, after, before
from conformance.sut.source import NEWEST, Tree, locate, release_range

ROOT = Path(__file__).parent.parent
OPERATIONS, SEED = 6000, 1
BY_NAME = {fault.name: fault for fault in FAULTS}
ASSERTED = [fault.name for fault in FAULTS if fault.expect[0] not in ("F7", "R13")]
REGISTER = "sglang.test.ci.ci_register"
UTILITIES = "sglang.test.test_utils"
PRELOADED = ["torch._inductor.config", "triton", "conformance.engine", "pytest", "hypothesis"]
LONGEST = 240  # lines of an emitted file
DOUBLED = (
    *("alloc_token_slots", "assign_req_to_token_pool_func"),
    *("SamplingBatchInfo", "checkpoint_kv_cache", "maybe_cache_unfinished_req"),
)
"""What the harness puts in the place of the tree's own, for which a test has patches."""


# -- a process with one tree, in which files run ---------------------------------------------------


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("the emitted test leans on the harness")


def open_bare(root: Path, debug: bool, faulty: tuple[Edit, ...]) -> Any:
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
    edits = faults.apply(faulty)
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
            for name in DOUBLED:
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


def load(root: Path, debug: bool, faulty: tuple[Edit, ...]) -> None:
    global _tree
    _tree = open_bare(root, debug, faulty)


def find_and_emit() -> tuple[str, dict[str, Any]]:
    """The emitted test of the tree's first deviation, and the deviation."""
    from conformance.emit.emitted import emit
    from conformance.engine import check

    _tree.device.prepare(compiled=False)
    (deviation, *_) = check(_tree, operations=OPERATIONS, seed=SEED, stop_at_first=True).deviations
    return emit(_tree, deviation.as_json()), deviation.as_json()


def show_and_emit(trace: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The emitted test of the deviation that a trace shows, or why there is none; and it."""
    from conformance.engine import replay_one
    from generators.operations import Trace
    from generators.protocol import check

    _tree.device.prepare(compiled=False)
    read = Trace.from_json(trace)
    check(read, _tree.capabilities)
    found = replay_one(_tree, read)
    assert found is not None, "the trace conforms"
    return emit_this(found.as_json()), found.as_json()


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
        self._arguments = locate(fault.release).root, fault.debug, fault.edits if faulty else ()
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


def one_of_a_kind() -> Iterator[Any]:
    """Every fault that a test can assert; those that are reported like an earlier one in sweeps."""
    seen: set[tuple[str, str]] = set()
    for name in ASSERTED:
        kind = BY_NAME[name].expect
        yield pytest.param(name, marks=[pytest.mark.sweep] if kind in seen else [])
        seen.add(kind)


@pytest.mark.parametrize("name", list(one_of_a_kind()))
def test_the_emitted_test_tells_the_faulty_tree_from_the_right_one(
    name: str, clean: Callable[[Fault], Process], tmp_path: Path
) -> None:
    fault = BY_NAME[name]
    process = Process(fault, faulty=True)
    try:
        text, deviation = process(find_and_emit)
        tell_apart(text, process, clean(fault), tmp_path / "test_emitted.py")
    finally:
        process.close()
    assert (deviation["clause"], deviation["anomaly"]) in (fault.expect, *fault.also)


def tell_apart(text: str, faulty: Process, right: Process, path: Path) -> None:
    """The test must fail on the faulty tree and pass on the right one, and fit upstream's CI."""
    path.write_text(text)
    status, output = faulty(run_alone, str(path))
    assert status == 1, output
    assert "FAILED (failures=1)" in output, output
    assert "\nAssertionError: " in output
    status, output = right(run_alone, str(path))
    assert (status, output.splitlines()[-1]) == (0, "OK"), output
    assert "Ran 1 test" in output
    assert right(parse, str(path)) == ([("CPU", "base-a-test-cpu")], True)
    assert len(text.splitlines()) <= LONGEST
    assert max(map(len, text.splitlines())) <= 100
    assert "conformance" not in text


# -- every operation -------------------------------------------------------------------------------

RUNNING: list[dict[str, Any]] = [
    {"op": "admit", "rows": [[0, 1, 5], [1, 3, 16390]]},
    {"op": "adopt"},
]
STEP: dict[str, Any] = {"op": "step", "accepted": [1, 0]}
MIXED: dict[str, Any] = {"op": "mixed", "rows": [[2, 2, 32770]]}
PREFILLED: dict[str, Any] = {"op": "seed", "rows": [[0, 1, 5], [1, 3, 16390]]}

SRT = "sglang.srt"
RELAY, BATCH = f"{SRT}.managers.overlap_utils", f"{SRT}.managers.schedule_batch"
DRAFT = f"{SRT}.speculative.dflash_info_v2"
PREBUILT = f"{SRT}.disaggregation.decode_schedule_batch_mixin"
FILTER = (DRAFT, "DFlashDraftInputV2.filter_batch")
MERGE = (DRAFT, "DFlashDraftInputV2.merge_batch")
SEEDED = (f"{SRT}.speculative.dflash_disaggregation", "build_dflash_disagg_draft_input")
TAILS = (RELAY, "FutureMap.resolve_mixed_spec_tails")


@dataclass(frozen=True)
class Case:
    """An edit of the newest tree, and a trace whose last operation shows it.

    Attributes:
        edits: the fault.
        operations, header: the trace.
        expect: call, clause and anomaly of the deviation.
        has, lacks: what the emitted text must and must not have.
    """

    edits: tuple[Edit, ...]
    operations: list[dict[str, Any]]
    expect: tuple[str, str, str]
    header: dict[str, Any] = field(default_factory=dict)
    has: str = ""
    lacks: str = ".copy()"


def law(name: str, **settings: Any) -> dict[str, Any]:
    return {"op": "law", "law": name, **settings}


SHARED_REQUESTS = (
    Edit(BATCH, "ScheduleBatch.copy", "Subscript", 0, "{1}"),
    Edit(BATCH, "ScheduleBatch.filter_batch", "Assign", 9, "{1}[:] = {2}"),
)
THREE_REVERSED = Edit(
    *(RELAY, "FutureMap._resolve_spec_extras", "Assign", 4),
    after("if len(indices) == 3:\n    indices = indices.flip(0)"),
)
SORTED = Edit(*FILTER, "If", 0, before("new_indices = new_indices.sort()[0]"))

CASES = {
    "tail one short": Case(
        (Edit(*TAILS, "Assign", 4, "{1} = fresh"),),
        [*RUNNING, STEP, MIXED],
        ("mixed-resolve", "R10", "wrong-value"),
        has="prefill.mix_with_running(running)",
    ),
    "tail's slot of the host's length": Case(
        (Edit(*TAILS, "Assign", 8, DROP),),
        [*RUNNING, STEP, MIXED],
        ("mixed-resolve", "R10", "wrong-owner"),
        has="[32775, 10, 16400]",
    ),
    "mixing clears the running batch": Case(
        (
            Edit(
                *(BATCH, "ScheduleBatch.mix_with_running", "Expr", 2),
                after("running_batch.spec_info.future_indices.zero_()"),
            ),
        ),
        [*RUNNING, MIXED],
        ("mix", "M6", "wrong-value"),
        has="    running.req_pool_indices,\n",
    ),
    "a step after mixing": Case(
        (THREE_REVERSED,),
        [*RUNNING, MIXED, {"op": "adopt"}, {"op": "step", "accepted": [1, 0, 1]}],
        ("resolve", "R1", "wrong-owner"),
        has="running = prefill",
    ),
    "a step after seeding": Case(
        (THREE_REVERSED,),
        [
            *(PREFILLED, {"op": "adopt"}, STEP, {"op": "seed", "rows": [[2, 2, 32770]]}),
            *({"op": "merge"}, {"op": "step", "accepted": [1, 0, 1]}),
        ],
        ("resolve", "R1", "wrong-owner"),
        header={"seeded": True},
        has="r2 = PrefilledRequest(2, 2, 32770, ",
    ),
    "tails stashed in reverse": Case(
        (
            Edit(
                *(RELAY, "FutureMap.stash_bonus_tokens", "Assign", 0),
                before("indices = indices.flip(0)"),
            ),
        ),
        [*RUNNING, STEP, MIXED],
        ("mixed-stash", "P1", "wrong-owner"),
        header={"overlap": False},
        has="relay.stash_bonus_tokens(",
    ),
    "tails make a buffer": Case(
        (
            Edit(
                *(RELAY, "FutureMap.stash_bonus_tokens", "Assign", 0),
                after("self.topk_p_buf = self.output_tokens_buf.clone()"),
            ),
        ),
        [*RUNNING, MIXED],
        ("mixed-stash", "P6", "phantom-row"),
        header={"overlap": False},
        has="buffers |= {",
    ),
    "seeded tokens in reverse": Case(
        (Edit(*SEEDED, "Call", 3, "RelayPayload(bonus_tokens=last_tokens_tensor.flip(0))"),),
        [PREFILLED],
        ("seed", "P1", "wrong-owner"),
        header={"seeded": True},
        has="prefill.process_prebuilt(relay)",
    ),
    "seeded lengths count the token": Case(
        (
            Edit(
                PREBUILT,
                "ScheduleBatchDisaggregationDecodeMixin.prepare_for_prebuilt",
                *("Assign", 12, after("seq_len += 1")),
            ),
        ),
        [PREFILLED],
        ("seed", "P8", "never-written"),
        header={"seeded": True, "overlap": False},
        has="prefill.prepare_for_prebuilt()",
    ),
    "seeded rows not relayed": Case(
        (Edit(*SEEDED, "Assign", 1, DROP), Edit(*SEEDED, "Expr", 0, DROP)),
        [PREFILLED],
        ("seed", "P8", "unexpected-error"),
        header={"seeded": True},
    ),
    "a copy that changes": Case(
        SHARED_REQUESTS,
        [*RUNNING, {"op": "sync"}, STEP, {"op": "preempt", "gone": [0]}, {"op": "sync"}],
        ("results", "F6", "missing-row"),
        has="launched = running.copy()",
        lacks="launched = prefill.copy()",
    ),
    "a copy that changes while the next step runs": Case(
        SHARED_REQUESTS,
        [*RUNNING, STEP, {"op": "filter", "leaving": [0]}, {"op": "step", "accepted": [1]}],
        ("results", "F6", "missing-row"),
        has="running.filter_batch([r0])",
        lacks="launched = prefill.copy()",
    ),
    "no copy": Case(
        (Edit(BATCH, "ScheduleBatch.copy", "Return", 0, "assert not self.reqs[1:]"),),
        RUNNING[:1],
        ("copy", "F6", "unexpected-error"),
        has="launched = prefill.copy()",
        lacks="running",
    ),
    "preempted rows in reverse": Case(
        (Edit(*FILTER, "If", 0, before("new_indices = new_indices.flip(0)")),),
        [
            {"op": "admit", "rows": [[0, 1, 5], [1, 3, 16390], [2, 2, 32770]]},
            *({"op": "adopt"}, {"op": "preempt", "gone": [1]}),
        ],
        ("preempt", "F1", "wrong-owner"),
        has="running.filter_batch(keep_indices=[0, 2])",
    ),
    "sorted rows": Case(
        (SORTED,),
        [*RUNNING, law("permute", mirrors=True, keep=[1, 0])],
        ("law-permute", "F1", "wrong-owner"),
        has="draft.filter_batch(ints(1, 0))",
    ),
    "sorted stored rows": Case(
        (SORTED,),
        [*RUNNING, law("permute", form="stored", keep=[1, 0])],
        ("law-permute", "F1", "wrong-owner"),
    ),
    "rows looked up in reverse": Case(
        BY_NAME["resolve-rolled"].edits,
        [*RUNNING, law("lookup", cut=1, keep=[1, 0])],
        ("law-lookup", "R1", "wrong-owner"),
        has="own.resolve_seq_lens_cpu(batch)",
    ),
    "a filter that clears what others hold": Case(
        (Edit(*FILTER, "Assign", 3, "rows = {2}\n{1}.zero_()\n{1} = rows"),),
        [*RUNNING, law("filter", keep=[1])],
        ("law-filter", "F6", "wrong-value"),
        has="held = [\n            draft.future_indices,\n",
    ),
    "a merge that clears its right operand": Case(
        (Edit(*MERGE, "Assign", 4, after("spec_info.future_indices.zero_()")),),
        [*RUNNING, law("merge", cut=1)],
        ("law-merge", "M6", "wrong-value"),
        has="before = [seen(right.future_indices)]",
    ),
}
"""What the seeded faults above do not reach, one case for every way to write it."""


@pytest.mark.parametrize("name", CASES)
def test_every_operation_is_written(
    name: str, clean: Callable[[Fault], Process], tmp_path: Path
) -> None:
    case = CASES[name]
    fault = Fault(name, "", case.edits, ("", ""))
    header = {"pool": 4, "block": 2, **case.header}
    process = Process(fault, faulty=True)
    try:
        trace = {"schema": 1, "header": header, "operations": case.operations}
        text, deviation = process(show_and_emit, trace)
        found = (deviation["difference"]["call"], deviation["clause"], deviation["anomaly"])
        assert found == case.expect, deviation["difference"]
        tell_apart(text, process, clean(fault), tmp_path / "test_emitted.py")
    finally:
        process.close()
    assert case.has in text
    assert case.lacks not in text


def test_which_stream_waits_is_refused(tmp_path: Path) -> None:
    wait = Edit(
        f"{SRT}.disaggregation.decode",
        "SchedulerDisaggregationDecodeMixin._get_new_prebuilt_batch",
        *("Expr", 9, DROP),
    )
    process = Process(Fault("wait", "", (wait,), ("", "")), faulty=True)
    try:
        header = {"pool": 4, "block": 2, "seeded": True}
        step = {"op": "step", "accepted": [0] * len(PREFILLED["rows"])}
        later = {"op": "seed", "rows": [[9, 2, 147457]]}
        operations = [PREFILLED, {"op": "adopt"}, step, later]
        answer, deviation = process(
            show_and_emit, {"schema": 1, "header": header, "operations": operations}
        )
    finally:
        process.close()
    assert deviation["clause"] == "R13"
    assert answer.startswith("refused: no test was written: which stream waits for which ")


# -- other trees -----------------------------------------------------------------------------------


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
    header: dict[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """A deviation that no tree showed, in the form of one that did."""
    trace = {
        "schema": 1,
        "header": {"pool": 4, "block": 2, "debug": debug, **(header or {})},
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


CLAIMS = {
    "step": deviation_of(debug=True, operations=[*RUNNING, STEP, STEP]),
    "filter": deviation_of(
        debug=True,
        operations=[
            *RUNNING,
            STEP,
            {"op": "sync"},
            {"op": "finish", "request": 0},
            {"op": "filter"},
        ],
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
    "given up": deviation_of(
        debug=True,
        operations=[
            {**RUNNING[0], "chunk": 1},
            *({"op": "finish", "request": 1}, {"op": "adopt"}),
        ],
        call="absorb-filter",
        aspect="requests",
    ),
    "preempt": deviation_of(
        debug=True,
        operations=[*RUNNING, {"op": "preempt", "gone": [0]}],
        call="preempt",
        aspect="slots",
    ),
    "results": deviation_of(
        debug=True,
        operations=[*RUNNING, {"op": "sync"}, STEP, STEP],
        call="results",
        aspect="slots",
    ),
    "lookup": deviation_of(
        debug=True,
        operations=[*RUNNING, law("lookup", cut=1, keep=[1, 0])],
        call="law-lookup",
        aspect="lengths",
    ),
    "mix": deviation_of(debug=True, operations=[*RUNNING, STEP, MIXED], call="mix", aspect="held"),
    "mixed": deviation_of(
        debug=True, operations=[*RUNNING, STEP, MIXED], call="mixed-resolve", aspect="host"
    ),
    "seed": deviation_of(
        debug=True,
        operations=[PREFILLED, {"op": "adopt"}, STEP],
        header={"seeded": True},
        call="resolve",
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

LATER = ("mix", "mixed", "seed")
"""What the scheduler of old releases does not issue."""


def emit_unseen(deviation: dict[str, Any]) -> str:
    """Emit without asking whether it shows; "" where the tree's scheduler does not issue it."""
    from dataclasses import replace

    from conformance.emit import emitted
    from generators.operations import Trace
    from generators.protocol import IllegalOperation, check

    try:
        check(Trace.from_json(deviation["trace"]), replace(_tree.capabilities, idle=True))
    except IllegalOperation:
        return ""
    emitted._try = lambda surface, text: ""
    return emitted.emit(_tree, deviation)


@pytest.mark.parametrize("release", release_range("0.5.14..0.5.23"))
def test_emitted_tests_fit_the_tree_they_are_written_for(release: str, tmp_path: Path) -> None:
    process = Process(Fault("right", "", (), ("", ""), release, debug=True), faulty=False)
    path = tmp_path / "test_emitted.py"
    try:
        for name, deviation in CLAIMS.items():
            text = process(emit_unseen, deviation)
            if not text:
                assert name in LATER
                continue
            path.write_text(text)
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
