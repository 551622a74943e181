"""The rules of the layout: who may import whom, and what the parent may load."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("reference", "generators", "conformance")


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Top-level names of everything a file imports, wherever the statement stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def tops(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(path)}


@pytest.mark.parametrize("path", sources("reference"), ids=lambda p: p.name)
def test_reference_imports_only_torch_and_the_standard_library(path: Path) -> None:
    assert tops(path) - sys.stdlib_module_names <= {"torch", "reference"}


@pytest.mark.parametrize("path", sources("generators"), ids=lambda p: p.name)
def test_generators_import_reference_and_hypothesis_in_one_place(path: Path) -> None:
    allowed = {"torch", "reference", "generators"}
    if path.name == "strategies.py":
        allowed.add("hypothesis")
    assert tops(path) - sys.stdlib_module_names <= allowed


@pytest.mark.parametrize("path", sources("conformance"), ids=lambda p: str(p.relative_to(ROOT)))
def test_only_sut_loads_trees(path: Path) -> None:
    assert "sglang" not in tops(path)
    text = path.read_text(encoding="utf-8")
    assert "sut" in path.parts or "import_module" not in text


def test_the_parent_never_imports_torch() -> None:
    code = (
        "import sys, conformance.cli, conformance.pool, conformance.runner, conformance.waivers, "
        "conformance.report.document, conformance.report.files, conformance.report.terminal, "
        "conformance.sut.source, conformance.declarations, conformance.faults, "
        "conformance.gate, conformance.report.gate, conformance.emit.target; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_ci_runs_the_two_commands_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^python3 -m venv .*tox -e \w+$", readme, re.MULTILINE)
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert len(commands) == 2
    assert [line for line in script if line.startswith("python3")] == commands[::-1]
