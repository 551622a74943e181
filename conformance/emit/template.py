"""The file around the calls: docstring, imports, helpers, one test; only what the calls name."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from conformance.emit.calls import CARRIED
from conformance.sut import surface as sut
from conformance.sut.surface import SLOTS_APART, Surface
from generators.operations import Header

_GETTERS = ("get_spec", "get_server_args", "get_global_server_args")
_ALLOCATE = (
    "alloc_token_slots",
    "alloc_paged_token_slots_extend",
    "get_last_loc",
    "assign_req_to_token_pool_func",
)
_CACHE = ("checkpoint_kv_cache", "maybe_cache_unfinished_req")
_UTILS = "sglang.srt.speculative.spec_utils"

_MIXED = {
    "seqlen": "@property\ndef seqlen(self):\n    return self.kv_committed_len + 1",
    "refresh_fill_ids": "def refresh_fill_ids(self):\n    pass",
    "_refresh_fill_ids": "def _refresh_fill_ids(self):\n    pass",
    "set_extend_range": "def set_extend_range(self, start, end):\n    pass",
}
"""Methods of a request that a mixed batch calls where the tree names them."""

IMPORTS = {
    "FutureMap": sut.RELAY,
    "RelayPayload": sut.RELAY,
    "resolve_forward_inputs": sut.RELAY,
    "ScheduleBatch": sut.BATCH,
    "Scheduler": sut.SCHEDULER,
    "CaptureHiddenMode": sut.MODES,
    "ForwardMode": sut.MODES,
    "DFlashDraftInputV2": sut.DRAFT,
    "DFlashWorkerV2": sut.WORKER,
    "SpeculativeAlgorithm": sut.ALGORITHM,
}
"""Names of the tree, and the modules that define them."""

_HELPERS = {
    "RULE": "<rule>",
    "DEVICE": 'DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")',
    "UNWRITTEN": """
# What torch.empty holds while torch runs deterministic: a row that nobody wrote.
UNWRITTEN = torch.iinfo(torch.int64).max""",
    "SPEC": """
SPEC = SimpleNamespace(
    speculative_algorithm="DFLASH",
    speculative_num_draft_tokens=<block>,
    enable_multi_layer_eagle=False,
)""",
    "POOL": """
# Row 0 of the request pool is padding.<kv slots>
POOL = SimpleNamespace(
    req_to_token=<table>,
    req_generation=torch.zeros(<pool>, dtype=torch.int64),
)""",
    "WORKER": """
# Its builders of draft inputs use nothing that a worker sets up.
WORKER = object.__new__(DFlashWorkerV2)""",
    "SCHEDULER": "SCHEDULER = SimpleNamespace(record_batch_in_overlap=lambda batch: None)",
    "UNWRITTEN_INT32": """
# What torch.empty holds while torch runs deterministic: a row that nobody wrote.
UNWRITTEN_INT32 = torch.iinfo(torch.int32).max""",
    "ints": """
def ints(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device=DEVICE)""",
    "seen": """
def seen(value):
    return (value.dtype, value.tolist()) if torch.is_tensor(value) else value""",
    "storage": """
def storage(tensor):
    return tensor.untyped_storage().data_ptr()""",
    "Request": '''
class Request:
    """What a batch asks of a request; its KV cache is allocated for the whole test."""

    kv_allocated_len = 1 << 30
    sampling_params = SimpleNamespace(top_k=1)
    decode_batch_idx = 0
    grammar = None
    return_logprob = False
    return_hidden_states = False<mode>

    def __init__(self, rid, length):
        self.rid = rid
        self.kv_committed_len = length
        self.done = False
        self.kv = self

    def finished(self):
        return self.done<mixed>''',
    "PrefilledRequest": '''
class PrefilledRequest(Request):
    """One that a prefill server has prefilled: its whole prompt is in the pool."""

    <extend>
    multimodal_inputs = None
    retracted_stain = True  # its cached tokens were counted before
    swa_branching_seqlen = None

    def __init__(self, rid, slot, length, token, earlier=0):
        super().__init__(rid, length)
        self.req_pool_idx = slot
        self.origin_input_ids = range(length - earlier)
        <prefix>
        self.output_ids = [-7] * earlier + [token]''',
    "SamplingRows": '''
class SamplingRows:
    """Stands for the sampling parameters of a batch: whose row is whose."""

    def __init__(self, rows):
        self.rows = rows

    def filter_batch(self, keep_indices, *_):
        self.rows = [self.rows[i] for i in keep_indices]

    def merge_batch(self, other):
        self.rows = self.rows + other.rows

    def copy_for_forward(self):
        return SamplingRows(self.rows)''',
    "make_batch": '''
def make_batch(requests, slots, lengths):
    """A batch as the scheduler prepares it for a prefill."""
    batch = ScheduleBatch(
        reqs=requests,
        model_config=SimpleNamespace(is_encoder_decoder=False<vocabulary>),
        token_to_kv_pool_allocator=SimpleNamespace(page_size=<page>),
        req_to_token_pool=POOL,
        tree_cache=SimpleNamespace(supports_swa=lambda: False),
        enable_overlap=<overlap>,
        device=str(DEVICE),
        spec_algorithm=SpeculativeAlgorithm.DFLASH,
    )
    batch.forward_mode = ForwardMode.EXTEND
    batch.sampling_info = SamplingRows([request.rid for request in requests])
    batch.req_pool_indices = ints(*slots)
    batch.req_pool_indices_cpu = torch.tensor(slots, dtype=torch.int64)
    batch.seq_lens = ints(*lengths)
    batch.seq_lens_cpu = torch.tensor(lengths, dtype=torch.int64)
    batch.seq_lens_sum = sum(lengths)
    batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
    batch.prefill_input_ids_cpu = batch.seq_lens_cpu  # as good as any token ids
    return batch''',
}
"""Definitions by name, in the order of the file; the dictionary's order is the file's."""


@dataclass(frozen=True)
class Case:
    """The test that a file is written for.

    Attributes:
        docstring: wrapped text.
        rule: one sentence, what a failed assertion says.
        name: of the method.
        body: its statements.
        operand: source of the function ``operand``, or "".
        width: columns of the table of KV slots.
        skipped: decorator of the method, or "".
    """

    docstring: str
    rule: str
    name: str
    body: list[str]
    operand: str
    width: int
    skipped: str


def render(surface: Surface, header: Header, case: Case) -> str:
    """The whole file, for one tree and one trace setting."""
    code = "\n".join(case.body)
    setup = _setup(surface, code)
    helpers = _helpers(surface, header, case)
    condition = case.skipped.removeprefix("@")
    used = _used("\n".join([*setup, code, condition]), helpers)
    imports: dict[str, list[str]] = {}
    for name in sorted(used & IMPORTS.keys()):
        imports.setdefault(IMPORTS[name], []).append(name)
    debug = "true" if header.debug else "false"
    binds = [f'os.environ["SGLANG_IS_IN_CI"] = "{debug}"  # binds debug assertions at import']
    if header.debug and not header.compiled:
        binds.append('os.environ["TORCHDYNAMO_DISABLE"] = "1"  # they run as they are written')
    methods = [*filter(None, [case.skipped]), f"def {case.name}(self):", *_indented(case.body)]
    if setup:
        methods = ["def setUp(self):", *_indented(setup), "", *methods]
    cases = "\n".join(["class TestDFlashHandOver(unittest.TestCase):", *_indented(methods)])
    register = f'register_cpu_ci(est_time={60 if header.compiled else 20}, suite="{_SUITE}")'
    definitions = [text for name, text in helpers.items() if name in used]
    lines = [
        f'"""{case.docstring}\n"""',
        "",
        *(["import dataclasses"] if "dataclasses" in used else []),
        "import os",
        "import unittest",
        *(["from types import SimpleNamespace"] if "SimpleNamespace" in used else []),
        *(["from unittest import mock"] if "mock" in used else []),
        "",
        *binds,
        "",
        "import torch",
        "",
        "from sglang.test.ci.ci_register import register_cpu_ci",
        "from sglang.test.test_utils import maybe_stub_sgl_kernel",
        "",
        "maybe_stub_sgl_kernel()  # before anything imports it",
        "",
        *(_import(module, names) for module, names in sorted(imports.items())),
        *_spaced([register, *definitions, cases, _MAIN]),
    ]
    return "\n".join(lines) + "\n"


_SUITE = "base-a-test-cpu"
_MAIN = 'if __name__ == "__main__":\n    unittest.main()'


def _spaced(definitions: list[str]) -> Iterator[str]:
    """Two blank lines around functions and classes, one between constants."""
    former = ""
    for text in definitions:
        blocks = any(one.startswith(("def ", "class ")) for one in (former, text))
        yield from ["", ""] if blocks else [""]
        yield text
        former = text


def _indented(lines: Iterable[str]) -> list[str]:
    return textwrap.indent("\n".join(lines), "    ").split("\n")


def _import(module: str, names: list[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= 88:
        return line
    return "\n".join([f"from {module} import (", *(f"    {name}," for name in names), ")"])


def _used(code: str, helpers: dict[str, str]) -> set[str]:
    """Names that the code uses, and those that the helpers among them use."""
    used: set[str] = set()
    texts = [code]
    while texts:
        tree = ast.parse(texts.pop())
        names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} - used
        used |= names
        texts += [helpers[name] for name in names & helpers.keys()]
    return used


def _helpers(surface: Surface, header: Header, case: Case) -> dict[str, str]:
    """The definitions with the tree's and the trace's settings in them."""
    mode = "return_hidden_states_mode"
    modes = mode in vars(surface.schedule_batch)["__dataclass_fields__"]
    code = "\n".join(case.body)
    seeds, mixes = "PrefilledRequest(" in code, "mix_with_running(" in code
    settings = {
        **(_prefilled(surface) if seeds else {}),
        "<mixed>": _mixed(surface) if mixes else "",
        "<vocabulary>": ", vocab_size=1 << 31" if seeds else "",
        "<kv slots>": f" Position p of row r has KV slot {SLOTS_APART} * r + p." if mixes else "",
        "<table>": _table(header.pool, case.width),
        "<rule>": _sentence(case.rule),
        "<block>": str(header.block),
        "<pool>": str(header.pool),
        "<page>": str(header.page),
        "<overlap>": str(header.overlap),
        "<mode>": f"\n    {mode} = CaptureHiddenMode.NULL" if modes else "",
    }
    texts = {}
    for name, text in {**_HELPERS, "operand": case.operand}.items():
        for hole, value in settings.items():
            text = text.replace(hole, value)
        texts[name] = text.strip("\n")
    return texts


def _names_in(surface: Surface, method: str) -> set[str]:
    """Names that a method of the tree's batch uses, its comprehensions included."""
    codes = [inspect.unwrap(getattr(surface.schedule_batch, method)).__code__]
    names: set[str] = set()
    for code in codes:
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if inspect.iscode(constant)]
    return names


def _mixed(surface: Surface) -> str:
    """What a mixed batch asks of a request beside."""
    names = _names_in(surface, "mix_with_running")
    methods = [source for name, source in _MIXED.items() if name in names]
    return "".join("\n\n" + textwrap.indent(source, "    ") for source in methods)


def _prefilled(surface: Surface) -> dict[str, str]:
    """What the tree reads of a request that arrives prefilled."""
    lengths = "prefix_len" in _names_in(surface, "prepare_for_prebuilt")
    return {
        "<extend>": "extend_len = 0" if lengths else "extend_range = SimpleNamespace(length=0)",
        "<prefix>": "self.prefix_len = length"
        if lengths
        else "self.prefix_indices = range(length)",
    }


def _table(rows: int, width: int) -> str:
    """The pool's table of KV slots; where none is looked up its contents do not matter."""
    if width == 1:
        return f"torch.zeros(({rows}, 1), dtype=torch.int32, device=DEVICE)"
    size = width + (rows - 1) * SLOTS_APART
    lines = [
        f"torch.arange({size}, dtype=torch.int32, device=DEVICE).as_strided(",
        f"        ({rows}, {width}), ({SLOTS_APART}, 1)",
        "    )",
    ]
    return "\n".join(lines)


def _sentence(rule: str) -> str:
    lines = textwrap.wrap(rule, 70)
    if len(lines) == 1:
        return f'RULE = "{rule}"'
    parts = [line + " " for line in lines[:-1]] + lines[-1:]
    return "\n".join(["RULE = (", *(f'    "{part}"' for part in parts), ")"])


def _setup(surface: Surface, code: str) -> list[str]:
    """What the process must have while the calls run: server arguments, a patient device."""
    lines: list[str] = []
    patches: list[tuple[str, ...]] = []
    if "FutureMap(" in code:
        lines += [
            "# torch.empty then fills memory: no unwritten row looks right by accident.",
            "torch.use_deterministic_algorithms(True, warn_only=True)",
            "self.addCleanup(torch.use_deterministic_algorithms, False)",
        ]
    if "prepare_for_decode" in code:
        prepare = surface.draft_input.prepare_for_decode
        patches += _settings(sut.DRAFT, prepare)
        if CARRIED in surface.decode_arguments:
            names = inspect.unwrap(prepare).__code__.co_names
            # Which KV slots a step gets does not matter here.
            patches += [(f'"{sut.DRAFT}.{name}"',) for name in _ALLOCATE if name in names]
    if "process_prebuilt(" in code:
        module = inspect.unwrap(surface.schedule_batch.process_prebuilt).__module__
        sampling = "SimpleNamespace(from_schedule_batch=lambda batch, *_: batch.sampling_info)"
        patches.append((f'"{module}.SamplingBatchInfo"', sampling))
        # What the prefix cache makes of a prompt does not matter here.
        names = _names_in(surface, "process_prebuilt")
        patches += [(f'"{module}.{name}"',) for name in _CACHE if name in names]
    if ".stash(" in code or "process_prebuilt(" in code:
        utilities = sys.modules.get(_UTILS)
        patches += _settings(_UTILS, getattr(utilities, "spec_need_hidden_states", None))
    if patches:
        lines += ["for patch in (", *_indented(map(_patch, patches)), "):"]
        lines += ["    patch.start()", "    self.addCleanup(patch.stop)"]
    if "resolve_forward_inputs(" in code and _records_streams(surface):
        lines += [
            'if DEVICE.type == "cpu":  # where tensors have no record_stream',
            '    patch = mock.patch("torch.Tensor.record_stream")',
            "    patch.start()",
            "    self.addCleanup(patch.stop)",
        ]
    return lines


def _patch(arguments: tuple[str, ...]) -> str:
    one = f"mock.patch({', '.join(arguments)}),"
    return (
        one
        if len(one) <= 76
        else "\n".join(["mock.patch(", *_indented(f"{a}," for a in arguments), "),"])
    )


def _settings(module: str, function: Any) -> list[tuple[str, ...]]:
    """Arguments of a patch for the server arguments that a function of the tree reads."""
    names = inspect.unwrap(function).__code__.co_names if function is not None else ()
    return [(f'"{module}.{name}"', "return_value=SPEC") for name in _GETTERS if name in names]


def _records_streams(surface: Surface) -> bool:
    """Whether the relay calls ``record_stream`` without asking first what device it is on."""
    source = surface.loader.source_of(sut.RELAY)
    assert source is not None
    tree = ast.parse(source.read_bytes())
    guarded = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "cpu" in ast.unparse(branch.test)
        for node in ast.walk(branch)
    }
    return any(
        isinstance(node, ast.Attribute) and node.attr == "record_stream" and id(node) not in guarded
        for node in ast.walk(tree)
    )
