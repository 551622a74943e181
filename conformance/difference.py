"""A difference between a tree and the specification, as verdicts and reports hand it on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from generators.operations import Header
from generators.schedules import Server


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


@dataclass(frozen=True)
class Cover:
    """What a waiver covers, if its witness shows it on this tree.

    Attributes:
        name: the waiver's.
        clause, anomaly: of the differences that it covers.
        where: settings of the traces on which it does, by field of the header: a value, or ``>N``.
        shown: whether the witness was replayed in this process; one for other debug settings is
            replayed elsewhere, and who puts the answers together sees whether it covers.
    """

    name: str
    clause: str
    anomaly: str
    where: Mapping[str, str] = field(default_factory=dict)
    shown: bool = True

    def covers(self, difference: Difference, header: Header | Server) -> bool:
        """Whether it covers a difference that shows on a trace, or schedule, with this header."""
        if (difference.clause, difference.anomaly) != (self.clause, self.anomaly):
            return False
        return all(
            hasattr(header, name) and holds(text, getattr(header, name))
            for name, text in self.where.items()
        )


def holds(text: str, value: Any) -> bool:
    """Whether a setting is as `text` says; switches are ``true`` or ``false``."""
    if text.startswith(">"):
        return bool(int(value) > int(text[1:]))
    return str(value).lower() == text.lower()
