"""Rows per second of each kernel: alone, with the reference, with reference and comparison.

    python benchmarks/kernels.py [--device cpu|cuda] [--sglang 0.5.23] [--rows N] [--block 16]

``kernel``          the tree's kernel on arguments and outputs that are there already;
``with reference``  and the reference's answer to the same arguments, with a mask of where the two
                    differ;
``compared``        and whether they differ anywhere, known to the host.

On a CPU the kernels run in Triton's interpreter, a few rows at a time. On CUDA a launch has
1,048,576 rows; the selector, whose scores grow with the square of its candidates, and the gather
have fewer. ``--compile`` also lets torch.compile fuse reference and comparison.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

_SHARES = {"selector": 64, "gather": 8}
"""By how much fewer rows a kernel is given than the others."""

_WIDTHS = {"prepare": 4096, "selector": 16, "gather": 8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--sglang", default=None)
    parser.add_argument("--rows", type=int, default=None)
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    rows = options.rows or (64 if options.device == "cpu" else 1 << 20)

    import torch

    from conformance.kernels import sources
    from conformance.kernels.catalog import KERNELS
    from conformance.sut.device import open_device
    from conformance.sut.source import NEWEST, locate
    from conformance.sut.surface import open_tree
    from generators.kernel_inputs import Case, build

    device = open_device(options.device)
    compile_for_real = torch.compile
    device.prepare(compiled=False)
    # Whatever is allocated here is written before it is read.
    torch.utils.deterministic.fill_uninitialized_memory = False
    release = options.sglang or NEWEST
    surface = open_tree(locate(release).root, device, debug=False)
    print(f"{'kernel':<10} {'rows':>9} {'kernel':>16} {'with reference':>16} {'compared':>16}")
    for name, source in sources.find(surface.root, surface.loader.relocated).items():
        kernel = KERNELS[name]
        batch = max(1, rows // _SHARES.get(name, 1))
        case = Case(name, batch, options.block, width=_WIDTHS.get(name, 64), pool=1024)
        given = build(case, device.device)
        into = {
            output.name: torch.empty(
                output.shape(case), dtype=output.dtype(case), device=device.device
            )
            for output in ([] if kernel.allocates else kernel.outputs)
        }
        function = surface.function(source.module, sources.ENTRIES[name].function)
        judge: Callable[..., Any] = kernel.judge
        if options.compile:
            judge = compile_for_real(kernel.judge)

        def launch(
            call: Any = kernel.call, of: Any = function, a: Any = given, o: Any = into
        ) -> Any:
            return call(of, a, o)

        def reference(run: Any = launch, judge: Any = judge, a: Any = given) -> Any:
            return judge(a, run())

        def compared(run: Any = reference) -> bool:
            return bool(torch.stack([v.wrong.any() for v in run().values()]).any())

        if compared():
            print(f"{name}: the kernel's answers are wrong", file=sys.stderr)
        rates = [
            batch / _seconds(step, options.repeat, device.settle)
            for step in (launch, reference, compared)
        ]
        print(f"{name:<10} {batch:>9,} " + " ".join(f"{rate:>9,.0f} rows/s" for rate in rates))
        sys.stdout.flush()
    where = torch.cuda.get_device_name() if options.device == "cuda" else "interpreter"
    print(f"sglang {release}, torch {torch.__version__}, {where}, block {options.block}")
    sys.stdout.flush()
    os._exit(0)  # no teardown: native modules would print what they leak


def _seconds(step: Callable[[], Any], repeat: int, settle: Callable[[], None]) -> float:
    """Median time of one step, started and finished."""
    measured = []
    for _ in range(repeat + 1):
        settle()
        start = time.perf_counter()
        step()
        settle()
        measured.append(time.perf_counter() - start)
    return statistics.median(measured[1:])  # the first one warms up


if __name__ == "__main__":
    main()
