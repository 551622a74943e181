"""A difference between a tree and the specification, as verdicts and reports hand it on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RowDifference:
    """One row of one value that differs.

    Attributes:
        row: row of the batch, or slot of the relay.
        request: who the row belongs to, for people.
        expected, observed: the two values.
        expected_writer, observed_writer: the writes these values come from, for people, or "".
    """

    row: int
    request: str
    expected: Any
    observed: Any
    expected_writer: str = ""
    observed_writer: str = ""


@dataclass
class Difference:
    """The first thing at which a tree and the specification part.

    ``declare`` has, per undeclared attribute, its owner, its name and a guess at its kind.
    """

    clause: str
    anomaly: str
    call: str
    aspect: str
    expected: str
    observed: str
    rows: list[RowDifference] = field(default_factory=list)
    declare: list[str] = field(default_factory=list)
