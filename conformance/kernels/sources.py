"""Where a tree keeps its kernels, and whether two trees have the same ones; without torch.

Kernels are found by module and name. Two trees whose functions for a kernel read the same, all
functions that they use included, need that kernel checked only once.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_OPS = "sglang.kernels.ops.speculative"
_SRT = "sglang.srt.speculative"
_BLOCK = (f"{_OPS}.dflash", f"{_SRT}.triton_ops.dflash")
_WORKER = f"{_SRT}.dflash_worker_v2"
_UTILS = f"{_SRT}.dflash_utils"


@dataclass(frozen=True)
class Entry:
    """One function under test.

    Attributes:
        kernel: its name in this suite.
        function: its name in the tree.
        modules: where trees have it; the first that does counts.
        expected: whether every tree is supposed to have it, so that a run says when one does not.
    """

    kernel: str
    function: str
    modules: tuple[str, ...]
    expected: bool = True

    @property
    def feature(self) -> str:
        """The capability that the kernel's clauses need."""
        return f"kernel_{self.kernel}"


ENTRIES = {
    entry.kernel: entry
    for entry in (
        Entry(
            "prepare",
            "_prepare_dflash_draft_block_unchecked",
            (*_BLOCK, f"{_SRT}.triton_ops.dflash_prepare_block"),
        ),
        Entry(
            "accept",
            "_compute_dflash_accept_bonus_triton_unchecked",
            (*_BLOCK, f"{_SRT}.triton_ops.dflash_accept_bonus"),
        ),
        # Newer than DFlash itself: a wrapper that takes its kernel for CUDA tensors only, and the
        # kernel, which is launched directly so that it can be checked on a CPU too.
        Entry("correct", "compute_dflash_correct_drafts_and_bonus", (_BLOCK[0], _UTILS)),
        Entry("fused", "_fused_correct_drafts_and_bonus_kernel", (_BLOCK[0], _UTILS), False),
        Entry(
            "gather",
            "gather_spec_extras",
            (f"{_OPS}.gather_spec_extras", f"{_SRT}.triton_ops.gather_spec_extras"),
        ),
        Entry("selector", "selector_walk_triton", (_BLOCK[0],), False),
    )
}
"""The functions under test by kernel name."""

MODULES = tuple(sorted({module for entry in ENTRIES.values() for module in entry.modules}))
"""Every module that a kernel may be in."""


@dataclass(frozen=True)
class Source:
    """A kernel as a tree has it.

    Attributes:
        module: import name.
        digest: sha256 over the function and what it uses of its module, without comments.
        narrow: whether the worker gives it an int32 buffer for bonus tokens.
    """

    module: str
    digest: str
    narrow: bool = False


def find(root: Path, relocated: Mapping[str, str] | None = None) -> dict[str, Source]:
    """The kernels below `root` by name.

    Args:
        relocated: module name to a path below `root` for trees that moved a file.
    """
    found: dict[str, Source] = {}
    narrow = bool(narrow_buffer(_path(root, _WORKER, relocated or {})))
    parsed: dict[str, dict[str, ast.stmt]] = {}
    for kernel, entry in ENTRIES.items():
        for module in entry.modules:
            if module not in parsed:
                parsed[module] = _definitions(root, module, relocated or {})
            if entry.function in parsed[module]:
                digest = _digest(parsed[module], entry.function)
                found[kernel] = Source(module, digest, narrow and kernel == "accept")
                break
    return found


def _path(root: Path, module: str, relocated: Mapping[str, str]) -> Path:
    path = root / relocated.get(module, module.replace(".", "/"))
    return path if path.suffix == ".py" else path.with_suffix(".py")


def _definitions(root: Path, module: str, relocated: Mapping[str, str]) -> dict[str, ast.stmt]:
    """What a module defines at its top level, by name."""
    path = _path(root, module, relocated)
    if not path.is_file():
        return {}
    names: dict[str, ast.stmt] = {}
    for statement in ast.parse(path.read_bytes()).body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            names[statement.name] = statement
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    names[target.id] = statement
    return names


def _digest(definitions: dict[str, ast.stmt], function: str) -> str:
    used: dict[str, str] = {}
    waiting = [function]
    while waiting:
        name = waiting.pop()
        if name not in used:
            used[name] = _text(definitions[name])
            names = {n.id for n in ast.walk(definitions[name]) if isinstance(n, ast.Name)}
            waiting += sorted(names & definitions.keys())
    text = "\n".join(used[name] for name in sorted(used))
    return hashlib.sha256(text.encode()).hexdigest()


def _text(statement: ast.stmt) -> str:
    """A definition without comments and docstring."""
    if isinstance(statement, ast.FunctionDef) and ast.get_docstring(statement) is not None:
        fields = dict(ast.iter_fields(statement))
        statement = ast.FunctionDef(**{**fields, "body": statement.body[1:] or [ast.Pass()]})
        ast.fix_missing_locations(statement)
    return ast.unparse(statement)


def narrow_buffer(worker: Path | None) -> bool | None:
    """Whether the worker's buffer for accepted bonus tokens is int32; None: not recognised.

    Args:
        worker: source of the worker's module.
    """
    if worker is None or not worker.is_file():
        return None
    for node in ast.walk(ast.parse(worker.read_bytes())):
        if not isinstance(node, ast.Assign):
            continue
        target = node.targets[0]
        if isinstance(target, ast.Attribute) and "bonus_id" in target.attr:
            types = {n.attr for n in ast.walk(node.value) if isinstance(n, ast.Attribute)}
            return "int32" in types
    return None
