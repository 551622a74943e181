"""One item per tree and clause; the record in :mod:`reference.clauses` is all there is to one."""

from __future__ import annotations

import pytest

from conformance.report import explain
from conformance.runner import TreeReport
from conformance.sut.source import NEWEST
from reference.clauses import CLAUSES


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Cross the trees of the command line with the clauses."""
    trees = metafunc.config.getoption("--sglang") or [NEWEST]
    grouped = [pytest.param(t, marks=pytest.mark.xdist_group(f"tree {t}"), id=t) for t in trees]
    # Apart, so that all clauses of a tree share one instance of its report.
    metafunc.parametrize("tree_report", grouped, indirect=True, scope="session")
    metafunc.parametrize("number", list(CLAUSES))


def test_clause(tree_report: TreeReport, number: str) -> None:
    """No legal trace deviates from the clause, and it was checked."""
    found = [d for d in tree_report.deviations if d["clause"] == number and d["mode"] == "legal"]
    open_ = [d for d in found if d["waiver"] is None]
    if open_:
        pytest.fail("\n".join("\n".join(explain.lines(d)) for d in open_), pytrace=False)
    if found:
        pytest.xfail(f"waived: {found[0]['waiver']}")
    checked = tree_report.clause_counts(wild=False)[number]
    if checked is None:
        pytest.skip(f"applies only with {CLAUSES[number].needs}")
    assert checked, "the clause was never checked"
