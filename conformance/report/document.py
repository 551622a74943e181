"""The report as one JSON document.

Everything outside ``timings`` and ``environment`` is the same for the same seed and trees.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from conformance.runner import KV_MODE, TreeReport
from reference.clauses import CLAUSES

SCHEMA = 1

_STREAMS = {
    "cpu": "order across device streams: events and streams are inert on CPU tensors",
    "cuda": "races between device streams: they are real, but every call is waited for before its "
    "values are looked at, so that a missing wait does not show",
}
_UNUSED = {
    "cpu": "CUDA tensors, captured graphs and the pinned host mirror",
    "cuda": "captured graphs",
}
_INTERPRETED = (
    "kernels compiled: on a CPU they run in Triton's interpreter, one program after the other"
)
_WIDE = "kernels on buffers of more than 2**31 elements (B9: benchmarks/kernel_sizes.py, on a GPU)"
_UNCHECKED = "the Triton kernels: this run did not check them"


_TOYS = (
    "networks: target and draft are toys, greedy, one layer; sampling, grammars, LoRA and the "
    "fused write of the draft's keys and values are off in the loop"
)
_NO_LOOP = (
    "the worker's forward: its builders run, its model is a table of values (so P8 is checked of "
    "the builders, not of what the worker publishes)",
    "the scheduler's own loop: the driver keeps its order, and uses its forward isolation",
)
_NO_KV_POOL = "KV lengths and slots (K1 to K7, K9): this run did not check them"


def not_covered(device: str, *, kernels: bool, kv: bool, loop: bool) -> list[str]:
    """What a run of this version does not look at.

    Args:
        device: as ``--device`` gives it.
        kernels: whether the Triton kernels were checked.
        kv: whether traces had a KV pool.
        loop: whether the tree's event loop served schedules.
    """
    of_kernels = [_UNCHECKED]
    if kernels:
        of_kernels = [_INTERPRETED, _WIDE] if device == "cpu" else [_WIDE]
    return [
        _STREAMS[device],
        *of_kernels,
        _UNUSED[device],
        *([] if kv else [_NO_KV_POOL]),
        "prefix sharing, sliding-window pools and caches in host memory: KV slots are checked with "
        "the tree's cache that shares no prefixes, and of windows that the hook is called",
        *([_TOYS] if loop else _NO_LOOP),
        "the order of writes, event records and waits (a gate compares how often, no more)",
        "batches of more than 64 rows",
        "algorithms other than DFlash",
        "HIP, NPU, tensor, data and pipeline parallelism",
    ]


def document(
    reports: Sequence[TreeReport], *, label: str, profile: str, seed: int, wild: bool
) -> dict[str, Any]:
    """The report of one or more trees."""
    trees = [tree_document(report, wild=wild) for report in reports]
    verdicts = {report.verdict for report in reports}
    deviations = [{**d, "tree": t["label"]} for t in trees for d in t["deviations"]]
    return {
        "schema": SCHEMA,
        "verdict": next(v for v in ("deviates", "no entry point", "conforms") if v in verdicts),
        "tree": label,
        "profile": profile,
        "seed": seed,
        "wild": wild,
        "totals": {
            "operations": sum(r.operations for r in reports),
            "calls": sum(r.calls for r in reports),
            "traces": sum(r.traces for r in reports),
            "programs": sum(r.programs for r in reports),
            "steps": sum(r.steps for r in reports),
        },
        "deviations": deviations,
        "trees": trees,
        "not_covered": not_covered(
            reports[0].device,
            kernels=any(report.kernels for report in reports),
            kv=any(KV_MODE in report.modes for report in reports),
            loop=any(report.steps for report in reports),
        ),
        "environment": environment(reports),
        "timings": {r.tree.label: r.seconds for r in reports},
    }


def environment(reports: Sequence[TreeReport]) -> dict[str, Any]:
    """What the trees ran on."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": next(
            (r.surface["device"] for r in reports if r.surface.get("device")), reports[0].device
        ),
        "hypothesis": metadata.version("hypothesis"),
        "roots": {r.tree.label: str(r.tree.root) for r in reports},
        "torch": next((r.surface["torch"] for r in reports if r.surface), None),
        "triton": next((r.surface["triton"] for r in reports if r.surface), None),
    }


def tree_document(report: TreeReport, *, wild: bool) -> dict[str, Any]:
    """One tree's part of the report."""
    surface = dict(report.surface)
    return {
        "label": report.tree.label,
        "source": {k: v for k, v in report.tree.as_json().items() if k != "root"},
        "verdict": report.verdict,
        "refusal": report.refusal,
        "device": report.device,
        "totals": {
            "operations": report.operations,
            "calls": report.calls,
            "traces": report.traces,
            "programs": report.programs,
            "steps": report.steps,
            "by_mode": report.modes,
        },
        "deviations": report.deviations,
        "waivers": report.waivers,
        "kernels": report.kernels,
        "clauses": [
            {
                "clause": number,
                "statement": CLAUSES[number].statement,
                "checked": count,
                "deviations": [
                    f"{d['mode']} {d['anomaly']}"
                    for d in report.deviations
                    if d["clause"] == number
                ],
            }
            for number, count in report.clause_counts(wild=wild).items()
        ],
        "reached": dict(sorted(_without_calls(report.reached).items())),
        "exhaustive": report.exhaustive(),
        "wild": report.wild_outcomes(),
        "unexecuted_lines": report.unexecuted or {},
        "unreached": report.unreached(wild=wild),
        "surface": surface,
    }


def _without_calls(reached: Counter[str]) -> dict[str, int]:
    """Operations and situations; how often each call was checked is in the clause table."""
    return {k: v for k, v in reached.items() if k.startswith(("operation ", "situation "))}
