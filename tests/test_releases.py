"""Every supported release loads, is recognised, and conforms on a small budget."""

from __future__ import annotations

import pytest

from conformance import waivers
from conformance.pool import Pool
from conformance.runner import Profile, check_trees
from conformance.sut.source import SUPPORTED, locate

BUDGET = Profile("small", 1_000, 500, 0)
COMPILED = Profile("compiled", 1, 1, 1)


@pytest.mark.parametrize("release", SUPPORTED)
def test_release(release: str, pool: Pool) -> None:
    (report,) = check_trees([locate(release)], BUDGET, pool, seed=11, waivers=waivers.load())
    assert report.verdict == "conforms", report.deviations
    assert report.surface["notes"] == []
    assert report.surface["token_dtype"] == ("int32" if release == "0.5.14" else "int64")
    assert ("idle" in report.features()) is (release == "0.5.23")


@pytest.mark.parametrize("release", [SUPPORTED[0], SUPPORTED[-1]])
def test_the_waiver_of_the_compiled_assertion_is_needed(release: str, pool: Pool) -> None:
    (report,) = check_trees([locate(release)], COMPILED, pool, waivers=waivers.load())
    assert report.waivers == {"consume-once-assertion-compiled-away": "active"}
    assert report.verdict == "conforms"
