"""pytest as a client of the engine: every clause becomes an item, per tree.

``pytest --pyargs conformance.suite --sglang 0.5.23`` checks a tree as ``dflash-conformance run``
does, and reports clause by clause.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conformance.runner import TreeReport


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the conformance suite."""
    group = parser.getgroup("dflash-conformance")
    group.addoption("--sglang", action="append", metavar="TREE", help="tree to check, repeatable")
    group.addoption(
        "--dflash-profile", default="quick", choices=["quick", "pr", "nightly"], help="budget"
    )
    group.addoption("--dflash-seed", type=int, default=0, help="seed of the generated traces")


def pytest_configure(config: pytest.Config) -> None:
    """The group mark keeps one tree's items on one xdist worker, so that it is checked once."""
    config.addinivalue_line("markers", "xdist_group(name): items that run on one worker")


@pytest.fixture(scope="session")
def tree_report(request: pytest.FixtureRequest) -> TreeReport:
    """The report of the tree named by the parameter."""
    from conformance import waivers
    from conformance.pool import Pool
    from conformance.runner import PROFILES, check_trees
    from conformance.sut.source import cache_root, locate

    with Pool(cache_root()) as pool:
        (report,) = check_trees(
            [locate(request.param)],
            PROFILES[request.config.getoption("--dflash-profile")],
            pool,
            seed=request.config.getoption("--dflash-seed"),
            waivers=waivers.load(),
        )
    return report
