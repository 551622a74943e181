"""Where 32-bit address arithmetic ends: each kernel below and beyond 2**31 elements, on a GPU.

    python benchmarks/kernel_sizes.py [--sglang 0.5.23]

Clause B9. A kernel is launched on so many rows that its largest buffer has just under, and just
over, 2**31 elements; the last rows must be right. Every launch has a process of its own, because an
address that wraps may leave the device unusable. Needs about 70 GB of GPU memory.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

_BLOCK = 128
_CHOICES = 16
_LAST = 64
"""Rows that are looked at, from the end."""

_ELEMENTS = {"below": -_LAST * _BLOCK, "beyond": _LAST * _BLOCK}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sglang", default=None)
    parser.add_argument("--launch", nargs=2, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.launch:
        print(_launch(options.sglang, options.launch[0], 2**31 + _ELEMENTS[options.launch[1]]))
        return
    for name in ("prepare", "accept", "fused", "selector"):
        for side in _ELEMENTS:
            command = [sys.executable, __file__, "--launch", name, side]
            command += ["--sglang", options.sglang] if options.sglang else []
            done = subprocess.run(command, capture_output=True, text=True)
            lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
            # An error's first line names it; hints follow.
            named = [line for line in lines if "Error:" in line] or lines or [str(done.returncode)]
            print(f"{name:<9} {side} 2**31 elements: {named[-1]}")
            sys.stdout.flush()


def _launch(release: str | None, name: str, elements: int) -> str:
    import torch

    from conformance.kernels import sources
    from conformance.kernels.catalog import KERNELS
    from conformance.sut.device import open_device
    from conformance.sut.source import NEWEST, locate
    from conformance.sut.surface import open_tree

    device = open_device("cuda")
    device.prepare(compiled=False)
    torch.utils.deterministic.fill_uninitialized_memory = False
    surface = open_tree(locate(release or NEWEST).root, device, debug=False)
    kernel = KERNELS[name]
    source = sources.find(surface.root, surface.loader.relocated)[name]
    function = surface.function(source.module, sources.ENTRIES[name].function)
    given, into = _arguments(name, elements, device.device)
    observed = kernel.call(function, given, into)
    device.settle()
    last = {key: value[-_LAST:] if key in kernel.rows else value for key, value in given.items()}
    verdicts = kernel.judge(last, {key: value[-_LAST:] for key, value in observed.items()})
    wrong = [key for key, verdict in verdicts.items() if bool(verdict.wrong.any())]
    rows = len(next(value for key, value in given.items() if key in kernel.rows))
    return f"{rows:,} rows, " + (f"wrong: {', '.join(wrong)}" if wrong else "right")


def _arguments(name: str, elements: int, device: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments whose last rows are told apart, and outputs that hold nothing right."""
    import torch

    if name == "selector":
        rows = elements // _CHOICES**3
        shape = (rows, _CHOICES)
        given: dict[str, Any] = {
            "candidate_ids": torch.arange(_CHOICES, device=device).expand(*shape, -1).contiguous(),
            "scores": torch.rand((*shape, _CHOICES, _CHOICES), device=device),
            "uniforms": torch.rand(shape, device=device),
            "temperatures": torch.ones(rows, device=device),
            "greedy": torch.ones(rows, dtype=torch.bool, device=device),
        }
        return given, {}
    rows = elements // _BLOCK
    numbers = torch.arange(rows, device=device)

    def block() -> Any:
        return torch.full((rows, _BLOCK), -7, dtype=torch.int64, device=device)

    def row(dtype: Any = torch.int64) -> Any:
        return torch.full((rows,), -7, dtype=dtype, device=device)

    if name == "prepare":
        table = torch.arange(4096, dtype=torch.int32, device=device).reshape(2, 2048)
        given = {
            "bonus_tokens": numbers,
            "prefix_lens": numbers % 2000,
            "slots": numbers % 2,
            "req_to_token": table,
            "block": _BLOCK,
            "mask_token": 151_666,
        }
        return given, {"ids": block(), "positions": block(), "cache_locs": block()}
    candidates = block()
    candidates.copy_(torch.arange(_BLOCK, device=device))
    targets = candidates + 1
    targets[numbers, numbers % _BLOCK] = -1  # where the drafts part from the target
    given = {"candidates": candidates, "targets": targets}
    into = {"accepts": row(torch.int32), "bonus": row()}
    if name == "accept":
        given["prefix_lens"] = numbers
        into |= {"commits": row(torch.int32), "new_lens": row(), "tokens": block()}
    return given, into


if __name__ == "__main__":
    main()
