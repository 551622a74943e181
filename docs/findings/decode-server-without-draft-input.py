"""Does a decode server of SGLang make a draft input for a DFlash request that arrives prefilled?

    python decode-server-without-draft-input.py FOLDER

FOLDER holds ``sglang/`` (a site-packages, an unpacked wheel, or ``python/`` of a checkout). Needs
torch; no GPU, no other package, no network.

Only ``sglang/srt/speculative/spec_info.py`` is loaded, as it is; every other module of SGLang that
it asks for is a placeholder. So what is tried is the decision alone: whether
``SpeculativeAlgorithm.DFLASH.build_disagg_draft_input`` hands the request to a function that makes
a draft input (a placeholder here), or returns None. With None the batch has no ``spec_info``, which
the next step's ``prepare_for_decode`` needs.

Exit status: 0 it does, 1 it does not (the defect), 2 it could not be tried.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch

MADE = "a draft input"


class Placeholder(types.ModuleType):
    """A module of SGLang that is not wanted: whatever is asked of it makes the placeholder."""

    __path__: list[str] = []  # noqa: RUF012 (that is how a package says it is one)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: MADE


class Finder:
    """Answers every import of SGLang."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.partition(".")[0] == "sglang" else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return Placeholder(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


def load(folder: Path) -> Any:
    """The tree's module of speculative algorithms."""
    sys.meta_path.insert(0, Finder())
    path = folder / "sglang" / "srt" / "speculative" / "spec_info.py"
    spec = importlib.util.spec_from_file_location("spec_info", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    try:
        algorithms = load(Path(sys.argv[1])).SpeculativeAlgorithm
        seen = {}
        for name in ("EAGLE", "DFLASH"):
            build = algorithms[name].build_disagg_draft_input
            seen[name] = build(*(None for _ in inspect.signature(build).parameters))
    except Exception as error:
        print(f"could not be tried: {type(error).__name__}: {error}")
        return 2
    print(f"torch {torch.__version__}; a request arrives prefilled on a decode server")
    for name, made in seen.items():
        print(f"{name + ':':<8}expected {MADE}, seen {made}")
    wrong = seen["DFLASH"] is None
    print("DEFECT: its first decode step finds no draft input" if wrong else "conforms")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
