"""Small trees for tests: the surface of a real release, with or without edits."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

from conformance.sut.doubles import UTILITIES
from conformance.sut.isolation import Edit
from conformance.sut.source import Tree
from conformance.sut.surface import ARGUMENTS, REAL


def copy_surface(tree: Tree, folder: Path, edits: Mapping[str, Edit] | None = None) -> Tree:
    """Copy the modules that the harness loads from `tree`, the edited ones as edited.

    Args:
        folder: becomes the tree's root; must not exist.
        edits: module name to syntax-tree transformation.
    """
    edits = edits or {}
    package = folder / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    for module in (*REAL, ARGUMENTS, UTILITIES):
        base = tree.root.joinpath(*module.split("."))
        files = [f for f in (base.with_suffix(".py"), base / "__init__.py") if f.is_file()]
        if not files:
            continue
        source = files[0]
        text = source.read_text(encoding="utf-8")
        if module in edits:
            text = ast.unparse(ast.fix_missing_locations(edits[module](ast.parse(text))))
        target = folder / source.relative_to(tree.root)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    return Tree(folder.name, folder, "checkout")
