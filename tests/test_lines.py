"""Lines that were never executed are told from those that were."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from conformance.sut.lines import Lines, common, spans

SOURCE = """\
class Thing:
    def used(self, x):
        if x:
            return 1
        return 2

    def unused(self):
        return 3


def outer():
    return [y for y in (1,)]
"""


def test_missing_lines_by_function(tmp_path: Path) -> None:
    path = tmp_path / "thing.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("thing", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    lines = Lines({"thing": path})
    with lines.tracing():
        module.Thing().used(True)
    first = lines.missing()
    assert first["thing"]["Thing.used"] == [5]
    assert first["thing"]["Thing.unused"] == [8]
    assert first["thing"]["outer"] == [12]

    with lines.tracing():
        module.outer()
    second = lines.missing()
    assert "outer" not in second["thing"]
    assert common(first, second) == second
    assert common(None, second) == second


def test_spans() -> None:
    assert spans([1, 2, 3, 7, 9, 10]) == "1-3, 7, 9-10"
