"""What wild uses may show: the right rows, or a clear error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from conformance.observation import Observation
from conformance.oracle.aspects import expect
from conformance.oracle.laws import Laws, every
from generators.operations import Law, Wild
from generators.protocol import Effect

if TYPE_CHECKING:
    from conformance.oracle.steps import Oracle


class WildUses:
    """What each wild use must show where it is not refused."""

    def __init__(self, oracle: Oracle, laws: Laws) -> None:
        self.oracle, self.laws = oracle, laws
        self._perform: dict[str, Callable[[str, Effect], Observation]] = {
            "merge-raw-idle-right": self._whole,
            "merge-raw-idle-left": self._whole,
            "mirror-left-only": self._refused,
            "mirror-right-only": self._refused,
            "relayed-with-stored": self._refused,
            "stored-with-relayed": self._refused,
            "resolve-without-indices": self._untouched,
        }

    def perform(self, operation: Wild, effect: Effect) -> Iterator[Observation]:
        """What one wild use must show."""
        yield self._perform[operation.use](operation.use, effect)

    def _whole(self, use: str, effect: Effect) -> Observation:
        return self.laws.show(f"wild-{use}", self.laws.operand(Law("merge"), effect, every(effect)))

    def _refused(self, use: str, effect: Effect) -> Observation:
        """No result would be right: only a clear error will do."""
        return expect(f"wild-{use}", outcome="an error")

    def _untouched(self, use: str, effect: Effect) -> Observation:
        return expect(
            f"wild-{use}",
            outcome=None,
            tokens=self.oracle.tensor(effect.tokens, self.oracle.facts.token_dtype),
            lengths=self.oracle.tensor(effect.lengths),
        )
