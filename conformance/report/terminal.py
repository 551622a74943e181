"""Show progress and results on a terminal; one line a minute where there is none."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from conformance.pool import Answer, Job
from conformance.report import explain
from conformance.report.files import stem

_EVERY = 60.0


@contextmanager
def progress(console: Console, total: int) -> Iterator[Callable[[Job, int], None]]:
    """A progress callback for the pool; `total` operations are to be done."""
    done: dict[int, int] = {}

    def add(job: Job, operations: int) -> int:
        done[id(job)] = min(operations, job.weight)
        return sum(done.values())

    if console.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f} of {task.total:,.0f} operations"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("loading", total=total)

            def show(job: Job, operations: int) -> None:
                bar.update(task, completed=add(job, operations), description=job.label)

            yield show
    else:
        last = time.monotonic()

        def line(job: Job, operations: int) -> None:
            nonlocal last
            count = add(job, operations)
            if time.monotonic() - last >= _EVERY:
                last = time.monotonic()
                console.print(f"{count:,} of {total:,} operations ({job.label})")

        yield line


_STYLES = {"conforms": "green", "deviates": "bold red", "no entry point": "yellow"}


def show_job(console: Console, answer: Answer) -> None:
    """One line for a finished part of a run: the first verdict comes long before the last."""
    if answer.result is None or answer.job.request["do"] == "misuse":
        return
    result = answer.result
    open_ = [d for d in result["deviations"] if d["mode"] == "legal" and not d["waiver"]]
    verdict = "deviates" if open_ else "conforms"
    console.print(
        f"{answer.job.label:<24} [{_STYLES[verdict]}]{verdict}[/]  {_amount(result)}",
        highlight=False,
    )


def _amount(result: dict[str, Any]) -> str:
    """How much a job did."""
    if "programs" in result:
        return f"{result['programs']:,} kernel programs"
    if "steps" in result:
        return f"{result['steps']:,} decode steps"
    return f"{result['operations']:,} operations"


def show_tree(console: Console, tree: dict[str, Any]) -> None:
    """One line for a tree as soon as it is complete (the first verdict)."""
    verdict = tree["verdict"]
    text = f"[{_STYLES[verdict]}]{verdict}[/]"
    detail = tree["refusal"] or _counts(tree)
    console.print(f"{tree['label']:<10} {text}  {detail}", highlight=False)


def _counts(tree: dict[str, Any]) -> str:
    legal = [d for d in tree["deviations"] if d["mode"] == "legal"]
    waived = [d for d in legal if d["waiver"]]
    gaps = len(tree["deviations"]) - len(legal)
    parts = [f"{tree['totals']['operations']:,} operations"]
    if len(legal) > len(waived):
        parts.append(f"{len(legal) - len(waived)} deviations")
    if waived:
        parts.append(f"{len(waived)} waived")
    if gaps:
        parts.append(f"{gaps} contract gaps")
    return ", ".join(parts)


def show(console: Console, report: dict[str, Any], files: dict[str, Any]) -> None:
    """Everything a person needs after a run."""
    if len(report["trees"]) == 1:
        _clauses(console, report["trees"][0])
        _reached(console, report["trees"][0])
        console.print()
        for line in explain.exhaustive(report["trees"][0]):
            console.print(line, highlight=False, soft_wrap=True)
    else:
        _matrix(console, report)
    shown: set[tuple[str, ...]] = set()
    for deviation in report["deviations"]:
        # In a matrix the same deviation on ten trees is told once.
        key = tuple(deviation[k] for k in _NAME)
        if key in shown:
            continue
        shown.add(key)
        trees = [d["tree"] for d in report["deviations"] if _same(d, deviation)]
        console.print()
        console.print(
            f"[bold]{explain.headline(deviation)}[/]  on {', '.join(trees)}",
            highlight=False,
            soft_wrap=True,
        )
        file = files.get(stem(deviation))
        words = ("dflash-conformance", "replay", str(file), "--sglang", deviation["tree"])
        replay = shlex.join(words) if file else None
        for line in explain.lines(deviation, replay=replay):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        if file is None:
            console.print(
                "  (run with --report DIR to keep this trace and replay it)", highlight=False
            )
    console.print()
    for tree in report["trees"]:
        for name in [n for n, state in tree["waivers"].items() if state == "stale"]:
            console.print(
                f"note: {tree['label']}: waiver {name} is not needed: its witness conforms"
            )
    for note in sorted({n for t in report["trees"] for n in t["surface"].get("notes", [])}):
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    totals = report["totals"]
    verdict = report["verdict"]
    console.print(
        f"[{_STYLES[verdict]}]{verdict}[/]: {report['tree']}, {totals['operations']:,} operations, "
        f"{totals['calls']:,} calls into the tree, seed {report['seed']}, "
        f"torch {report['environment']['torch']}, triton {report['environment']['triton']}",
        highlight=False,
        soft_wrap=True,
    )


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[key] == other[key] for key in _NAME)


_NAME = ("clause", "anomaly", "mode", "waiver")
"""What makes two deviations one, for people."""


def _mark(clause: dict[str, Any], deviations: list[dict[str, Any]]) -> str:
    mine = [d for d in deviations if d["clause"] == clause["clause"]]
    if any(d["mode"] == "legal" and d["waiver"] is None for d in mine):
        return "[bold red]deviates[/]"
    if any(d["mode"] == "legal" for d in mine):
        return "[yellow]waived[/]"
    if mine:
        return "[yellow]gap[/]"
    if clause["checked"] is None:
        return "[dim]n/a[/]"
    return "[green]ok[/]" if clause["checked"] else "[dim]not reached[/]"


def _clauses(console: Console, tree: dict[str, Any]) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("clause")
    table.add_column("")
    table.add_column("checked", justify="right")
    table.add_column("statement")
    for clause in tree["clauses"]:
        checked = "" if clause["checked"] is None else f"{clause['checked']:,}"
        table.add_row(
            clause["clause"],
            _mark(clause, tree["deviations"]),
            checked,
            escape(clause["statement"]),
        )
    console.print(table)


def _reached(console: Console, tree: dict[str, Any]) -> None:
    """How often each operation and situation occurred, in two paragraphs."""
    for prefix in ("operation", "situation"):
        counts = [
            f"{name.removeprefix(prefix + ' ')} {count:,}"
            for name, count in tree["reached"].items()
            if name.startswith(prefix)
        ]
        console.print()
        console.print(f"[bold]{prefix}s:[/] " + ", ".join(counts), highlight=False)


def _matrix(console: Console, report: dict[str, Any]) -> None:
    marks = {"ok": ".", "n/a": " ", "deviates": "X", "waived": "w", "gap": "g", "not reached": "-"}
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    table.add_column("clause")
    for tree in report["trees"]:
        table.add_column(tree["label"].removeprefix("0.5."), justify="center")
    for row, clause in enumerate(report["trees"][0]["clauses"]):
        cells = []
        for tree in report["trees"]:
            mark = _mark(tree["clauses"][row], tree["deviations"])
            style, _, rest = mark[1:].partition("]")
            word = rest.removesuffix("[/]")
            cells.append("" if tree["refusal"] else f"[{style}]{marks[word]}[/]")
        table.add_row(clause["clause"], *cells)
    console.print()
    console.print(table)
    console.print(
        "[dim]. conforms  w waived  X deviates  g contract gap  - not reached  "
        "blank: does not apply[/]",
        highlight=False,
    )
    sizes = [size for tree in report["trees"] for size in tree["exhaustive"]]
    if sizes:
        pairs = sum(size.get("pairs", 0) for size in sizes)
        cut = (
            "" if all(size["complete"] for size in sizes) else ", but for what deviations cut short"
        )
        console.print(
            f"exhaustively, over all trees: {pairs:,} pairs of operations of small scopes, "
            f"and the algebra, in {sum(size['played'] for size in sizes):,} operations{cut}",
            highlight=False,
            soft_wrap=True,
        )
