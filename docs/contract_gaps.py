"""Write docs/contract-gaps.md: what each wild use comes to, release by release.

``python docs/contract_gaps.py``: everything the page says of a release comes from a run of it, in
wild mode, with debug assertions off and on. Takes about two minutes on two cores.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conformance.pool import Pool
from conformance.report import explain
from conformance.runner import Profile, TreeReport, check_trees
from conformance.sut.source import SUPPORTED, cache_root, locate
from generators.operations import WILD_USES
from reference.clauses import CLAUSES

PAGE = Path(__file__).with_name("contract-gaps.md")
PROFILES = {
    "debug off": Profile("gaps", 10_000, 0, 0),
    "debug on": Profile("gaps", 0, 10_000, 0),
}
Reports = dict[str, list[TreeReport]]
"""One report per release, for either debug mode."""

INTRODUCTION = """\
# Contract gaps

A *wild use* is something that a tree's API accepts and no scheduler path of these releases issues.
A tree either does it right or refuses it with a clear error; anything else is a *contract gap*.
Gaps never change the exit status; a tree that starts to issue such a use should first close its
gap. `run --wild` and `matrix --wild` look for them (and try misuse of the Triton kernels, which is
not listed here).

This page is written by `python docs/contract_gaps.py` from runs of every release on a CPU,
{operations:,} operations in all. In the table *right* means that the answer was one of those the
clause allows, *refused* names the error, and a gap in bold has its clause and anomaly. Where debug
assertions make a difference, both are given. Some uses are tried in several forms of the draft
input.

On a GPU one use differs. With `--device cuda` on an NVIDIA H200 (torch 2.11.0), 0.5.15, 0.5.19 and
0.5.23 show R9 wrong-owner at permuted-indices: tokens and device lengths follow future_indices,
host lengths, which come through a pinned buffer, the batch's req_pool_indices. There
filter-out-of-range, and with debug assertions resolve-unwritten, are not tried: a failed assertion
ends the process.
"""


def run() -> Reports:
    """Check every release in wild mode."""
    trees = [locate(release) for release in SUPPORTED]
    with Pool(cache_root()) as pool:
        return {
            mode: check_trees(trees, profile, pool, wild=True) for mode, profile in PROFILES.items()
        }


def is_gap(verdict: str) -> bool:
    return verdict != "right" and not verdict.startswith("refused (")


def cell(reports: Reports, number: int, use: str) -> str:
    """What a use comes to on the release `number`, in the words of the runs."""
    words = {}
    for mode, trees in reports.items():
        found = trees[number].wild_outcomes()[use]
        words[mode] = ", ".join(f"**{v}**" if is_gap(v) else v for v in found)
    if len(set(words.values())) == 1:
        return words["debug off"]
    return "; ".join(f"{mode}: {text}" for mode, text in words.items())


def page(reports: Reports) -> Iterator[str]:
    """The lines of the page."""
    everything = [report for trees in reports.values() for report in trees]
    yield INTRODUCTION.format(operations=sum(report.operations for report in everything))
    yield "| use | " + " | ".join(SUPPORTED) + " |"
    yield "|---" * (len(SUPPORTED) + 1) + "|"
    cells = {use: [cell(reports, n, use) for n in range(len(SUPPORTED))] for use in WILD_USES}
    for use, row in cells.items():
        yield f"| {use} | " + " | ".join(row) + " |"
    yield "\n## The uses\n"
    clause_of = {call: clause for clause in CLAUSES.values() for call in clause.wild_calls}
    for name, record in WILD_USES.items():
        clause = clause_of[f"wild-{name}"]
        yield f"### {name}\n"
        text = f"{record.what[0].upper()}{record.what[1:]}. Clause {clause.number}: {clause.wild}"
        yield text + (f" *A caller:* {record.instead}\n" if "**" in "".join(cells[name]) else "\n")
    yield "## The gaps, smallest traces\n"
    for key, found in gaps(reports).items():
        yield f"### {' '.join(key)}\n"
        shown = [use for use, row in cells.items() if any(" ".join(key) in text for text in row)]
        places = "; ".join(f"{span(list(trees))} with {mode}" for mode, trees in found.items())
        whose = ", ".join(shown) or "what follows an idle step where the tree forbids one"
        yield f"Shown by {whose}: {places}. On the last of these:\n"
        yield "```"
        yield from explain.lines([*next(iter(found.values())).values()][-1])
        yield "```\n"


Found = dict[str, dict[str, dict[str, Any]]]
"""The deviation of one gap, by debug mode and release."""


def gaps(reports: Reports) -> dict[tuple[str, str], Found]:
    """The gaps by clause and anomaly."""
    found: dict[tuple[str, str], Found] = {}
    for mode, trees in reports.items():
        for report in trees:
            for deviation in report.deviations:
                if deviation["mode"] == "wild":
                    mine = found.setdefault((deviation["clause"], deviation["anomaly"]), {})
                    mine.setdefault(mode, {})[report.tree.label] = deviation
    return dict(sorted(found.items()))


def span(releases: list[str]) -> str:
    """Releases in words; neighbours as a range."""
    first = SUPPORTED.index(releases[0])
    if len(releases) > 2 and releases == list(SUPPORTED[first : first + len(releases)]):
        return f"{releases[0]} to {releases[-1]}"
    return ", ".join(releases)


def main() -> None:
    reports = run()
    for mode, trees in reports.items():
        for report in trees:
            if missing := WILD_USES.keys() - report.wild_outcomes().keys():
                sys.exit(f"{report.tree.label}, {mode}: never reached {', '.join(missing)}")
    PAGE.write_text("\n".join(page(reports)).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
