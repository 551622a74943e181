"""A worker: one process that serves one tree over JSON lines.

The first line a worker receives is its configuration (:class:`Config`); it answers ``ready`` with
the tree's surface, or ``error``. Then one request per line (``check`` or ``replay``), answered by
``progress`` lines and one ``result``. End of input ends the worker. Where the device allows it
(``forks``) every request is served by a child, so that it finds the tree as it was loaded; a worker
whose child dies dies the same way.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from conformance.difference import Cover
    from conformance.engine import Deviation
    from conformance.kernels.session import Kernels, Outcome
    from generators.kernel_inputs import Case

_PROGRESS_EVERY = 500

DEVICE_LOST = 70
"""Exit status of a worker whose device cannot be used any more."""


@dataclass
class Config:
    """What a worker loads.

    Attributes:
        root: folder that holds ``sglang/``.
        device: name for :func:`conformance.sut.device.open_device`.
        debug: whether the tree's debug assertions bind.
        compiled: whether ``torch.compile`` stays what it is.
        relocated: module to path below `root`.
        declared: census records as [owner, name, kind] and, for a mirror, its sum.
        fault: name of a seeded fault to apply, or None.
        recorder: flight recorder file, or None.
        forks: whether each request is served by a child of the worker.
    """

    root: str
    device: str = "cpu"
    debug: bool = False
    compiled: bool = False
    relocated: dict[str, str] = field(default_factory=dict)
    declared: list[list[str]] = field(default_factory=list)
    fault: str | None = None
    recorder: str | None = None
    forks: bool = False


def serve(connection: socket.socket) -> None:
    """Serve requests until the other side closes the connection."""
    with connection, connection.makefile("rw", encoding="utf-8", newline="\n") as stream:
        lines = iter(stream.readline, "")
        first = next(lines, None)
        if first is None:
            return
        config = Config(**json.loads(first))
        if config.forks:
            os.setpgid(0, 0)  # who ends the worker ends its child
        try:
            worker = _Worker(config, stream)
        except Exception as error:
            _send(stream, event="error", **_describe(error))
            return
        _send(stream, event="ready", pid=os.getpid(), surface=worker.surface.as_json())
        worker.loop(lines)


def _send(stream: TextIO, **message: Any) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


def _describe(error: BaseException) -> dict[str, Any]:
    """An error for the parent: whose it is, in one line, and the trace for the suite's own."""
    from conformance.errors import UserError
    from conformance.sut.host_request import HarnessGap
    from conformance.sut.isolation import StandInUsed

    if isinstance(error, UserError):
        status = error.exit_status
    elif isinstance(error, StandInUsed | HarnessGap):
        status = 125
    else:
        status = 3
    text = " ".join(str(error).split()) or type(error).__name__
    return {"status": status, "message": text, "traceback": traceback.format_exc()}


def _cover(waiver: dict[str, Any], *, shown: bool = True) -> Cover:
    from conformance.difference import Cover

    names = ("name", "clause", "anomaly", "where")
    return Cover(**{name: waiver[name] for name in names}, shown=shown)


def _active(
    deviation: Any,
    header: Any,
    waivers: Sequence[dict[str, Any]],
    witness: Callable[[dict[str, Any]], tuple[str, Any]],
) -> str | None:
    """Name of the waiver that covers a deviation and whose witness shows it on this tree."""
    for waiver in waivers:
        if _cover(waiver).covers(deviation.difference, header) and witness(waiver)[0] == "active":
            return str(waiver["name"])
    return None


def _case(data: dict[str, Any]) -> Case:
    """Read a kernel case; one that is malformed is the caller's to solve."""
    from conformance.errors import UserError
    from generators.kernel_inputs import Case, CaseError

    try:
        return Case.from_json(data)
    except CaseError as error:
        raise UserError(str(error)) from None


class _Worker:
    def __init__(self, config: Config, stream: TextIO) -> None:
        # Torch is imported here: the parent that starts workers never does.
        from conformance import faults
        from conformance.kv_faults import KV_FAULTS
        from conformance.loop_faults import LOOP_FAULTS
        from conformance.sut.device import open_device
        from conformance.sut.fields import Field
        from conformance.sut.recorder import Recorder
        from conformance.sut.surface import open_tree

        self.config, self.stream = config, stream
        device = open_device(config.device)
        device.prepare(compiled=config.compiled)
        every = (
            *faults.FAULTS,
            *faults.KERNEL_FAULTS,
            *faults.WILD_FAULTS,
            *KV_FAULTS,
            *LOOP_FAULTS,
        )
        registry = {fault.name: fault for fault in every}
        edits = faults.apply(registry[config.fault].edits) if config.fault else {}
        self.surface = open_tree(
            Path(config.root),
            device,
            debug=config.debug,
            edits=edits,
            relocated=config.relocated,
            declared=[Field(*record) for record in config.declared],
        )
        self.recorder = Recorder(Path(config.recorder)) if config.recorder else None

    def loop(self, lines: Iterator[str]) -> None:
        for line in lines:
            request = json.loads(line)
            if self.config.forks:
                self._in_child(request)
            else:
                self._serve(request)

    def _in_child(self, request: dict[str, Any]) -> None:
        """Serve a request in a child."""
        if self.recorder is not None:
            self.recorder.clear()
        pid = os.fork()
        if pid == 0:
            try:
                self._serve(request)
            except (BrokenPipeError, ConnectionResetError):
                pass  # the parent is gone
            finally:
                os._exit(0)
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            os.kill(os.getpid(), os.WTERMSIG(status))
        elif status:
            os._exit(os.WEXITSTATUS(status))

    def _serve(self, request: dict[str, Any]) -> None:
        """Answer one request."""
        serves: dict[str, Callable[..., dict[str, Any]]]
        serves = {
            "describe": self._describe,
            "check": self._check,
            "record": self._record,
            "replay": self._replay,
            "loop": self._loop,
            "kernels": self._kernels,
            "misuse": self._misuse,
            "replay-case": self._replay_case,
        }
        try:
            answer = serves[request.pop("do")](**request)
        except Exception as error:
            if self.surface.device.lost():
                # Nobody can use it from here; a dead worker is a result, and its flight recorder
                # says where it was.
                os._exit(DEVICE_LOST)
            _send(self.stream, event="error", **_describe(error))
        else:
            _send(self.stream, event="result", **answer)

    def _describe(self) -> dict[str, Any]:
        return {"surface": self.surface.as_json()}

    def _check(
        self,
        operations: int = 0,
        seed: int = 0,
        wild: bool = False,
        waivers: list[dict[str, Any]] | None = None,
        stop_at_first: bool = False,
        traced: int = 0,
        capabilities: dict[str, Any] | None = None,
        recording: bool = False,
        given: Sequence[dict[str, Any]] | None = None,
        exhaust: dict[str, Any] | None = None,
        kv_pool: bool = False,
    ) -> dict[str, Any]:
        """Check the tree: by random traces, by `given` ones, or by all of what `exhaust` says."""
        from conformance.engine import capabilities_for, check
        from conformance.record import as_table
        from generators import exhaustive
        from generators.operations import Trace
        from generators.protocol import Capabilities

        if kv_pool and not self._has_kv_pool():
            given, waivers = [], None
        states, witnessed = {}, {}
        covers: list[Cover] = []
        for waiver in waivers or ():
            states[waiver["name"]], deviation = self._witness(waiver)
            if deviation is not None:
                witnessed[waiver["name"]] = deviation
                deviation.waiver = waiver["name"]
            if states[waiver["name"]] != "stale":
                covers.append(_cover(waiver, shown=deviation is not None))
        reported = 0

        def progress(done: int, deviations: int) -> None:
            nonlocal reported
            if done - reported >= _PROGRESS_EVERY:
                reported = done
                _send(self.stream, event="progress", operations=done, deviations=deviations)

        if capabilities is not None:
            known = Capabilities(**capabilities)
        else:
            known = capabilities_for(self.surface, wild=wild)
        exhausted: dict[str, Any] = {}
        chosen: Iterator[Trace] | None = None
        if given is not None:
            chosen = (Trace.from_json(trace) for trace in given)
        elif exhaust is not None:
            part = exhaustive.Part(**exhaust)
            chosen, exhausted = exhaustive.traces(
                part, known, debug=self.surface.debug, compiled=self.config.compiled
            )
        result = check(
            self.surface,
            operations=operations,
            seed=seed,
            wild=wild,
            compiled=self.config.compiled,
            waived=covers,
            progress=progress,
            recorder=self.recorder,
            stop_at_first=stop_at_first,
            capabilities=known,
            recording=recording,
            given=chosen,
            shrinking=given is None,
            kv_pool=kv_pool,
        )
        deviations = [d for d in result.deviations if d.waiver not in witnessed]
        for found in result.deviations:
            if found.waiver in witnessed:
                witnessed[found.waiver].count += found.count
        # What a waiver covers is always listed, with the witness, whatever the search met.
        deviations += witnessed.values()
        return {
            "deviations": [deviation.as_json() for deviation in deviations],
            "operations": result.operations,
            "calls": result.calls,
            "traces": result.traces,
            "reached": dict(result.reached),
            "waivers": states,
            "recorded": as_table(result.recorded) if recording else None,
            "unexecuted": self._unexecuted(traced, seed) if traced else None,
            "exhausted": exhausted
            and {
                **exhausted,
                "traces": result.traces,
                "played": result.operations,
                "complete": result.complete,
            },
            "surface": self.surface.as_json(),
        }

    def _has_kv_pool(self) -> bool:
        """Whether the tree's KV pools can be driven; where they cannot a note says why."""
        from conformance.sut import probes

        reason = probes.kv_pool(self.surface)
        if reason is None:
            self.surface.features |= {"kv_pool"}
        else:
            self.surface.notes.append(reason)
        return reason is None

    def _loop(
        self,
        steps: int,
        seed: int,
        waivers: Sequence[dict[str, Any]] = (),
        stop_at_first: bool = False,
        shrinking: bool = True,
    ) -> dict[str, Any]:
        """Serve random schedules until the tree's loop has made `steps` decode steps."""
        from conformance import serving
        from conformance.sut import probes

        outcome, states = serving.Outcome(), dict[str, str]()
        reason = probes.loop(self.surface, self._note_schedule())
        if reason is not None:
            self.surface.notes.append(reason)
        else:
            self.surface.features |= {"loop"}
            covers = []
            witnesses = []
            for waiver in waivers:
                state, shown = self._loop_witness(waiver)
                states[waiver["name"]] = state
                if state != "stale":
                    covers.append(_cover(waiver, shown=shown is not None))
                if shown is not None:
                    witnesses.append(shown)

            def progress(done: int, deviations: int) -> None:
                _send(self.stream, event="progress", operations=done, deviations=deviations)

            outcome = serving.check(
                self.surface,
                steps=steps,
                seed=seed,
                waived=covers,
                note=self._note_schedule(),
                stop_at_first=stop_at_first,
                shrinking=shrinking,
                progress=progress,
            )
            if outcome.gap is not None:
                gap = f"some schedules are not served: {outcome.gap}"
                self.surface.notes.append(gap)
            # What a waiver covers is always listed, with the witness, whatever the search met.
            for shown in witnesses:
                met = [d for d in outcome.deviations if d.waiver == shown.waiver]
                shown.count = sum(d.count for d in met)
                kept = [d for d in outcome.deviations if d.waiver != shown.waiver]
                outcome.deviations = [*kept, shown]
        return {
            "deviations": [deviation.as_json() for deviation in outcome.deviations],
            "operations": 0,
            "calls": 0,
            "traces": 0,
            "steps": outcome.steps,
            "reached": dict(outcome.reached),
            "waivers": states,
            "recorded": None,
            "unexecuted": None,
            "surface": self.surface.as_json(),
        }

    def _note_schedule(self) -> Callable[[Any], None] | None:
        return None if self.recorder is None else self.recorder.schedule

    def _loop_witness(self, waiver: dict[str, Any]) -> tuple[str, Any]:
        """As :meth:`_witness`, of a waiver whose witness is a schedule."""
        from conformance import serving
        from conformance.sut.host_request import HarnessGap
        from conformance.sut.isolation import StandInUsed
        from generators.schedules import Schedule

        schedule = Schedule.from_json(waiver["trace"])
        if schedule.header.debug != self.surface.debug:
            return "elsewhere", None
        try:
            found = serving.first(self.surface, schedule, note=self._note_schedule())
        except (StandInUsed, HarnessGap):
            return "stale", None
        if found is None or (found.clause, found.anomaly) != (waiver["clause"], waiver["anomaly"]):
            return "stale", None
        return "active", serving.Deviation(found, schedule, 0, waiver["name"])

    def _replay_schedule(
        self, schedule: dict[str, Any], waivers: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        """Serve one schedule; the deviation that it shows, or None."""
        from conformance import serving
        from conformance.errors import NotOnThisTree, UserError
        from conformance.sut import probes
        from generators.operations import TraceError
        from generators.schedules import Schedule

        try:
            parsed = Schedule.from_json(schedule)
        except TraceError as error:
            raise UserError(f"the schedule is not legal: {error}") from None
        for name in ("mixed", "idle"):
            if getattr(parsed.header, name) and not getattr(self.surface.capabilities, name):
                raise NotOnThisTree(f"the schedule asks for {name} batches, which the tree lacks")
        reason = probes.loop(self.surface, self._note_schedule())
        if reason is not None:
            raise NotOnThisTree(reason)
        found = serving.first(self.surface, parsed, note=self._note_schedule())
        deviation = None if found is None else serving.Deviation(found, parsed)
        if deviation is not None:
            served = [waiver for waiver in waivers if "requests" in waiver["trace"]]
            deviation.waiver = _active(deviation, parsed.header, served, self._loop_witness)
        return {
            "deviation": deviation.as_json() if deviation else None,
            "surface": self.surface.as_json(),
        }

    def _kernels(
        self, names: Sequence[str], waivers: Sequence[dict[str, Any]] = ()
    ) -> dict[str, Any]:
        """Check the kernels called `names`."""
        kernels = self._open_kernels()
        outcomes = {name: kernels.check(name, waivers) for name in names}
        return self._kernels_answer(kernels, outcomes)

    def _misuse(self, name: str) -> dict[str, Any]:
        """Try one misuse of a kernel."""
        kernels = self._open_kernels()
        outcome = kernels.try_misuse(name)
        return self._kernels_answer(kernels, {outcome.kernel: outcome})

    def _replay_case(
        self, case: dict[str, Any], waivers: Sequence[dict[str, Any]] = ()
    ) -> dict[str, Any]:
        """Check one kernel case; the deviation that it shows, or None, and the case as a line."""
        parsed = _case(case)
        kernels = self._open_kernels()
        deviation = kernels.replay(parsed)
        if deviation is not None:
            name = (deviation["clause"], deviation["anomaly"])
            for waiver in waivers:
                if waiver["case"] is None or (waiver["clause"], waiver["anomaly"]) != name:
                    continue
                witness = _case(waiver["case"])
                if witness.kernel != parsed.kernel:
                    continue
                shown = kernels.replay(witness)
                if shown is not None and (shown["clause"], shown["anomaly"]) == name:
                    deviation["waiver"] = waiver["name"]
        return {
            "deviation": deviation,
            "line": parsed.line(),
            "surface": self.surface.as_json(),
        }

    def _open_kernels(self) -> Kernels:
        from conformance.kernels.session import Kernels

        return Kernels(self.surface, self.recorder.note if self.recorder else None)

    def _kernels_answer(self, kernels: Kernels, outcomes: dict[str, Outcome]) -> dict[str, Any]:
        """An answer like that of ``check``, with what each kernel came to under ``kernels``."""
        surface = self.surface.as_json()
        surface["features"] = sorted({*surface["features"], *kernels.features})
        surface["notes"] = surface["notes"] + kernels.notes()
        reached: dict[str, int] = {}
        for outcome in outcomes.values():
            for call, count in outcome.reached.items():
                reached[call] = reached.get(call, 0) + count
        return {
            "deviations": [d for o in outcomes.values() for d in o.deviations],
            "operations": 0,
            "calls": 0,
            "traces": 0,
            "programs": sum(outcome.programs for outcome in outcomes.values()),
            "reached": reached,
            "waivers": {n: state for o in outcomes.values() for n, state in o.waivers.items()},
            "recorded": None,
            "unexecuted": None,
            "kernels": {name: outcome.as_json() for name, outcome in outcomes.items()},
            "surface": surface,
        }

    def _record(self, trace: dict[str, Any], wanted: Sequence[str] = ()) -> dict[str, Any]:
        from conformance.record import record
        from generators.operations import Trace

        parsed = Trace.from_json(trace)
        if self.recorder is not None:
            self.recorder(parsed, 0)
        return record(self.surface, parsed, wanted).as_json()

    def _unexecuted(self, operations: int, seed: int) -> dict[str, dict[str, list[int]]]:
        """Lines of the surface that a traced sample of `operations` never reaches."""
        from conformance.engine import survey
        from conformance.sut.lines import Lines
        from conformance.sut.surface import MEASURED

        sources = {module: self.surface.loader.source_of(module) for module in MEASURED}
        lines = Lines({name: path for name, path in sources.items() if path is not None})
        with lines.tracing():
            survey(self.surface, operations=operations, seed=seed)
        return lines.missing()

    def _witness(self, waiver: dict[str, Any]) -> tuple[str, Deviation | None]:
        """Replay a waiver's witness.

        Returns:
            ``active`` and the deviation it shows; or ``stale`` or ``elsewhere`` (a witness for a
            process with other debug settings), and None.
        """
        from conformance.engine import replay_one
        from generators.operations import Trace

        trace = Trace.from_json(waiver["trace"])
        here = (self.surface.debug, self.config.compiled)
        if (trace.header.debug, trace.header.compiled) != here:
            return "elsewhere", None
        deviation = replay_one(self.surface, self._fit(trace))
        if deviation is None or (deviation.clause, deviation.anomaly) != (
            waiver["clause"],
            waiver["anomaly"],
        ):
            return "stale", None
        deviation.count = 0
        return "active", deviation

    def _fit(self, trace: Any) -> Any:
        """The trace with token ids that this tree's path carries."""
        bits = min(trace.header.token_bits, self.surface.capabilities.token_bits)
        header = dataclasses.replace(trace.header, token_bits=bits)
        return dataclasses.replace(trace, header=header)

    def _replay(
        self,
        trace: dict[str, Any],
        waivers: Sequence[dict[str, Any]] = (),
        wild: bool = False,
        emit: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Replay a trace, or serve a schedule; or `emit` the test of the deviation that a trace
        showed, without replaying.
        """
        if "requests" in trace:
            return self._replay_schedule(trace, waivers)
        from conformance.engine import capabilities_for, replay_one
        from conformance.errors import NotOnThisTree, UserError
        from generators.operations import Trace
        from generators.protocol import Capabilities, IllegalOperation, check

        parsed = self._fit(Trace.from_json(trace))
        try:
            check(parsed, Capabilities())
        except IllegalOperation as error:
            raise UserError(f"the trace is not legal: {error}") from None
        try:
            found = capabilities_for(self.surface, wild=wild)
            check(parsed, dataclasses.replace(found, survives_assertion=True))
        except IllegalOperation as error:
            raise NotOnThisTree(f"the trace is not legal on this tree: {error}") from None
        if emit is not None:
            from conformance.emit.emitted import emit as test_of

            return {"test": test_of(self.surface, emit)}
        recorder = self.recorder
        note = (lambda index: recorder(parsed, index)) if recorder is not None else None
        deviation = replay_one(self.surface, parsed, note)
        if deviation is not None:
            played = [waiver for waiver in waivers if "operations" in waiver["trace"]]
            deviation.waiver = _active(deviation, parsed.header, played, self._witness)
        return {
            "deviation": deviation.as_json() if deviation else None,
            "surface": self.surface.as_json(),
        }
