"""Check the kernels of a loaded tree: run the list, judge, make failures small, apply waivers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from conformance.difference import Difference
from conformance.errors import NotOnThisTree, UserError
from conformance.kernels import contracts, misuse, programs, sources
from conformance.kernels.catalog import KERNELS
from conformance.kernels.checker import Check, arguments, smallest
from conformance.sut.surface import Surface
from generators.kernel_inputs import Case

Note = Callable[[Case], None]
"""Called with each case before it runs, for crash reports."""


@dataclass
class Outcome:
    """What checking one kernel came to.

    Attributes:
        kernel: its name.
        module: where the tree keeps it.
        digest: of its source, see :class:`conformance.kernels.sources.Source`.
        programs: grid instances that ran.
        reached: how many rows each call was checked on.
        deviations: as reports have them, ``case`` in the place of ``trace``.
        waivers: state of each waiver that was tried.
    """

    kernel: str
    module: str
    digest: str
    programs: int = 0
    reached: Counter[str] = field(default_factory=Counter)
    deviations: list[dict[str, Any]] = field(default_factory=list)
    waivers: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """For reports."""
        return {**vars(self), "reached": dict(self.reached)}


class Kernels:
    """The kernels of one loaded tree.

    Args:
        surface: the tree.
        note: see :data:`Note`.
    """

    def __init__(self, surface: Surface, note: Note | None = None) -> None:
        self.surface = surface
        self.sources = sources.find(surface.root, surface.loader.relocated)
        self._note = note or (lambda case: None)

    @property
    def features(self) -> frozenset[str]:
        """The capabilities that the kernels' clauses need."""
        found = {sources.ENTRIES[kernel].feature for kernel in self.sources}
        if found & {"kernel_correct", "kernel_accept"}:
            found.add("kernel_acceptance")
        return frozenset(found | {"kernels"} if found else found)

    def notes(self) -> list[str]:
        """What was not recognised, one line each."""
        return [
            f"{entry.function} was not found: its kernel is not checked"
            for kernel, entry in sources.ENTRIES.items()
            if entry.expected and kernel not in self.sources
        ]

    def check(
        self,
        kernel: str,
        waivers: Sequence[Mapping[str, Any]] = (),
        *,
        until: tuple[str, str] | None = None,
    ) -> Outcome:
        """Run a kernel's part of the list, and the layouts its wrapper may refuse.

        Args:
            waivers: with a case of some kernel as their witness.
            until: (clause, anomaly) after which nothing more is looked for.
        """
        outcome = self._outcome(kernel)
        check = self._check_of(kernel, outcome)
        for waiver in waivers:
            if waiver["case"]["kernel"] == kernel:
                self._witness(check, outcome, waiver)
        scale = 1 if self.surface.device.device.type == "cpu" else programs.SCALE
        for program in programs.listed(kernel, tokens=self._tokens(kernel), scale=scale):
            case = program.case
            self._note(case)
            self._count(outcome, check, case)
            difference = check(case, thorough=program.thorough)
            if difference is not None:
                self._add(check, outcome, case, difference)
                if (difference.clause, difference.anomaly) == until:
                    return outcome
        for record in misuse.MISUSES.values():
            if record.kernel == kernel and not record.refuses:
                self._misuse(check, outcome, record)
        return outcome

    def try_misuse(self, name: str) -> Outcome:
        """Try one misuse; the process may not survive it."""
        record = misuse.MISUSES[name]
        outcome = self._outcome(record.kernel)
        self._misuse(self._check_of(record.kernel, outcome), outcome, record)
        return outcome

    def replay(self, case: Case) -> dict[str, Any] | None:
        """The deviation that a case shows, as reports have it, or None.

        Raises:
            NotOnThisTree: the tree does not have the kernel.
            UserError: the kernel has no such misuse.
        """
        if case.kernel not in self.sources:
            raise NotOnThisTree(f"this tree has no {sources.ENTRIES[case.kernel].function}")
        check = self._check_of(case.kernel, self._outcome(case.kernel))
        self._note(case)
        if not case.misuse:
            difference = check(case, thorough=True)
            return _deviation(case, difference, wild=False) if difference else None
        record = misuse.MISUSES.get(case.misuse)
        if record is None or record.kernel != case.kernel:
            raise UserError(f"kernel {case.kernel} has no misuse {case.misuse!r}")
        difference = contracts.check(check, record, case)
        return _deviation(case, difference, wild=record.refuses) if difference else None

    # -- parts --------------------------------------------------------------------------------

    def _outcome(self, kernel: str) -> Outcome:
        source = self.sources[kernel]
        return Outcome(kernel, source.module, source.digest)

    def _tokens(self, kernel: str) -> str:
        """The type in which this tree passes bonus tokens to a kernel."""
        narrow = {
            "prepare": self.surface.token_dtype == torch.int32,
            "accept": self.sources[kernel].narrow,
        }
        return "int32" if narrow.get(kernel, False) else "int64"

    def _check_of(self, kernel: str, outcome: Outcome) -> Check:
        source, entry = self.sources[kernel], sources.ENTRIES[kernel]
        function = self.surface.function(source.module, entry.function)

        def count(rows: int, grid: int) -> None:
            outcome.programs += grid

        return Check(KERNELS[kernel], function, self.surface.device.device, count)

    @staticmethod
    def _count(outcome: Outcome, check: Check, case: Case) -> None:
        """A case counts for its kernel, and for what is checked of every kernel."""
        call = "kernel-nothing" if case.batch == 0 else check.kernel.call_name
        outcome.reached[call] += max(case.batch, 1)
        if case.layout != "plain":
            outcome.reached[misuse.CALL] += max(case.batch, 1)

    def _misuse(self, check: Check, outcome: Outcome, record: misuse.Misuse) -> None:
        case = replace(contracts.case_of(record), tokens=self._tokens(record.kernel))
        self._note(case)
        outcome.reached[record.call_name] += case.batch
        difference = contracts.check(check, record, case)
        if difference is None:
            return
        deviation = _deviation(case, difference, wild=record.refuses)
        for known in outcome.deviations:
            if _key(known) == _key(deviation):
                known["count"] += 1
                return
        outcome.deviations.append(deviation)

    def _add(self, check: Check, outcome: Outcome, case: Case, difference: Difference) -> None:
        for known in outcome.deviations:
            if _key(known) == (difference.clause, difference.anomaly, "legal"):
                known["count"] += 1
                return
        if self.surface.device.lost():
            # Whatever is tried from here on fails: the worker ends, and its recorder has the case.
            raise RuntimeError("the device is lost")
        case, difference = smallest(check, case, difference)
        outcome.deviations.append(_deviation(case, difference, wild=False))

    def _witness(self, check: Check, outcome: Outcome, waiver: Mapping[str, Any]) -> None:
        case = Case.from_json(waiver["case"])
        self._note(case)
        difference = check(case)
        wanted = (waiver["clause"], waiver["anomaly"])
        if difference is None or (difference.clause, difference.anomaly) != wanted:
            outcome.waivers[waiver["name"]] = "not needed"
            return
        outcome.waivers[waiver["name"]] = "active"
        deviation = _deviation(case, difference, wild=False)
        outcome.deviations.append({**deviation, "waiver": waiver["name"], "count": 0})


def _key(deviation: Mapping[str, Any]) -> tuple[str, str, str]:
    return deviation["clause"], deviation["anomaly"], deviation["mode"]


def _deviation(case: Case, difference: Difference, *, wild: bool) -> dict[str, Any]:
    return {
        "clause": difference.clause,
        "anomaly": difference.anomaly,
        "mode": "wild" if wild else "legal",
        "waiver": None,
        "count": 1,
        "difference": asdict(difference),
        "trace": None,
        "case": case.as_json(),
        "line": case.line(),
        "arguments": arguments(case),
    }
