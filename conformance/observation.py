"""What one call into a tree made visible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FEW_ROWS = 3
"""A batch of fewer rows has too many fields that have as many values by accident."""


@dataclass(slots=True)
class Observation:
    """One call's visible effects.

    Attributes:
        call: which call (see the ``calls`` of :class:`reference.clauses.Clause`).
        aspects: values by name: tensors, numbers, lists, None; exceptions as :class:`Outcome`.
        draft: the draft input that the call left, whole, where there is one. The model does not
            speak of all its attributes; two trees are compared by them (:mod:`conformance.record`).
        written: batch fields that the call rebound, with their new values, where it is recorded.
    """

    call: str
    aspects: dict[str, Any]
    draft: Any = None
    written: dict[str, Any] | None = None


def merge_call(first: int, cut: int, last: int) -> str:
    """Name of the law's merge of rows ``first:cut`` with rows ``cut:last``; one may be idle."""
    return "law-merge" if first < cut < last else "law-merge-idle"


@dataclass(frozen=True, slots=True)
class Outcome:
    """An exception as an observation."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Outcome:
        return cls(type(error).__name__, " ".join(str(error).split())[:200])

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}" if self.message else self.kind
