"""What a KV cache must look like after a call: clauses K1 to K9.

Which slots are handed out is the tree's choice, so most of these ask the reference ledger whether
what is seen may follow from what was seen before (:class:`reference.kv_ledger.Ledger`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from conformance.difference import Difference, RowDifference
from conformance.observation import Observation

if TYPE_CHECKING:
    from conformance.verdict import Context

Check = Callable[[Observation, Observation, "Context"], Difference | None]


def _asks(aspect: str) -> Check:
    """The expectation's `aspect` is asked whether the cache may look as it does."""

    def check(expected: Observation, observed: Observation, context: Context) -> Difference | None:
        ask = expected.aspects.get(aspect)
        violation = ask(observed.aspects["kv"]) if ask is not None else None
        if violation is None:
            return None
        rows = [RowDifference(row, _holder(row, context), *pair) for row, *pair in violation.rows]
        return Difference(
            violation.clause,
            violation.anomaly,
            observed.call,
            violation.aspect,
            violation.expected,
            violation.observed,
            rows,
        )

    return check


ledger = _asks("kv")
"""K1 to K5: the cache may follow from what it was before the call."""

aligned = _asks("pages")
"""K4: what is reserved ahead is whole pages."""


def _holder(row: int, context: Context) -> str:
    held = [r.number for r in context.state.live.values() if r.slot == row]
    return f"r{held[0]}@{row}" if held else f"row {row}"


def fits(expected: Observation, observed: Observation, context: Context) -> Difference | None:
    """K9: the memory check says that a decode fits exactly where it does."""
    want = expected.aspects["fits"]
    if observed.aspects["fits"] == want:
        return None
    texts = {True: "a decode of the running batch fits", False: "it does not fit"}
    return Difference("K9", "wrong-value", observed.call, "fits", texts[want], texts[not want])


def bounds(expected: Observation, observed: Observation, context: Context) -> Difference | None:
    """K6: no host bound is below the true length. K1: the highest is what is allocated."""
    true = expected.aspects.get("true")
    if true is None:
        return None
    found = {n: b.tolist() for n, b in observed.aspects["bounds"].items() if b is not None}
    for name, bound in found.items():
        low = [i for i, (b, t) in enumerate(zip(bound, true, strict=True)) if b < t]
        if low:
            rows = [RowDifference(i, context.owner(i), f">= {true[i]}", bound[i]) for i in low]
            return Difference(
                *("K6", "wrong-value", observed.call, name, f">= {true}", str(bound), rows)
            )
    allocated = [observed.aspects["kv"].allocated[slot] for slot in expected.aspects["rows"]]
    highest = [max(values) for values in zip(*found.values(), strict=True)]
    if highest and highest != allocated:
        return Difference(
            *("K1", "wrong-value", observed.call, "reserved", str(allocated), str(highest))
        )
    for name, total in observed.aspects["bound_sums"].items():
        mirror = name.removesuffix("_sum") + "_cpu"
        if mirror in found and total is not None and total != sum(found[mirror]):
            want = str(sum(found[mirror]))
            return Difference("K6", "wrong-value", observed.call, name, want, str(total))
    return None


def located(expected: Observation, observed: Observation, context: Context) -> Difference | None:
    """K3: what a prefill writes to are the slots that its rows were given, in their order."""
    table, found = observed.aspects["kv"].table, observed.aspects["kv_slots"].tolist()
    wanted: list[int] = []
    for row, start, stop in expected.aspects.get("ranges", ()):
        wanted += table[row, start:stop].tolist()
    if not wanted or wanted == found:
        return None
    return Difference(
        *("K3", "wrong-owner", observed.call, "kv_slots", f"{wanted[:12]}", f"{found[:12]}")
    )


def top_k(expected: Observation, observed: Observation, context: Context) -> Difference | None:
    """K8: the largest top_k covers every row, and a uniform one is that of all rows."""
    asked = expected.aspects.get("asked")
    if asked is None:
        return None
    largest, uniform = observed.aspects["top_k"]
    if largest < max(asked):
        return Difference(
            *("K8", "wrong-value", observed.call, "max_top_k", f">= {max(asked)}", str(largest))
        )
    if uniform is not None and set(asked) != {uniform}:
        want = f"None: rows ask for {asked}"
        return Difference(
            *("K8", "wrong-value", observed.call, "uniform_top_k_value", want, str(uniform))
        )
    return None


def as_eagle(aspect: str, anomaly: str) -> Check:
    """K7: a batch is given what EAGLE's preparation gives it."""

    def check(expected: Observation, observed: Observation, context: Context) -> Difference | None:
        ours, theirs = observed.aspects["dflash"], observed.aspects["eagle"]
        if _text(ours) == _text(theirs):
            return None
        return Difference(
            *("K7", anomaly, observed.call, aspect, f"as EAGLE: {_text(theirs)}", _text(ours))
        )

    return check


def _text(value: Any) -> str:
    if value is None:
        return "nothing"
    return str(value.tolist() if isinstance(value, torch.Tensor) else value)
