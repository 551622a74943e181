"""Compare what a tree made visible with what it must be, and give a difference its name.

:func:`judge` takes two observations of one call and returns the first :class:`Difference` in the
call's declared order, or None. A difference names a clause and an *anomaly*; because every value
carries its writer (:mod:`generators.values`), it also says whose value was seen instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conformance import kv_checks
from conformance.difference import Difference, RowDifference
from conformance.observation import Observation, Outcome
from generators.operations import Law, Operation
from generators.protocol import Effect, State
from generators.values import STRIDE, Write
from reference.clauses import CLAUSES


@dataclass
class Context:
    """What a judge may look up: whose values are whose."""

    state: State
    operation: Operation
    effect: Effect
    previous: dict[str, Any]
    poison_lengths: bool = False

    def owner(self, row: int) -> str:
        requests = self.effect.requests
        return f"r{requests[row].number}" if row < len(requests) else ""

    def writer(self, aspect: str, value: int) -> Write | None:
        """Which write a value of a token or length aspect comes from."""
        if "token" in aspect or aspect == "input_ids":
            return self.state.tokens.writer.get(value)
        if "length" in aspect or aspect == "host":
            return self.state.length_writer.get(value)
        return None


Check = Callable[[Observation, Observation, Context], Difference | None]


def _same(expected: Any, observed: Any) -> bool:
    if isinstance(expected, dict):
        return (
            isinstance(observed, dict)
            and expected.keys() == observed.keys()
            and all(_same(value, observed[name]) for name, value in expected.items())
        )
    if isinstance(expected, Tensor):
        return (
            isinstance(observed, Tensor)
            and expected.dtype == observed.dtype
            and expected.shape == observed.shape
            and torch.equal(expected, observed)
        )
    return type(expected) is type(observed) and bool(expected == observed)


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        head = value.flatten()[:12].tolist()
        more = ", ..." if value.numel() > 12 else ""
        return f"{str(value.dtype)[6:]}{list(value.shape)} {str(head)[:-1]}{more}]"
    return str(value)


def _differ(
    clause: str,
    anomaly: str,
    aspect: str,
    expected: Observation,
    observed: Observation,
    rows: list[RowDifference] | None = None,
) -> Difference:
    return Difference(
        clause,
        anomaly,
        observed.call,
        aspect,
        _text(expected.aspects.get(aspect)),
        _text(observed.aspects.get(aspect)),
        rows or [],
    )


def _shape_anomaly(expected: Any, observed: Any) -> str:
    """Name for tensors of different layout."""
    if not isinstance(expected, Tensor) or not isinstance(observed, Tensor):
        return "wrong-value"
    if expected.dtype != observed.dtype or expected.shape[1:] != observed.shape[1:]:
        return "wrong-type"
    if expected.shape == observed.shape:  # then it is the device or the stride that differs
        return "wrong-type"
    return _count_anomaly(expected.shape[0], observed.shape[0])


def _count_anomaly(expected: int, observed: int) -> str:
    """Name for a different number of rows."""
    return "missing-row" if observed < expected else "phantom-row"


def _row_differences(
    aspect: str, expected: Tensor, observed: Tensor, context: Context, owner: Callable[[int], str]
) -> list[RowDifference]:
    rows = []
    for row in (expected != observed).nonzero().flatten().tolist():
        want, got = int(expected[row]), int(observed[row])
        want_writer, got_writer = context.writer(aspect, want), context.writer(aspect, got)
        rows.append(
            RowDifference(
                row,
                owner(row),
                want,
                got,
                want_writer.describe() if want_writer else "",
                got_writer.describe() if got_writer else "",
            )
        )
    return rows


def _value_anomaly(aspect: str, want: int, got: int, context: Context) -> str:
    """Name for one wrong token or length."""
    mine, theirs = context.writer(aspect, want), context.writer(aspect, got)
    if theirs is None:
        return "wrong-type" if mine is not None and _narrowed(want, got) else "never-written"
    if mine is None or (mine.request, mine.generation) != (theirs.request, theirs.generation):
        return "wrong-owner"
    return "stale-read"


def _narrowed(want: int, got: int) -> bool:
    """Whether `got` is what `want` becomes through a narrower type."""
    value = torch.tensor(want, dtype=torch.int64)
    return got != want and got in {
        int(value.to(torch.int32)),
        int(value.to(torch.int16)),
        _through_float(value, torch.float32),
        _through_float(value, torch.float64),
    }


def _through_float(value: Tensor, dtype: torch.dtype) -> int:
    return int(value.to(dtype).to(torch.int64))


# -- building blocks of checks ---------------------------------------------------------------


def equal(aspect: str, clause: str, anomaly: str = "wrong-value") -> Check:
    """The aspect must be equal; where the expectation does not name it, it is not checked."""

    def check(expected: Observation, observed: Observation, context: Context) -> Difference | None:
        if aspect not in expected.aspects:
            return None
        want, got = expected.aspects[aspect], observed.aspects.get(aspect)
        if _same(want, got):
            return None
        return _differ(clause, anomaly, aspect, expected, observed)

    return check


def members(aspect: str, clause: str) -> Check:
    """A list of requests must have the expected ones in their order."""

    def check(expected: Observation, observed: Observation, context: Context) -> Difference | None:
        want, got = expected.aspects.get(aspect), observed.aspects.get(aspect)
        if want is None or want == got:
            return None
        anomaly = "wrong-owner"
        if got is None or len(want) != len(got):
            anomaly = _count_anomaly(len(want), len(got or []))
        return _differ(clause, anomaly, aspect, expected, observed)

    return check


def _host_sum(clause: str) -> Check:
    """The sum of host lengths is right, or None: then it is taken where it is needed."""
    whole = equal("host_sum", clause)

    def check(expected: Observation, observed: Observation, context: Context) -> Difference | None:
        if observed.aspects.get("host_sum") is None:
            return None
        return whole(expected, observed, context)

    return check


def layout(aspect: str, clause: str) -> Check:
    """Dtype, shape, device and contiguity must be the expected ones."""

    def check(expected: Observation, observed: Observation, context: Context) -> Difference | None:
        if aspect not in expected.aspects:
            return None
        want, got = expected.aspects[aspect], observed.aspects.get(aspect)
        if want is None and got is None:
            return None
        if (
            isinstance(want, Tensor)
            and isinstance(got, Tensor)
            and want.dtype == got.dtype
            and want.shape == got.shape
            and want.device == got.device
            and got.is_contiguous()
        ):
            return None
        return _differ(clause, _shape_anomaly(want, got), aspect, expected, observed)

    return check


def rows(aspect: str, clause: str, *, dtype_clause: str | None = None) -> Check:
    """Row j must hold the expected value; a difference is named after the row's real owner."""

    def check(expected: Observation, observed: Observation, context: Context) -> Difference | None:
        if aspect not in expected.aspects:
            return None
        want, got = expected.aspects[aspect], observed.aspects.get(aspect)
        if _same(want, got):
            return None
        if (
            not isinstance(want, Tensor)
            or not isinstance(got, Tensor)
            or want.shape != got.shape
            or want.dtype != got.dtype
        ):
            wrong_dtype = (
                isinstance(want, Tensor) and isinstance(got, Tensor) and want.dtype != got.dtype
            )
            return _differ(
                dtype_clause if wrong_dtype and dtype_clause else clause,
                _shape_anomaly(want, got),
                aspect,
                expected,
                observed,
            )
        details = _row_differences(aspect, want, got, context, context.owner)
        if aspect in ("tokens", "lengths", "input_ids"):
            first = details[0]
            anomaly = _value_anomaly(aspect, first.expected, first.observed, context)
        else:
            known = context.state.used if aspect in ("future", "slots", "slots_cpu") else ()
            others = {*want.tolist(), *known}
            anomaly = "wrong-owner" if details[0].observed in others else "phantom-row"
        return _differ(clause, anomaly, aspect, expected, observed, details)

    return check


def widths(clause: str) -> Check:
    """The stored tensors must have the right rows, trailing dimensions and dtypes."""

    def check(expected: Observation, observed: Observation, context: Context) -> Difference | None:
        want, got = expected.aspects.get("widths"), observed.aspects.get("widths")
        if want is None:
            return None
        if want != got:
            theirs = {place: (shape, dtype) for place, shape, dtype in got or []}
            for place, mine, dtype in want:
                shape, other = theirs.get(place, (mine, dtype))  # a tree may drop unused fields
                if (mine, dtype) != (shape, other):
                    counts = (mine[1:], dtype) == (shape[1:], other)
                    anomaly = _count_anomaly(mine[0], shape[0]) if counts else "wrong-type"
                    return _differ(clause, anomaly, "widths", expected, observed)
        rows = expected.aspects["tokens"].shape[0]
        for count in observed.aspects.get("extra_rows", ()):
            if count != rows:
                anomaly = _count_anomaly(rows, count)
                return _differ(clause, anomaly, "extra_rows", expected, observed)
        return None

    return check


def _error(clause: str) -> Check:
    """The call must not raise."""

    def check(expected: Observation, observed: Observation, context: Context) -> Difference | None:
        error = observed.aspects.get("error")
        if error is None:
            return None
        return Difference(
            clause, "unexpected-error", observed.call, "error", "no error", str(error)
        )

    return check


def _resolve_error(expected: Observation, observed: Observation, context: Context) -> Any:
    error = observed.aspects.get("error")
    if error is None:
        return None
    lengths = observed.aspects.get("during") == "resolve_seq_lens_cpu"
    debug, stale = context.state.header.debug, observed.aspects.get("fresh") is False
    if debug and lengths and error.kind == "AssertionError" and stale:
        clause, anomaly = "R12", "unexpected-error"
    else:
        clause = "R2" if lengths else "R1"
        consumed = debug and error.kind == "RuntimeError"
        anomaly = "double-consume" if consumed else "unexpected-error"
    return Difference(clause, anomaly, observed.call, "error", "no error", str(error))


def _resolved_values(expected: Observation, observed: Observation, context: Context) -> Any:
    """R8, R1, R2: the pair (token, length) of every row, and whose it is."""
    want_t, got_t = expected.aspects["tokens"], observed.aspects["tokens"]
    want_l, got_l = expected.aspects["lengths"], observed.aspects["lengths"]
    tokens_ok, lengths_ok = torch.equal(want_t, got_t), torch.equal(want_l, got_l)
    if tokens_ok and lengths_ok:
        return None
    aspect = "lengths" if tokens_ok else "tokens"
    details = _row_differences(
        aspect, expected.aspects[aspect], observed.aspects[aspect], context, context.owner
    )
    first = details[0]
    mine = context.writer(aspect, first.expected)
    theirs = context.writer(aspect, first.observed)
    anomaly = _value_anomaly(aspect, first.expected, first.observed, context)
    clause = "R2" if tokens_ok else "R1"
    if mine and theirs and theirs.slot == mine.slot:
        if (theirs.request, theirs.generation) != (mine.request, mine.generation):
            clause = "R8"
        elif tokens_ok or torch.equal(want_l[first.row], got_l[first.row]):
            # One channel is right and the other is older: the row is torn.
            clause, anomaly = "R2", "torn-row"
    return _differ(clause, anomaly, aspect, expected, observed, details)


def _written(channel: str) -> Check:
    """P1-P4, P7: after a publish or stash the whole channel must be as expected."""
    aspect = f"relay_{channel}"

    def check(expected: Observation, observed: Observation, context: Context) -> Difference | None:
        want, got = expected.aspects.get(aspect), observed.aspects.get(aspect)
        if want is None or got is None or _same(want, got):
            return None
        if want.dtype != got.dtype or want.shape != got.shape:
            return _differ("P2", _shape_anomaly(want, got), aspect, expected, observed)
        addressed = set(context.effect.slots)

        def owner(slot: int) -> str:
            holder = [r.number for r in context.state.live.values() if r.slot == slot]
            return f"r{holder[0]}@{slot}" if holder else f"slot {slot}"

        details = _row_differences(aspect, want, got, context, owner)
        inside = [d for d in details if d.row in addressed]
        first = (inside or details)[0]
        before = context.previous.get(aspect)
        if not inside:
            padding = all(detail.row == 0 for detail in details)
            clause, anomaly = ("P7" if padding else "P2"), "phantom-row"
        elif _narrowed(first.expected, first.observed) and channel == "tokens":
            clause, anomaly = "P4", "wrong-type"
        elif before is not None and int(before[first.row]) == first.observed:
            clause, anomaly = ("P3" if _unread(first, context) else "P1"), "lost-update"
        else:
            clause = "P1"
            anomaly = _value_anomaly(aspect, first.expected, first.observed, context)
        return _differ(clause, anomaly, aspect, expected, observed, details)

    return check


def _unread(row: RowDifference, context: Context) -> bool:
    """Whether a relay row holds an earlier write that no resolve has read.

    A step has just resolved the rows it writes; what a prefill finds in its rows is unread.
    """
    writer = context.state.tokens.writer.get(row.observed) or context.state.length_writer.get(
        row.observed
    )
    arrival = context.operation.op in ("admit", "mixed", "seed")
    return arrival and writer is not None and writer.slot == row.row


def _unchanged_relay(clause: str) -> Check:
    """The recognised channels must hold what the model holds (poison included)."""

    def check(expected: Observation, observed: Observation, context: Context) -> Difference | None:
        for channel in ("tokens", "lengths"):
            aspect = f"relay_{channel}"
            want, got = expected.aspects.get(aspect), observed.aspects.get(aspect)
            if want is None or got is None or _same(want, got):
                continue
            if want.dtype != got.dtype or want.shape != got.shape:
                return _differ(clause, _shape_anomaly(want, got), aspect, expected, observed)
            details = _row_differences(aspect, want, got, context, lambda slot: f"slot {slot}")
            poisoned = all(d.expected == -1 for d in details)
            anomaly = "lost-update" if poisoned else "phantom-row"
            return _differ(clause, anomaly, aspect, expected, observed, details)
        return None

    return check


def _bounds(expected: Observation, observed: Observation, context: Context) -> Any:
    """R7 where host lengths lag: committed <= true <= planning, row by row."""
    want, got = expected.aspects.get("planning"), observed.aspects.get("planning")
    if want is None or (got is not None and got.tolist() >= want and _covers(got, want)):
        return None
    return _differ("R7", "wrong-value", "planning", expected, observed)


def _planning_sum(expected: Observation, observed: Observation, context: Context) -> Any:
    planning, total = observed.aspects.get("planning"), observed.aspects.get("planning_sum")
    if planning is None or total == int(planning.sum()):
        return None
    return _differ("R7", "wrong-value", "planning_sum", expected, observed)


def _covers(planning: Tensor, true: list[int]) -> bool:
    return all(p >= t for p, t in zip(planning.tolist(), true, strict=True))


def _built(aspect: str) -> Check:
    """P8 for what a forward builds; I1 where it builds an idle draft input."""
    live, idle = rows(aspect, "P8"), rows(aspect, "I1")

    def check(expected: Observation, observed: Observation, context: Context) -> Difference | None:
        return (live if context.effect.slots else idle)(expected, observed, context)

    return check


def _idle_layout(expected: Observation, observed: Observation, context: Context) -> Any:
    for name, (mine, theirs, count) in observed.aspects["layout"].items():
        if mine != theirs or count:
            anomaly = "phantom-row" if count else "wrong-type"
            return Difference(
                "I1", anomaly, observed.call, name, f"0 rows of {theirs}", f"{count} rows of {mine}"
            )
    return None


def _truth(aspect: str, clause: str, anomaly: str) -> Check:
    """A flag that must be as expected, where both sides give it."""

    def check(expected: Observation, observed: Observation, context: Context) -> Difference | None:
        want = expected.aspects.get(aspect)
        if want is None or observed.aspects.get(aspect) == want:
            return None
        return _differ(clause, anomaly, aspect, expected, observed)

    return check


def _declared(expected: Observation, observed: Observation, context: Context) -> Any:
    """F7: nothing is there that the census does not know."""
    if not observed.aspects.get("undeclared"):
        return None
    difference = _differ("F7", "undeclared", "undeclared", expected, observed)
    difference.declare = observed.aspects["declare"]
    return difference


CLEAR_ERRORS = ("AssertionError", "IndexError", "RuntimeError", "TypeError", "ValueError")
"""Exceptions that count as a clear refusal; an AttributeError on None does not."""


def _wild(clause: str) -> Check:
    """A wild use must give one of the answers that the expectation has, or a clear error."""

    def check(expected: Observation, observed: Observation, context: Context) -> Difference | None:
        answers, outcome = expected.aspects["answers"], observed.aspects["outcome"]
        if isinstance(outcome, Outcome):
            if outcome.kind in CLEAR_ERRORS:
                return None
            want = "the right rows or a clear error" if answers else "a clear error"
            anomaly, seen = "unexpected-error", str(outcome)
        elif not answers:
            want, anomaly, seen = "a clear error", "missing-error", "accepted"
        else:
            found = [_unlike(clause, answer, observed, context) for answer in answers]
            return None if None in found else found[0]
        return Difference(clause, anomaly, observed.call, "outcome", want, seen)

    return check


def _unlike(
    clause: str, answer: dict[str, Any], observed: Observation, context: Context
) -> Difference | None:
    """The first aspect in which an observation is not the answer."""
    for aspect, want in answer.items():
        got = observed.aspects.get(aspect)
        of_relay = aspect.startswith("relay_")
        if _same(want, got) or (of_relay and got is None):
            continue
        expected = Observation(observed.call, answer)
        if not isinstance(want, Tensor):
            return equal(aspect, clause)(expected, observed, context)
        if not isinstance(got, Tensor):
            return _differ(clause, "missing-row", aspect, expected, observed)
        if not of_relay or (want.dtype, want.shape) != (got.dtype, got.shape):
            return rows(aspect, clause)(expected, observed, context)
        details = _row_differences(aspect, want, got, context, lambda slot: f"slot {slot}")
        first = details[0]
        anomaly = "phantom-row"
        if first.row in context.effect.slots:
            anomaly = _value_anomaly(aspect, first.expected, first.observed, context)
        return _differ(clause, anomaly, aspect, expected, observed, details)
    return None


def _consume_twice(expected: Observation, observed: Observation, context: Context) -> Any:
    for channel, want in expected.aspects.items():
        got = observed.aspects.get(channel, want)  # a refusal may leave no device for the next one
        if got != want:
            anomaly = "missing-error" if got[0] else "unexpected-error"
            return _differ("R6", anomaly, channel, expected, observed)
    return None


def _landed(aspect: str) -> Check:
    """F6: rows of the batch whose result is processed, where the tree's copies carry them."""

    def check(expected: Observation, observed: Observation, context: Context) -> Difference | None:
        want, got = expected.aspects[aspect], observed.aspects[aspect]
        if got is None or _same(want, got):
            return None
        if want.dtype != got.dtype or want.shape != got.shape:
            return _differ("F6", _shape_anomaly(want, got), aspect, expected, observed)
        landed = context.effect.landed or []
        details = _row_differences(aspect, want, got, context, lambda row: f"r{landed[row][0]}")
        return _differ("F6", "wrong-owner", aspect, expected, observed, details)

    return check


def _batch_rows(clause: str) -> tuple[Check, ...]:
    """Checks of what a batch says of its rows, its draft input apart."""
    return (
        members("requests", clause),
        members("sampling", clause),
        rows("prompts", clause),
        rows("slots", clause),
        rows("slots_cpu", clause),
    )


def _drained(expected: Observation, observed: Observation, context: Context) -> Any:
    """R13: with a forward in flight, a seed waits for it before it publishes anything."""
    order = observed.aspects["order"]
    if not expected.aspects["drained"] or "publish" not in order:
        return None
    if "drain" in order[: order.index("publish")]:
        return None
    return Difference(
        "R13", "wrong-value", observed.call, "order", "['drain', 'publish']", str(order)
    )


def _tail_lengths(expected: Observation, observed: Observation, context: Context) -> Any:
    """R10: a decode tail's length counts the token that it commits; the others are the prompts'."""
    want, got = expected.aspects["seq_lens"], observed.aspects["seq_lens"]
    if torch.equal(want, got):
        return None
    details = _row_differences("seq_lens", want, got, context, context.owner)
    first = details[0]
    if first.expected // STRIDE != first.observed // STRIDE:
        anomaly = "wrong-owner"
    else:
        earlier = context.state.length_writer.get(first.observed - 1)
        anomaly = "stale-read" if earlier is not None else "wrong-value"
    return _differ("R10", anomaly, "seq_lens", expected, observed, details)


def _mixed_rows() -> tuple[Check, ...]:
    """Checks of a mixed batch: the prefill's rows, then the decode tails."""
    return (
        _error("R10"),
        *_batch_rows("R9"),
        equal("mode", "R10"),
        equal("extends", "R10"),
        _truth("held", "M6", "wrong-value"),
        _unchanged_relay("F6"),
    )


def _rows_of(clause: str, *, filter_: bool = True) -> tuple[Check, ...]:
    """Checks of everything a batch filter or merge decides, in order."""
    return (
        _error(clause),
        members("requests", "R9"),
        rows("future", clause, dtype_clause=None if filter_ else "M5"),
        rows("tokens", clause, dtype_clause=None if filter_ else "M5"),
        rows("lengths", clause, dtype_clause=None if filter_ else "M5"),
        widths(clause),
        members("sampling", "R9"),
        rows("prompts", "R9"),
        rows("slots", "R9"),
        rows("slots_cpu", "R9"),
        _truth("right_intact", "M6", "wrong-value"),
        _truth("right_shared", "M6", "shared-storage"),
        _truth("held", "F6" if filter_ else "M6", "wrong-value"),
        _unchanged_relay("F6" if filter_ else clause),
    )


def _draft_of(clause: str, mirrors: str, dtype_clause: str | None = None) -> tuple[Check, ...]:
    """Checks of a law's result, in order."""
    return (
        _error(clause),
        rows("future", clause, dtype_clause=dtype_clause),
        rows("tokens", clause, dtype_clause=dtype_clause),
        rows("lengths", clause, dtype_clause=dtype_clause),
        widths(clause),
        _mirrors(mirrors),
        equal("sums", mirrors),
        _truth("right_intact", "M6", "wrong-value"),
        _truth("right_shared", "M6", "shared-storage"),
        _truth("held", "F6", "wrong-value"),
        _unchanged_relay("F6"),
    )


def _mirrors(clause: str) -> Check:
    def check(expected: Observation, observed: Observation, context: Context) -> Difference | None:
        want, got = expected.aspects["mirrors"], observed.aspects.get("mirrors", {})
        for name, values in want.items():
            if name not in got:
                return Difference(clause, "missing-row", observed.call, name, _text(values), "None")
            # Host mirrors keep their values; a merge may legally widen them (M5).
            if values.tolist() != got[name].tolist():
                same = got[name].shape == values.shape
                anomaly = "wrong-owner" if same else _shape_anomaly(values, got[name])
                return Difference(
                    clause, anomaly, observed.call, name, _text(values), _text(got[name])
                )
        return None

    return check


_PREPARED: tuple[Check, ...] = (
    _declared,
    equal("committed", "R7"),
    equal("committed_sum", "R7"),
    _bounds,
    _planning_sum,
    kv_checks.top_k,
)
"""Checks of what a decode's preparation tells of lengths and sampling."""


CHECKS: dict[str, tuple[Check, ...]] = {
    "relay": (_declared,),
    "batch": (_declared,),
    "build": (
        _error("P8"),
        _built("tokens"),
        _built("lengths"),
        _declared,
    ),
    "publish": (
        _error("P1"),
        _written("lengths"),
        _written("tokens"),
        _truth("copied", "P5", "shared-storage"),
    ),
    "stash": (
        _error("P1"),
        _written("tokens"),
        _written("lengths"),
        _truth("copied", "P5", "shared-storage"),
        _declared,
    ),
    "idle-signals": (_truth("unchanged", "I3", "phantom-row"),),
    "restore": (_truth("changed", "R11", "wrong-value"),),
    "admit-resolve": (
        _error("I4"),
        equal("input_ids", "I4"),
        equal("seq_lens", "I4"),
        _unchanged_relay("I4"),
    ),
    "idle-resolve": (_error("I4"), equal("seq_lens", "I4"), _unchanged_relay("I4")),
    "idle": _rows_of("I5", filter_=False),
    "prepare": (_error("R7"), *_PREPARED),
    "kv-prepare": (
        _error("K9"),
        kv_checks.fits,
        kv_checks.ledger,
        *_PREPARED,
        kv_checks.bounds,
        kv_checks.aligned,
    ),
    "kv-check": (_error("K9"), kv_checks.fits),
    "extend": (
        _error("K9"),
        kv_checks.ledger,
        equal("slots", "K3", "wrong-owner"),
        kv_checks.located,
        equal("decodes", "K7", "stale-read"),
    ),
    "release": (_error("K5"),),
    "kv": (kv_checks.ledger,),
    "law-bookkeeping": (_error("K7"), kv_checks.as_eagle("bookkeeping", "lost-update")),
    "law-penalties": (_error("K7"), kv_checks.as_eagle("penalties", "missing-row")),
    "resolve": (
        _resolve_error,
        layout("tokens", "R3"),
        layout("lengths", "R3"),
        _resolved_values,
        equal("staged", "R1"),
        _truth("aliased", "R4", "shared-storage"),
        equal("host", "R7"),
        _host_sum("R7"),
        _unchanged_relay("R5"),
    ),
    "mix": _mixed_rows(),
    "mixed-stash": (
        _error("P6"),
        _written("tokens"),
        _written("lengths"),
        _truth("appeared", "P6", "phantom-row"),
    ),
    "mixed-resolve": (
        _error("R10"),
        layout("seq_lens", "R10"),
        rows("input_ids", "R1", dtype_clause="R3"),
        _tail_lengths,
        equal("host", "R10", "stale-read"),
        _host_sum("R10"),
        equal("prefix", "R10", "stale-read"),
        equal("kv_slots", "R10", "wrong-owner"),
        _unchanged_relay("R5"),
    ),
    "seed": (
        _error("P8"),
        rows("tokens", "P8"),
        rows("lengths", "P8"),
        rows("future", "R9"),
        *_batch_rows("R9"),
        equal("seq_lens", "P8"),
        _written("lengths"),
        _written("tokens"),
        _truth("copied", "P5", "shared-storage"),
        _truth("appeared", "P6", "phantom-row"),
        _drained,
        _declared,
    ),
    "copy": (_error("F6"),),
    "results": (
        members("requests", "F6"),
        _landed("slots"),
        _landed("slots_cpu"),
        members("decoding", "F6"),
    ),
    "preempt": _rows_of("F1"),
    "absorb-filter": _rows_of("F1"),
    "filter": _rows_of("F1"),
    "retract": _rows_of("F1"),
    "merge": (_truth("forms", "M7", "wrong-type"), *_rows_of("M1", filter_=False)),
    "law-filter": _draft_of("F1", "F2"),
    "law-host-path": _draft_of("F5", "F5"),
    "law-permute": _draft_of("F1", "F2"),
    "law-lookup": (
        _error("R1"),
        rows("tokens", "R1", dtype_clause="R3"),
        rows("lengths", "R2", dtype_clause="R3"),
        _unchanged_relay("F6"),
    ),
    "law-compose": _draft_of("F3", "F3"),
    "law-keep-all": _draft_of("F4", "F4"),
    "law-merge": _draft_of("M1", "M4", "M5"),
    "law-merge-idle": _draft_of("I2", "M4", "M5"),
    "law-associate": _draft_of("M2", "M2"),
    "law-distribute": _draft_of("M3", "M3"),
    "law-neutral": _draft_of("I2", "I2"),
    "resolve-nothing": (_error("I4"), equal("seq_lens", "I4"), _unchanged_relay("I4")),
    "idle-input": (_error("I1"), _idle_layout),
    "consume-twice": (_consume_twice,),
    **{
        call: (_wild(clause.number),)
        for clause in CLAUSES.values()
        for call in clause.wild_calls
        if call.startswith("wild-")
    },
}
"""The checks of every call, in declared order: the first that differs is reported."""


def _special_case(call: str, context: Context) -> str:
    """The call as which it is judged: a filter that keeps all rows in order is F4's."""
    operation, rows = context.operation, len(context.effect.slots)
    if not isinstance(operation, Law):
        return call
    if call == "law-filter" and operation.keep == tuple(range(rows)):
        return "law-keep-all"
    return call


def _agree(expected: dict[str, Any], observed: dict[str, Any]) -> bool:
    """Whether both sides give the same aspects with equal values, dtypes and layouts."""
    if len(expected) != len(observed):
        return False
    equal = torch.equal
    for name, want in expected.items():
        got = observed.get(name, expected)
        kind = type(want)
        if kind is not type(got) or kind is dict:
            return False
        if kind is Tensor:
            # Tensors of different devices are not equal but an error; that is for the checks.
            if want.dtype is not got.dtype or want.is_cpu is not got.is_cpu:
                return False
            if not equal(want, got) or not got.is_contiguous():
                return False
        elif want != got:
            return False
    return True


def judge(expected: Observation, observed: Observation, context: Context) -> Difference | None:
    """The first difference between one call's expected and real observation, or None."""
    if _agree(expected.aspects, observed.aspects):
        return None  # the bulk; equality is at least as strict as every check
    for check in CHECKS[_special_case(observed.call, context)]:
        difference = check(expected, observed, context)
        if difference is not None:
            return difference
    return None
