"""Fixtures shared by the suite's own tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conformance.pool import Pool
from conformance.sut.source import NEWEST, Tree, cache_root, locate


@pytest.fixture(scope="session")
def newest() -> Tree:
    """The newest supported release, fetched if need be."""
    return locate(NEWEST)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """A pool of one worker at a time."""
    with Pool(cache_root(), size=1) as pool:
        yield pool
