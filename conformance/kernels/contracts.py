"""Carry out the misuses of :mod:`conformance.kernels.misuse` and judge what the wrapper does.

Where a tree accepts what is wrong it may write anywhere, or read it, so wild misuse runs in a
process of its own, one each, with guard zones around every buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from conformance.difference import Difference
from conformance.kernels.checker import Check, Launch
from conformance.kernels.misuse import Misuse
from conformance.verdict import CLEAR_ERRORS
from generators.kernel_inputs import Case, build

_GAP = 3


def case_of(misuse: Misuse) -> Case:
    """A small case to try a misuse on."""
    return Case(misuse.kernel, 3, 4, width=8, misuse=misuse.name)


def check(checked: Check, misuse: Misuse, case: Case) -> Difference | None:
    """What is wrong with how the wrapper takes a misuse of `case`, or None."""
    given = build(case, checked.device)
    launch = checked.place(case, given, torch.arange(case.batch, device=checked.device), 0)
    _KINDS[misuse.kind](launch, misuse.argument)
    checked.start(case, launch)
    difference = _outcome(checked, misuse, case, launch)
    if difference is None:
        return None
    return replace(difference, clause=misuse.clause, call=misuse.call_name)


def _outcome(checked: Check, misuse: Misuse, case: Case, launch: Launch) -> Difference | None:
    if launch.error is not None:
        if type(launch.error).__name__ not in CLEAR_ERRORS:
            return checked.raised(launch.error)
        return _written(checked, launch)
    if misuse.refuses:
        return checked.difference("B7", "missing-error", "outcome", "a clear error", "accepted")
    return (
        checked.layout(case, launch)
        or checked.outside([launch])
        or checked.against_reference(case, [launch])
    )


def _written(checked: Check, launch: Launch) -> Difference | None:
    """A refusal comes before a write."""
    for name, buffer in launch.buffers:
        if bool(buffer.touched()):
            return checked.difference(
                "B7", "phantom-row", name, "no write before the error", "memory changed"
            )
    return None


# -- kinds ----------------------------------------------------------------------------------------


def _spaced(launch: Launch, name: str) -> None:
    """With gaps between its rows."""
    if name in launch.into:
        plain = launch.into[name]
        launch.into[name] = launch.reserve(name, plain.shape, plain.dtype, plain.device, _GAP)
    else:
        launch.placed[name] = launch.hold(name, launch.placed[name], _GAP)


def _transposed(launch: Launch, name: str) -> None:
    """Column by column in memory."""
    launch.placed[name] = launch.hold(name, launch.placed[name].t()).t()


def _as_a_column(launch: Launch, name: str) -> None:
    """A vector as a matrix of one column."""
    launch.placed[name] = launch.placed[name][:, None]


def _short(axis: int) -> Callable[[Launch, str], None]:
    """One row or column too few."""

    def spoil(launch: Launch, name: str) -> None:
        value: Tensor = {**launch.placed, **launch.into}[name]
        shape = [size - (number == axis) for number, size in enumerate(value.shape)]
        if name in launch.into:
            launch.into[name] = launch.reserve(name, shape, value.dtype, value.device)
        else:
            launch.placed[name] = launch.hold(name, value.narrow(axis, 0, shape[axis]))

    return spoil


def _of_type_int32(launch: Launch, name: str) -> None:
    plain = launch.into[name]
    launch.into[name] = launch.reserve(name, plain.shape, torch.int32, plain.device)


def _past_the_pool(launch: Launch, name: str) -> None:
    launch.placed[name] = launch.hold(name, launch.placed[name] + 7)


_KINDS: dict[str, Callable[[Launch, str], None]] = {
    "spaced": _spaced,
    "transposed": _transposed,
    "as a column": _as_a_column,
    "a row short": _short(0),
    "a column short": _short(1),
    "of type int32": _of_type_int32,
    "past the pool": _past_the_pool,
}
"""How an argument can be wrong, by :attr:`~conformance.kernels.misuse.Misuse.kind`."""
