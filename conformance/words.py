"""Names for people: what a recorded thing, a call and a capability are called in reports."""

from __future__ import annotations

import re
from collections.abc import Sequence

FEATURES = {
    "idle": "idle batches occur with DFlash",
    "mixed": "a prefill may take the running batch along (mixed chunked prefill)",
    "seed": "requests may arrive prefilled, from a prefill server",
    "skips_finishing": "a request whose last token, by length, is in flight leaves the batch",
    "filters_first": "the running batch is filtered before a prefill batch is formed",
    "debug": "debug assertions",
    "freshness": "debug: a publish is consumed once",
    "host_index_filter": "filter_batch takes host indices beside device indices",
    "host_lengths_lag": "host lengths lag by design; planning bounds travel with the draft input",
    "direct_carry": "a batch whose shape did not change skips the relay",
    "isolation": "the scheduler restores batch fields after a forward",
    "poison_lengths": "debug: resolving lengths consumes them",
    "poison_tokens": "debug: resolving tokens consumes them",
    "kv_pool": "its KV pools and allocators load on their own",
    "loop": "its whole event loop runs on its own",
    "channels": "the relay's token and length buffers were recognised",
}
"""Optional capabilities of a tree, as clauses and reports name them."""

CAPABILITIES = {
    "idle": "idle batches occur with DFlash",
    "defers_prefill": "the scheduler may decode between two chunks of a prompt",
    "token_bits": "bits of a token id on the whole path",
}
"""What a tree can do, as far as the protocol's rules depend on it."""

THINGS = {
    "tokens": "bonus tokens",
    "lengths": "KV lengths",
    "future": "future_indices",
    "requests": "the order of requests",
    "slots": "req_pool_indices",
    "slots_cpu": "req_pool_indices_cpu",
    "prompts": "orig_seq_lens",
    "sampling": "sampling rows",
    "relay_tokens": "token rows of the relay",
    "relay_lengths": "length rows of the relay",
    "host": "host lengths (seq_lens_cpu)",
    "host_sum": "sum of host lengths (seq_lens_sum)",
    "input_ids": "input_ids",
    "seq_lens": "seq_lens",
    "staged": "staged inputs",
    "prefix": "prefix_lens of a mixed batch",
    "kv_slots": "KV slots of a mixed batch (out_cache_loc)",
    "batch": "batch fields that it sets",
    "changed": "batch fields not restored after a forward",
    "views": "rows that share storage with those before",
    "home.relay_tokens": "whether the token rows stay in their buffer",
    "home.relay_lengths": "whether the length rows stay in their buffer",
    "carried": "values that stay in the worker's output buffers",
    "aliased": "values that share storage with the relay",
    "copied": "whether the relay copies what it is given",
    "right_intact": "whether the right operand is left as it was",
    "right_shared": "tensors shared with the right operand",
    "held": "whether tensors that others hold are left as they were",
    "twice.tokens": "whether consuming tokens twice is refused",
    "twice.lengths": "whether consuming lengths twice is refused",
    "unchanged": "whether an idle step leaves events, flags and buffers alone",
    "appeared": "buffers that the relay creates",
    "order": "what a seed waits for and publishes, in order",
    "forms": "which operands are relayed",
    "allocated": "allocated lengths (kv_allocated_len)",
    "free": "free pages of the KV pool",
    "fits": "whether the memory check lets a decode through",
    "dflash": "bookkeeping of a decode",
    "eagle": "bookkeeping of a decode with EAGLE",
    "outcome": "outcome",
    "error": "exception",
}
"""What recorded things are called, in the order of reports."""

_CALLS = (
    "relay",
    "build",
    "publish",
    "stash",
    "restore",
    "prepare",
    "extend",
    "kv-check",
    "kv-prepare",
    "kv",
    "resolve",
    "admit-resolve",
    "idle-resolve",
    "mix",
    "mixed-stash",
    "mixed-resolve",
    "seed",
    "filter",
    "absorb-filter",
    "retract",
    "preempt",
    "merge",
    "idle",
    "copy",
    "results",
)
"""Calls of the hand-over itself, in the order of a step; laws and wild uses come after them."""

_LONGEST = 80
"""Characters of a value in one line."""

NONE = "None"
"""The form of a thing that is not there."""


def thing(name: str) -> str:
    """A recorded thing in words."""
    owner, dot, field = name.partition(".")
    if not dot or name in THINGS:
        return THINGS.get(name, name)
    field = {"tokens": "bonus tokens", "lengths": "KV lengths"}.get(field, field)
    return {
        "draft": f"draft input's {field}",
        "relay": f"relay's {field}",
        "batch": f"batch's {field}",
        "requests": f"requests' {field}",
        "payload": f"payload's {field}",
        "stored": f"stored {field}",
        "idle": f"{field} of an idle draft input",
    }.get(owner, name)


def call_order(call: str) -> tuple[int, str]:
    """Sorts calls in the order of a step."""
    return (_CALLS.index(call) if call in _CALLS else len(_CALLS), call)


def order(name: str, place: str) -> tuple[int, int, str]:
    """Sorts changes: what the model speaks of first, then fields."""
    names = list(THINGS)
    rank = names.index(name) if name in THINGS else len(names)
    return (rank, call_order(place.partition(": ")[0])[0], name)


def change(
    name: str,
    facet: str,
    calls: Sequence[str],
    before: Sequence[str],
    after: Sequence[str],
    shown: tuple[str, str] = ("", ""),
) -> str:
    """One line for a change of form (``form``), presence or values (``value``).

    Args:
        calls: where it shows.
        before, after: the forms on either side.
        shown: what the smallest trace shows on either side; of values the forms say nothing.
    """
    what = thing(name)
    where = min(calls, key=call_order)
    if name in ("error", "outcome"):
        return f"{where}: {_outcome(before)} -> {_outcome(after)}"
    if facet == "value":
        return f"{what}: at {where} {_members(*shown)}"
    if not before:
        return f"{what}: now there at {where} ({_forms(after)})"
    if not after:
        return f"{what}: no longer there at {where} ({_forms(before)})"
    verb = _widening(before, after)
    if verb:
        return f"{what} {verb} from {_forms(before)} to {_forms(after)}"
    return f"{what}: {_forms(before)} -> {_forms(after)}"


def _members(before: str, after: str) -> str:
    """Two values; of two lists of names only what the one or the other has alone."""
    if not (before.startswith("[") and after.startswith("[")):
        return f"{_short(before)} -> {_short(after)}"
    old, new = ([x for x in text.strip("[]").split(", ") if x] for text in (before, after))
    if not all(name.isidentifier() for name in old + new):
        return f"{_short(before)} -> {_short(after)}"
    gone, added = ([x for x in a if x not in b] for a, b in ((old, new), (new, old)))
    parts = [f"now also {', '.join(added)}"] if added else []
    parts += [f"no longer {', '.join(gone)}"] if gone else []
    return " and ".join(parts) or f"{_short(before)} -> {_short(after)}"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _outcome(forms: Sequence[str]) -> str:
    return _forms(forms) if forms and tuple(forms) != (NONE,) else "no exception"


def _forms(forms: Sequence[str]) -> str:
    return " or ".join(sorted(forms, key=lambda form: (form == NONE, form)))


_INTEGER = re.compile(r"u?int(\d+)\[")


def _widening(before: Sequence[str], after: Sequence[str]) -> str:
    """``widen`` or ``narrow`` where only the width of integers changes."""
    widths = [{int(m[1]) for f in forms if (m := _INTEGER.match(f))} for forms in (before, after)]
    same = [sorted(_INTEGER.sub("int[", f) for f in forms) for forms in (before, after)]
    if same[0] != same[1] or not all(len(width) == 1 for width in widths):
        return ""
    (one,), (two,) = widths
    return "widen" if two > one else "narrow" if two < one else ""


def answer(value: object) -> str:
    """A capability's value in words."""
    return {True: "yes", False: "no"}.get(value, str(value)) if type(value) is bool else str(value)


def call_fits(before: str, after: str) -> bool:
    """Whether every call that suited the parameters `before` suits those `after`, and means it."""
    old, new = (text.strip("()").split(", ") if text != "()" else [] for text in (before, after))
    loosened = all(
        mine == theirs or ("=" not in mine and mine == theirs.partition("=")[0])
        for mine, theirs in zip(old, new, strict=False)
    )
    added = [name for name in new[len(old) :] if name != "*"]
    return len(new) >= len(old) and loosened and all("=" in name for name in added)
