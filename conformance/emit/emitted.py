"""Write the test of a deviation, and make sure that it fails on the tree that deviates."""

from __future__ import annotations

import io
import textwrap
import unittest
from collections.abc import Iterator
from typing import Any

import torch

from conformance.anomalies import ANOMALIES
from conformance.difference import Difference
from conformance.emit.calls import Call, Script
from conformance.emit.claims import BEGINS, Claims, Scene
from conformance.emit.template import Case, render
from conformance.errors import UserError
from conformance.observation import Observation
from conformance.oracle import Oracle
from conformance.replay import facts_of
from conformance.sut.driver import table_width
from conformance.sut.surface import Surface, make_draft_input, make_pool, make_relay
from generators.operations import Admit, Idle, Law, Mixed, Operation, Step, Trace, Wild
from generators.protocol import State, apply
from reference.clauses import CLAUSES


def emit(surface: Surface, deviation: dict[str, Any]) -> str:
    """The text of a unit test that fails where the deviation is and passes where it is not.

    Args:
        surface: the tree that deviates.
        deviation: as :meth:`conformance.engine.Deviation.as_json` gives it; the last operation of
            its trace is the one that shows it.

    Raises:
        UserError: no test of SGLang's own can assert it, or it does not show outside the harness.
    """
    difference = Difference(**deviation["difference"])
    if deviation["mode"] == "wild":
        raise UserError(
            "no test was written: the deviation is a contract gap, which SGLang never promised"
        )
    if difference.clause == "F7":
        raise UserError(
            "no test was written: an attribute that this suite's census does not know is nothing "
            "that a test of SGLang can assert; declare it with --declare"
        )
    if difference.clause == "R13":
        raise UserError(
            "no test was written: which stream waits for which is decided in the scheduler around "
            "these calls, and a test of the calls alone cannot assert it"
        )
    trace = Trace.from_json(deviation["trace"])
    text = _text(surface, trace, difference)
    if difference.anomaly != "crash":
        problem = _try(surface, text)
        if problem:
            raise UserError(f"no test was written: on this tree it would not fail but {problem}")
    return text


def _text(surface: Surface, trace: Trace, difference: Difference) -> str:
    *before, last = trace.operations
    header = trace.header
    launches = [n for n, o in enumerate(before, 1) if isinstance(o, Admit | Step | Idle)]
    landing = launches[-1] if launches and difference.call == "results" else 0
    direct = "direct_carry" in surface.features
    script = Script(surface, header, buffers=direct or difference.aspect == "copied")
    state = State(header)
    relay = make_relay(surface, make_pool(surface, header.pool), needs_cpu_seq_lens=True)
    names = (("tokens", surface.token_channel), ("lengths", surface.length_channel))
    born = {what: vars(relay)[name] for what, name in names if name and name in vars(relay)}
    oracle = Oracle(facts_of(surface), header, born)
    # A law makes operands of its own: what came before only says which rows there are.
    alone = isinstance(last, Law) and last.law != "resolve-nothing"
    alone = alone and not difference.aspect.startswith("relay_")
    body = [_ROWS] if alone else script.start()
    for number, operation in enumerate(before, 1):
        effect = apply(state, operation)
        for _ in oracle.perform(operation, effect):
            pass
        body.append(f"# {number}. {operation.line()}")
        if not alone and not isinstance(operation, Law | Wild):  # these two work on copies
            body += _lines(script.calls(operation, effect), copy=number == landing)
    scene = Scene(
        _parts(surface, header.overlap, last),
        armed=header.overlap and bool(state.ranges),
        fresh=hasattr(relay, "_publish_fresh"),
        idle=_idle_layout(surface),
    )
    effect = apply(state, last)
    script.isolated = difference.call == "restore"
    lines = _deviating(
        script.calls(last, effect),
        oracle.perform(last, effect),
        difference,
        Claims(surface, difference, scene),
    )
    if difference.aspect == "error":
        lines = [
            "try:",
            *(f"    {line}" for line in lines),
            "except Exception as error:",
            '    self.fail(f"{RULE} It raised {error!r}.")',
        ]
    case = Case(
        _docstring(trace, difference),
        CLAUSES[difference.clause].statement,
        f"test_{difference.clause}_{difference.anomaly}".lower().replace("-", "_"),
        [*body, f"# {len(trace.operations)}. {last.line()}", *lines],
        script.operand,
        table_width(trace),
        _NO_GPU if difference.call == "consume-twice" else "",
    )
    return render(surface, header, case)


def _lines(calls: list[Call], *, copy: bool) -> list[str]:
    """The lines of an operation's calls; the loop's copy of the batch only where it matters."""
    wanted = [call for call in calls if copy or call.name != "copy"]
    return [line for call in wanted for line in call.lines]


_ROWS = "# All but the last of these operations only say which rows `operand` has."
_NO_GPU = '@unittest.skipIf(DEVICE.type == "cuda", "there a failed assertion ends the process")'


def _parts(surface: Surface, overlap: bool, operation: Operation) -> tuple[str, ...]:
    """Attributes of the operation's draft inputs that carry rows in their form."""
    law = operation if isinstance(operation, Law) else None
    relayed = law.form == "relayed" if law else overlap
    rows = [field.name for field in surface.draft_fields("row")]
    mirrored = law.mirrors if law else isinstance(operation, Mixed)  # a prepared decode has them
    mirrors = [field.name for field in surface.draft_fields("mirror")] if mirrored else []
    return (*(["future_indices"] if relayed else rows), *mirrors)


def _idle_layout(surface: Surface) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of an idle draft input's tensors: a live one's, without rows."""
    one = torch.ones(1, dtype=torch.int64, device=surface.device.device)
    return {
        name: (value.dtype, (0, *value.shape[1:]))
        for name, value in vars(make_draft_input(surface, one, one)).items()
        if isinstance(value, torch.Tensor)
    }


def _deviating(
    calls: list[Call],
    expectations: Iterator[Observation],
    difference: Difference,
    claims: Claims,
) -> list[str]:
    """The lines of the last operation up to the call that deviates, and what must be true then."""
    calls = [call for call in calls if call.name != "copy" or difference.call == "copy"]
    named = [number for number, call in enumerate(calls) if call.name == difference.call]
    asserted = difference.aspect != "error" and difference.anomaly != "crash"
    blocks: list[list[str]] = [[]]
    claimed = set()
    begins: dict[str, int] = {}
    for call in calls[: named[-1] + 1] if named else calls:
        if call.operands:
            blocks.append([])
        block = blocks[-1]
        block += call.operands
        begins[call.name] = len(block)
        block += call.lines
        seen = call.name not in ("", "copy")
        expected = next((o for o in expectations if o.call != "relay"), None) if seen else None
        if expected is not None and asserted and call.name == difference.call:
            before, after = claims.of(call, expected)
            at = begins[BEGINS.get(call.name, call.name)]
            block[at:at] = before
            block += after
            if before or after:
                claimed.add(len(blocks) - 1)
    # What starts from operands of its own and claims nothing is not needed.
    kept = [block for number, block in enumerate(blocks) if not claimed or number in claimed]
    return [line for block in kept for line in block]


def _docstring(trace: Trace, difference: Difference) -> str:
    title = f"DFLASH overlap hand-over: {ANOMALIES[difference.anomaly]}."
    if difference.anomaly == "crash":
        what = "The calls below end the process."
    elif difference.aspect == "error":
        kind = difference.observed.partition(":")[0]
        what = f"{CLAUSES[difference.clause].statement} The calls below raise {kind} instead."
    else:
        what = f"{CLAUSES[difference.clause].statement} The calls below break that."
    setting = f"Setting: {trace.header.line()}."
    return "\n\n".join(textwrap.fill(part, 84) for part in (title, what, setting))


def _try(surface: Surface, text: str) -> str:
    """Run the test here, on the tree that deviates; "" if it fails as it should, else what it does.

    The worker has loaded the tree already. What the file imports beside it, for upstream's CI,
    is inert here.
    """
    names: dict[str, Any] = {"__name__": "emitted"}
    with surface.loader.unsealed():
        exec(compile(text, "emitted test", "exec"), names)
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(names["TestDFlashHandOver"])
    result = unittest.TextTestRunner(io.StringIO()).run(suite)
    if result.errors:
        return f"end with {result.errors[0][1].strip().splitlines()[-1]}"
    # What a GPU must not run is skipped where there is one; then nothing can be said here.
    return "" if result.failures or result.skipped else "pass"
