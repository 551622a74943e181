"""Which lines of the surface under test a run never executed.

Tracing slows a run down several times, so a sample is traced, not the bulk.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Lines:
    """Executed lines of some source files.

    Args:
        files: module name to source file.
    """

    def __init__(self, files: dict[str, Path]) -> None:
        self._modules = {str(path): name for name, path in files.items()}
        self._executed: dict[str, set[int]] = {path: set() for path in self._modules}

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Record the lines that this thread executes inside the context."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def _enter(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        executed = self._executed.get(frame.f_code.co_filename)
        if executed is None:
            return None

        def line(frame: types.FrameType, event: str, argument: Any) -> Any:
            executed.add(frame.f_lineno)
            return line

        return line

    def missing(self) -> dict[str, dict[str, list[int]]]:
        """Per module and function, the lines of its body that were never executed."""
        found: dict[str, dict[str, list[int]]] = {}
        for path, module in self._modules.items():
            source = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
            functions = {
                name: sorted(lines - self._executed[path])
                for name, lines in _functions(source)
                if lines - self._executed[path]
            }
            if functions:
                found[module] = functions
        return found


def _functions(code: types.CodeType) -> Iterator[tuple[str, set[int]]]:
    """Every function below `code`, by qualified name, with the lines of its own body."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            if constant.co_flags & 0x2:  # CO_NEWLOCALS: a function, not a class body
                own = {line for _, _, line in constant.co_lines() if line}
                yield constant.co_qualname, own - {constant.co_firstlineno}
            yield from _functions(constant)


def common(
    first: dict[str, dict[str, list[int]]] | None, second: dict[str, dict[str, list[int]]]
) -> dict[str, dict[str, list[int]]]:
    """Lines that neither of two runs executed."""
    if first is None:
        return second
    both: dict[str, dict[str, list[int]]] = {}
    for module in first.keys() & second.keys():
        functions = {
            name: sorted(set(first[module][name]) & set(second[module][name]))
            for name in first[module].keys() & second[module].keys()
        }
        kept = {name: lines for name, lines in sorted(functions.items()) if lines}
        if kept:
            both[module] = kept
    return both


def spans(lines: Sequence[int]) -> str:
    """Line numbers for people: ``12-15, 20``."""
    parts: list[list[int]] = []
    for line in lines:
        if parts and line == parts[-1][1] + 1:
            parts[-1][1] = line
        else:
            parts.append([line, line])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
