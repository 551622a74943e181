"""Does the walk of SGLang's DFlash2 selector pick a candidate where scores are NaN?

    python selector-walk-nan.py FOLDER

FOLDER holds ``sglang/`` (a site-packages, an unpacked wheel, or ``python/`` of a checkout). Needs
torch and triton; no GPU, no other package, no network: the kernel runs on the CPU in Triton's
interpreter, which this script asks for with TRITON_INTERPRET=1.

Only ``sglang/kernels/ops/speculative/dflash.py`` is loaded, as it is; it imports torch and triton
and nothing of SGLang, so nothing stands in for anything. A greedy request with one position and two
candidates is walked, and must get what torch.argmax picks: the first NaN.

Exit status: 0 it does, 1 it does not (the defect), 2 it could not be tried.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch

NAN = float("nan")
FIRST, SECOND, BEHIND = 11, 22, 99


def load(folder: Path) -> Any:
    """The tree's module of DFlash kernels."""
    path = folder / "sglang" / "kernels" / "ops" / "speculative" / "dflash.py"
    spec = importlib.util.spec_from_file_location("dflash_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def walk(kernels: Any, scores: list[float]) -> int:
    """The token picked for one greedy request with one position and two candidates."""
    memory = torch.tensor([FIRST, SECOND, BEHIND, BEHIND])
    tokens, _ = kernels.selector_walk_triton(
        candidate_ids=memory[:2].view(1, 1, 2),
        scores=torch.tensor([scores, scores]).view(1, 1, 2, 2),  # the same after either candidate
        uniforms=torch.zeros(1, 1),
        temperatures=torch.ones(1),
        greedy_mask=torch.ones(1, dtype=torch.bool),
    )
    return int(tokens)


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    cases = {"all NaN": [NAN, NAN], "second NaN": [1.0, NAN], "no NaN": [1.0, 2.0]}
    try:
        kernels = load(Path(sys.argv[1]))
        if not hasattr(kernels, "selector_walk_triton"):
            raise LookupError("this tree has no selector_walk_triton")
        seen = {name: walk(kernels, scores) for name, scores in cases.items()}
    except Exception as error:
        print(f"could not be tried: {type(error).__name__}: {error}")
        return 2
    print(f"torch {torch.__version__}; candidates {FIRST} and {SECOND}, in memory {BEHIND} behind")
    wrong = 0
    for name, scores in cases.items():
        expected = (FIRST, SECOND)[int(torch.tensor(scores).argmax())]
        wrong += seen[name] != expected
        print(f"{name + ':':<12}expected {expected}, seen {seen[name]}")
    print("conforms" if not wrong else f"DEFECT: {wrong} of {len(cases)} picks are wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
