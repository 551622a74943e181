"""The pages of docs/findings: one for every waiver, each with a script that shows the defect."""

from __future__ import annotations

import ast
import datetime
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from trees import copy_surface

from conformance import waivers
from conformance.sut.source import NEWEST, SUPPORTED, Tree, cache_root, locate
from conformance.sut.surface import RELAY

FOLDER = Path(__file__).parent.parent / "docs" / "findings"
WAIVERS = {waiver.name: waiver for waiver in waivers.load(today=datetime.date.min)}
INDEX = (FOLDER / "README.md").read_text("utf-8")
PAGES = {path.stem: path.read_text("utf-8") for path in FOLDER.glob("*.md") if path.stem.islower()}


def releases(name: str) -> list[tuple[str, int]]:
    """Releases to run a finding's script on, with the exit status to expect."""
    (row,) = [line for line in INDEX.splitlines() if f"]({name}.md)" in line]
    first, _, last = row.split(" | ")[2].partition(" to ")
    fixed = SUPPORTED[SUPPORTED.index(last) + 1 :][:1]
    return [(first, 1), (last, 1), *((release, 0) for release in fixed)]


def reproduce(name: str, root: Path) -> subprocess.CompletedProcess[str]:
    """Run a finding's script on a tree."""
    return subprocess.run(
        [sys.executable, FOLDER / f"{name}.py", root],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache_root() / "inductor")},
        capture_output=True,
        text=True,
    )


def test_every_waiver_has_a_page_and_every_page_says_its_status() -> None:
    assert WAIVERS.keys() <= PAGES.keys()
    for name, page in PAGES.items():
        status = re.search(r"^Status: (waived|fixed|not waived)\b", page, re.MULTILINE)
        assert status, name
        assert (status[1] == "waived") is (name in WAIVERS), name


@pytest.mark.parametrize("name", PAGES)
def test_the_index_has_a_page_and_its_script(name: str) -> None:
    (row,) = [line for line in INDEX.splitlines() if f"]({name}.md)" in line]
    assert f"]({name}.py)" in row
    assert (FOLDER / f"{name}.py").is_file()
    assert f"({name}.py)" in PAGES[name]
    if name in WAIVERS:
        waiver = WAIVERS[name]
        affected = waiver.releases.endswith(NEWEST)
        newest = f"newest ({NEWEST})"
        assert newest in INDEX
        cells = [waiver.clause, f"`{waiver.anomaly}`", waiver.releases]
        cells.append("affected" if affected else "not affected")
        assert row.startswith(f"| {' | '.join(cells)} |")
        assert f"Clause {waiver.clause}, anomaly `{waiver.anomaly}`" in PAGES[name]


def test_every_script_has_a_page() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == PAGES.keys()


@pytest.mark.parametrize(
    ("name", "release", "status"),
    [(name, *case) for name in PAGES for case in releases(name)],
)
def test_the_script_shows_the_defect_where_the_page_says(
    name: str, release: str, status: int
) -> None:
    done = reproduce(name, locate(release).root)
    assert done.returncode == status, done.stdout + done.stderr
    assert ("DEFECT" in done.stdout) is (status == 1)
    assert f"| {release} | {status} |" in PAGES[name]
    if status:
        assert done.stdout.partition("; ")[2] in PAGES[name]  # what it prints, but for torch's name


def test_the_script_sees_a_corrected_assertion(tmp_path: Path, newest: Tree) -> None:
    def with_message(module: ast.Module) -> ast.Module:
        for node in ast.walk(module):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch._assert_async":
                node.args.append(ast.Constant("a row was consumed twice"))
        return module

    corrected = copy_surface(newest, tmp_path / "corrected", {RELAY: with_message})
    done = reproduce("consume-once-assertion-compiled-away", corrected.root)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "conforms" in done.stdout


@pytest.mark.parametrize("name", PAGES)
def test_a_script_that_cannot_be_tried_says_so(name: str, tmp_path: Path) -> None:
    done = reproduce(name, tmp_path)
    assert done.returncode == 2
    assert done.stdout.startswith("could not be tried")
