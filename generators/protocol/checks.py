"""The rules of laws and wild uses, which take copies and leave the loop as it is."""

from __future__ import annotations

from generators.operations import DRAFT_LAWS, KV_LAWS, LAWS, WILD_USES, Law, Operation, Wild
from generators.protocol import kv
from generators.protocol.state import Capabilities, Choices, Effect, State, lengths_of


def refuse_law(state: State, operation: Operation, capabilities: Capabilities) -> str | None:
    assert isinstance(operation, Law)
    rows = len(state.running)
    if operation.law not in LAWS:
        return f"there is no law {operation.law!r}"
    if operation.form not in ("relayed", "stored"):
        return f"there is no form {operation.form!r}"
    if not rows or state.prefill is not None or state.unfiltered:
        return "there is no running batch to take copies of"
    if (operation.law in KV_LAWS) != bool(state.header.kv_tokens):
        where = "without" if operation.law in KV_LAWS else "with"
        return f"it is no law of a loop {where} a KV pool"
    if operation.law in KV_LAWS:
        return kv.refuse_decode(state, state.running, kv.must_end(state), capabilities)
    if operation.law == "consume-twice":
        if not (state.header.debug and state.header.overlap):
            return "nothing is consumed without debug assertions and overlap"
        if not capabilities.survives_assertion and not operation.channel:
            return "a failed assertion ends the process, so it takes one channel at a time"
    if operation.channel not in ("", "tokens", "lengths"):
        return f"there is no channel {operation.channel!r}"
    if any(not 0 <= i < rows for i in operation.keep):
        return "it keeps rows that do not run"
    if any(not 0 <= i < len(operation.keep) for i in operation.then):
        return "its second filter keeps rows that the first one dropped"
    if not 0 <= operation.cut <= rows:
        return "it cuts outside the batch"
    if operation.law == "lookup" and not state.header.overlap:
        return "without overlap nothing is looked up in the relay"
    if operation.law in ("filter", "compose", "distribute", "lookup") and not operation.keep:
        return "at least one row stays"
    if operation.law == "permute" and sorted(operation.keep) != list(range(rows)):
        return "a permutation names every row once"
    if operation.law in ("filter", "compose") and len(operation.keep) >= rows:
        return "a batch that keeps every row is not filtered"
    if operation.law == "compose" and not 0 < len(operation.then) < len(operation.keep):
        return "at least one row stays and at least one leaves"
    if operation.law == "distribute" and not (
        any(i < operation.cut for i in operation.keep)
        and any(i >= operation.cut for i in operation.keep)
        and len(set(operation.keep)) == len(operation.keep)
    ):
        return "each side keeps at least one row"
    return None


def draw_law(state: State, choose: Choices, capabilities: Capabilities) -> Operation | None:
    rows = len(state.running)
    if not rows or state.prefill is not None or state.unfiltered:
        return None
    if state.header.kv_tokens:
        drawn = Law(KV_LAWS[choose.below(len(KV_LAWS))])
        return None if refuse_law(state, drawn, capabilities) else drawn
    law = DRAFT_LAWS[choose.below(len(DRAFT_LAWS))]
    if law == "consume-twice" and not (
        state.header.debug and state.header.overlap and capabilities.survives_assertion
    ):
        return None
    form = ("relayed", "stored")[choose.below(2)]
    mirrors = bool(choose.below(2))
    cut = choose.below(rows + 1)
    keep: list[int] = []
    then: list[int] = []
    if law in ("filter", "compose"):
        if rows < 2 + (law == "compose"):
            return None
        keep = _subset(rows, choose)[: rows - 1]
        if law == "compose":
            keep = keep if len(keep) > 1 else [*keep, (keep[0] + 1) % rows]
            then = _subset(len(keep), choose)[: len(keep) - 1]
        cut = 0
    elif law == "distribute":
        if rows < 2:
            return None
        cut = 1 + choose.below(rows - 1)
        keep = _subset(cut, choose)
        keep += [cut + i for i in _subset(rows - cut, choose)]
    elif law == "permute":
        keep, cut = _shuffled(rows, choose), 0
    elif law == "lookup":
        if not state.header.overlap:
            return None
        form, mirrors = "relayed", False  # what is looked up is relayed, and has no mirrors
        keep = _subset(rows, choose)
    elif law in ("neutral", "keep-all", "idle", "consume-twice", "resolve-nothing"):
        cut = 0
    return Law(law, form, mirrors, tuple(keep), tuple(then), cut)


def _subset(n: int, choose: Choices) -> list[int]:
    """At least one of n indices, in any order."""
    mask = choose.below((1 << min(n, 30)) - 1) + 1
    rows = [i for i in range(n) if mask >> (i % 30) & 1]
    return rows if choose.below(2) else [rows[i] for i in _shuffled(len(rows), choose)]


def _shuffled(n: int, choose: Choices) -> list[int]:
    """All of n indices, in any order."""
    rows = list(range(n))
    return [rows.pop(choose.below(len(rows))) for _ in range(n)]


def refuse_wild(state: State, operation: Operation, capabilities: Capabilities) -> str | None:
    assert isinstance(operation, Wild)
    use = WILD_USES.get(operation.use)
    if use is None:
        return f"there is no wild use {operation.use!r}"
    if state.header.kv_tokens:
        return "wild uses are tried without a KV pool"
    if not state.running or state.prefill is not None or state.unfiltered:
        return "there is no running batch to take copies of"
    if len(state.running) < use.rows:
        return f"it takes {use.rows} rows"
    asserts = use.asserts == "always" or (use.asserts == "debug" and state.header.debug)
    if asserts and not capabilities.survives_assertion:
        return "a failed assertion ends the process"
    return None


def draw_wild(state: State, choose: Choices, capabilities: Capabilities) -> Operation | None:
    operation = Wild(list(WILD_USES)[choose.below(len(WILD_USES))])
    return None if refuse_wild(state, operation, capabilities) else operation


def apply_nothing(state: State, operation: Operation) -> Effect:
    running = state.running
    effect = Effect(tokens=[r.token for r in running], committed=[r.committed for r in running])
    lengths_of(effect, running)
    return effect
