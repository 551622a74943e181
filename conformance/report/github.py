"""Lines that GitHub Actions shows beside a job: at most ten, so the first say the most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conformance.report import explain

MOST = 10
"""GitHub shows this many of a step."""


def line(level: str, title: str, text: str) -> str:
    """One workflow command; `level` is ``error``, ``warning`` or ``notice``."""
    escaped = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    short = title.replace("%", "%25").replace(",", "%2C").replace(":", "%3A")
    return f"::{level} title={short}::{escaped}"


def of_deviations(deviations: Sequence[dict[str, Any]]) -> list[str]:
    """One line per deviation that counts: no waiver covers it, and the scheduler can issue it."""
    return [
        line(
            "error",
            explain.headline(deviation),
            f"{deviation['tree']}: expected {deviation['difference']['expected']}, "
            f"observed {deviation['difference']['observed']}",
        )
        for deviation in deviations
        if deviation["mode"] == "legal" and deviation["waiver"] is None
    ]


def limited(lines: Sequence[str]) -> list[str]:
    """The first lines, and in place of the rest how many they are."""
    if len(lines) <= MOST:
        return list(lines)
    more = line(
        "warning", "dflash-conformance", f"and {len(lines) - MOST + 1} more: see the summary"
    )
    return [*lines[: MOST - 1], more]
