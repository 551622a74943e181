"""Fixtures shared by the suite's own tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from conformance.pool import Pool
from conformance.sut.source import NEWEST, Tree, cache_root, locate

# Before any process of this session loads triton: its own functions are interpreted or compiled for
# good when they load, and processes are forked from one that has loaded them.
os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def newest() -> Tree:
    """The newest supported release, fetched if need be."""
    return locate(NEWEST)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """A pool of one worker at a time."""
    with Pool(cache_root(), size=1) as pool:
        yield pool
