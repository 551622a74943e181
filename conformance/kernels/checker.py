"""Judge one case of one kernel: its answers against the reference, and its manners.

A kernel is launched several times on the same rows: as they are, in reverse order, and, where a
check is thorough, once more and with half of them alone. Every launch has buffers of its own,
filled with one of two patterns, between guard zones. What must hold:

- nothing outside the outputs changed, no argument, no guard zone, no gap between rows (B7);
- nothing inside an output still holds what was there before (B7);
- every launch gives the reference's answer (the clause of the output);
- a row has the same bits in every launch, whoever shares the batch.

A difference that goes away when the arguments lie contiguous in memory is one of B8.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from conformance.difference import Difference, RowDifference
from conformance.kernels.buffers import Buffer, allocating, poisoned, same
from conformance.kernels.catalog import Arguments, Kernel, Output
from conformance.sut.isolation import StandInUsed
from conformance.verdict import CLEAR_ERRORS
from generators.kernel_inputs import Case, build

_MOST_ELEMENTS = 12


@dataclass(frozen=True)
class Check:
    """A kernel of one tree.

    Attributes:
        kernel: what it must do.
        function: the tree's function.
        device: where it runs.
        count: called after each launch with its rows and the programs they were.
    """

    kernel: Kernel
    function: Any
    device: torch.device
    count: Callable[[int, int], None] = lambda _, __: None

    def __call__(self, case: Case, *, thorough: bool = False) -> Difference | None:
        """The first difference of `case`, or None."""
        if case.batch == 0:
            return self._nothing(case)
        difference = self._judged(case, thorough)
        if difference is None or case.layout == "plain" or difference.clause == "B7":
            return difference
        if self._judged(replace(case, layout="plain"), thorough) is None:
            return replace(difference, clause="B8")
        return difference

    def _judged(self, case: Case, thorough: bool) -> Difference | None:
        given = build(case, self.device)
        order = torch.arange(case.batch, device=self.device)
        plans = [(order, 0), (order.flip(0), 1)]
        if thorough:
            plans += [(order, 0), (order[::2], 1)]
        launches: list[Launch] = []
        for rows, poison in plans:
            launch = self.start(case, self.place(case, given, rows, poison))
            if launch.error is not None:
                return self.raised(launch.error)
            launches.append(launch)
        return (
            self.layout(case, launches[0])
            or self.outside(launches)
            or self._unwritten(case, launches)
            or self.against_reference(case, launches)
            or self._against_each_other(case, launches)
        )

    # -- launching ----------------------------------------------------------------------------

    def place(self, case: Case, given: Arguments, rows: Tensor, poison: int) -> Launch:
        """Lay out the arguments and outputs of one launch of the rows `rows` of `given`."""
        kernel = self.kernel
        offset = 0 if case.layout == "plain" else 1
        launch = Launch(rows, poison, offset)
        for number, (name, value) in enumerate(given.items()):
            if isinstance(value, Tensor):
                value = value[rows] if name in kernel.rows else value
                gap = number + 1 if case.layout == "strided" and name in kernel.strided else 0
                launch.placed[name] = launch.hold(name, value, gap)
            else:
                launch.placed[name] = value
            launch.given[name] = value
        if not kernel.allocates:
            for output in kernel.outputs:
                dtype = output.dtype(case)
                assert dtype is not None
                shape = output.shape(replace(case, batch=len(rows)))
                launch.into[output.name] = launch.reserve(output.name, shape, dtype, rows.device)
        return launch

    def start(self, case: Case, launch: Launch) -> Launch:
        """Call the function; what it raises is kept, unless it used a stand-in."""
        try:
            # NaN is among the values that the interpreter computes with.
            with allocating(launch.poison, launch.offset) as made, warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                outputs = dict(self.kernel.call(self.function, launch.placed, launch.into))
        except StandInUsed:
            raise
        except Exception as error:
            launch.error = error
            return launch
        rows = len(launch.rows)
        self.count(rows, rows * self.kernel.programs(case))
        launch.outputs = outputs
        for name, value in outputs.items():
            launch.buffers += [(name, b) for b in made if b.view.data_ptr() == value.data_ptr()]
        return launch

    # -- oracles ------------------------------------------------------------------------------

    def raised(self, error: Exception) -> Difference:
        """An exception on arguments that are in order."""
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return self.difference(
            self.kernel.clauses[0], "unexpected-error", "error", "no exception", text
        )

    def _outputs(self, case: Case) -> Iterator[Output]:
        for output in self.kernel.outputs:
            if output.name != "hidden_states" or case.floats != "none":
                yield output

    def layout(self, case: Case, launch: Launch) -> Difference | None:
        """Shapes and types of the outputs, and whether they are all there."""
        for output in self._outputs(case):
            value = launch.outputs.get(output.name)
            dtype, shape = output.dtype(case), output.shape(case)
            if value is not None and tuple(value.shape) == shape and _fits(value.dtype, dtype):
                continue
            anomaly = "wrong-type"
            if value is None or value.shape[:1] != shape[:1]:
                fewer = value is None or value.dim() == 0 or value.shape[0] < shape[0]
                anomaly = "missing-row" if fewer else "phantom-row"
            expected = f"{_dtype(dtype)}{list(shape)}"
            observed = "None" if value is None else f"{_dtype(value.dtype)}{list(value.shape)}"
            return self.difference(output.clause, anomaly, output.name, expected, observed)
        return None

    def outside(self, launches: Sequence[Launch]) -> Difference | None:
        """B7: what is no output stays as it was."""
        named = [(launch, *pair) for launch in launches for pair in launch.buffers]
        disturbed = torch.stack([buffer.disturbed() for _, _, buffer in named]).tolist()
        for (launch, name, _), wrong in zip(named, disturbed, strict=True):
            if wrong:
                role = "around output" if name in launch.outputs else "of argument"
                return self.difference(
                    "B7", "phantom-row", name, "only outputs are written", f"memory {role} changed"
                )
        return None

    def _unwritten(self, case: Case, launches: Sequence[Launch]) -> Difference | None:
        """Elements that hold the pattern of each launch hold what was there before."""
        first, second = launches[0], launches[1]
        held = {name for name, _ in first.buffers}
        for output in self._outputs(case):
            if output.name not in held:
                continue  # made by torch operations, not in a buffer of ours
            one, two = (launch.outputs[output.name] for launch in (first, second))
            left = poisoned(one, 0) & poisoned(two.flip(0), 1)
            if bool(left.any()):
                expected = torch.full_like(one, UNKNOWN)
                return self._elements("B7", "never-written", output.name, expected, one, left)
        return None

    def against_reference(self, case: Case, launches: Sequence[Launch]) -> Difference | None:
        """The first launch and output that differs from the specification."""
        judged = [self.kernel.judge(launch.given, launch.outputs) for launch in launches]
        names = [output.name for output in self._outputs(case)]
        wrong = torch.stack([v[name].wrong.any() for v in judged for name in names]).tolist()
        if not any(wrong):
            return None
        launch, number = divmod(wrong.index(True), len(names))
        output = list(self._outputs(case))[number]
        verdict = judged[launch][output.name]
        observed = launches[launch].outputs[output.name]
        anomaly = self._anomaly(verdict.expected, observed, verdict.wrong)
        return self._elements(
            output.clause, anomaly, output.name, verdict.expected, observed, verdict.wrong
        )

    def _anomaly(self, expected: Tensor, observed: Tensor, wrong: Tensor) -> str:
        want, got = expected[wrong], observed[wrong]
        if want.dtype == torch.int64 and bool((want.to(torch.int32).to(want.dtype) == got).all()):
            return "wrong-type"  # what is left of a value in 32 bits
        return "wrong-value"

    def _against_each_other(self, case: Case, launches: Sequence[Launch]) -> Difference | None:
        first = launches[0]
        for launch in launches[1:]:
            for output in self._outputs(case):
                one = first.outputs[output.name][launch.rows]
                two = launch.outputs[output.name]
                apart = ~same(one, two)
                if bool(apart.any()):
                    alike = torch.equal(first.rows, launch.rows)
                    anomaly = "unstable" if alike else "wrong-owner"
                    return self._elements(output.clause, anomaly, output.name, one, two, apart)
        return None

    # -- zero rows ----------------------------------------------------------------------------

    def _nothing(self, case: Case) -> Difference | None:
        """B10: a batch of nobody is a no-op, or a clear error."""
        given = build(case, self.device)
        rows = torch.arange(0, device=self.device)
        launch = self.start(case, self.place(case, given, rows, 0))
        if launch.error is not None:
            if type(launch.error).__name__ in CLEAR_ERRORS:
                return self._renamed(self.outside([launch]))
            return self._renamed(self.raised(launch.error))
        return self._renamed(self.layout(case, launch) or self.outside([launch]))

    @staticmethod
    def _renamed(difference: Difference | None) -> Difference | None:
        return replace(difference, clause="B10") if difference is not None else None

    # -- words --------------------------------------------------------------------------------

    def difference(
        self, clause: str, anomaly: str, aspect: str, expected: str, observed: str
    ) -> Difference:
        """A difference of something other than elements."""
        return Difference(clause, anomaly, self.kernel.call_name, aspect, expected, observed)

    def _elements(
        self,
        clause: str,
        anomaly: str,
        aspect: str,
        expected: Tensor,
        observed: Tensor,
        wrong: Tensor,
    ) -> Difference:
        """A difference at the elements where `wrong`."""
        rows = []
        for place in wrong.nonzero()[:_MOST_ELEMENTS].tolist():
            want, got = expected[tuple(place)].item(), observed[tuple(place)].item()
            where = f"column {', '.join(map(str, place[1:]))}" if place[1:] else ""
            meant = "anything else" if anomaly == "never-written" else want
            rows.append(RowDifference(place[0], where, meant, got))
        want_text = text(expected) if anomaly != "never-written" else "every element is written"
        return Difference(
            clause,
            anomaly,
            self.kernel.call_name,
            aspect,
            want_text,
            text(observed),
            rows,
        )


UNKNOWN = 0
"""Stands for an expectation that is not shown."""


@dataclass
class Launch:
    """One launch.

    Attributes:
        rows: which rows of the case it is given, in which order.
        poison: which pattern its outputs hold before, 0 or 1.
        offset: by which its buffers are shifted out of alignment.
        given: the arguments as values.
        placed: the arguments as they are passed.
        into: the outputs to fill, where the caller makes them.
        buffers: every buffer it could touch, by argument or output.
        outputs: what came of it.
        error: what it raised, or None.
    """

    rows: Tensor
    poison: int
    offset: int
    given: dict[str, Any] = field(default_factory=dict)
    placed: dict[str, Any] = field(default_factory=dict)
    into: dict[str, Tensor] = field(default_factory=dict)
    buffers: list[tuple[str, Buffer]] = field(default_factory=list)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    error: Exception | None = None

    def hold(self, name: str, value: Tensor, gap: int = 0) -> Tensor:
        """An argument in a buffer of its own."""
        buffer = Buffer(
            value.shape, value.dtype, value.device, gap=gap, offset=self.offset, poison=self.poison
        )
        buffer.hold(value)
        self.buffers.append((name, buffer))
        return buffer.view

    def reserve(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, device: Any, gap: int = 0
    ) -> Tensor:
        """An output in a buffer of its own."""
        buffer = Buffer(shape, dtype, device, gap=gap, offset=self.offset, poison=self.poison)
        self.buffers.append((name, buffer))
        return buffer.view


def _dtype(dtype: torch.dtype | None) -> str:
    return "an integer type" if dtype is None else str(dtype).removeprefix("torch.")


def _fits(dtype: torch.dtype, wanted: torch.dtype | None) -> bool:
    return dtype == wanted or (wanted is None and not dtype.is_floating_point)


def text(value: Any) -> str:
    """A tensor for people: type, shape, first elements."""
    if not isinstance(value, Tensor):
        return str(value)
    head = value.flatten()[:_MOST_ELEMENTS].tolist()
    more = ", ..." if value.numel() > _MOST_ELEMENTS else ""
    return f"{_dtype(value.dtype)}{list(value.shape)} {str(head)[:-1]}{more}]"


def arguments(case: Case) -> dict[str, str]:
    """A case's arguments for people."""
    return {name: text(value) for name, value in build(case, "cpu").items()}


def smallest(check: Check, case: Case, difference: Difference) -> tuple[Case, Difference]:
    """Make a failing case small, keeping clause and anomaly.

    Returns:
        A case of which nothing can be halved or left out, and its difference.
    """
    goal = (difference.clause, difference.anomaly)
    changed = True
    while changed:
        changed = False
        for attempt in _smaller(case):
            found = check(attempt)
            if found is not None and (found.clause, found.anomaly) == goal:
                case, difference, changed = attempt, found, True
                break
    return case, difference


def _smaller(case: Case) -> Iterator[Case]:
    if case.batch > 1:
        half = case.batch // 2
        yield replace(case, batch=half)
        yield replace(case, first=case.first + half, batch=case.batch - half)
        if case.batch > 2:
            yield replace(case, batch=case.batch - 1)
            yield replace(case, first=case.first + 1, batch=case.batch - 1)
    if case.layout != "plain":
        yield replace(case, layout="plain")
    for name in ("block", "width", "pool"):
        size = getattr(case, name)
        if size > 1:
            yield replace(case, **{name: size // 2})
            if size < 8 and (case.kernel, name) != ("selector", "width"):  # a power of two
                yield replace(case, **{name: size - 1})
    if case.kernel == "gather" and case.floats != "none":
        yield replace(case, floats="none")
