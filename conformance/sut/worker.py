"""A worker: one process that serves one tree over JSON lines.

The first line a worker receives is its configuration (:class:`Config`); it answers ``ready`` with
the tree's surface, or ``error``. Then one request per line (``check`` or ``replay``), answered by
``progress`` lines and one ``result``. End of input ends the worker.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

_PROGRESS_EVERY = 500


@dataclass
class Config:
    """What a worker loads.

    Attributes:
        root: folder that holds ``sglang/``.
        device: name for :func:`conformance.sut.device.open_device`.
        debug: whether the tree's debug assertions bind.
        compiled: whether ``torch.compile`` stays what it is.
        relocated: module to path below `root`.
        declared: census records as [owner, name, kind].
        fault: name of a seeded fault to apply, or None.
        recorder: flight recorder file, or None.
    """

    root: str
    device: str = "cpu"
    debug: bool = False
    compiled: bool = False
    relocated: dict[str, str] = field(default_factory=dict)
    declared: list[list[str]] = field(default_factory=list)
    fault: str | None = None
    recorder: str | None = None


def serve(connection: socket.socket) -> None:
    """Serve requests until the other side closes the connection."""
    with connection, connection.makefile("rw", encoding="utf-8", newline="\n") as stream:
        lines = iter(stream.readline, "")
        first = next(lines, None)
        if first is None:
            return
        config = Config(**json.loads(first))
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
    from conformance.sut.driver import HarnessGap
    from conformance.sut.isolation import StandInUsed

    if isinstance(error, UserError):
        status = error.exit_status
    elif isinstance(error, StandInUsed | HarnessGap):
        status = 125
    else:
        status = 3
    text = " ".join(str(error).split()) or type(error).__name__
    return {"status": status, "message": text, "traceback": traceback.format_exc()}


class _Worker:
    def __init__(self, config: Config, stream: TextIO) -> None:
        # Torch is imported here: the parent that starts workers never does.
        from conformance import faults
        from conformance.sut.device import open_device
        from conformance.sut.fields import Field
        from conformance.sut.recorder import Recorder
        from conformance.sut.surface import open_tree

        self.config, self.stream = config, stream
        device = open_device(config.device)
        device.prepare(compiled=config.compiled)
        edits = faults.apply(faults.FAULTS[config.fault].edits) if config.fault else {}
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
            try:
                answer = {"check": self._check, "replay": self._replay}[request.pop("do")](
                    **request
                )
            except Exception as error:
                _send(self.stream, event="error", **_describe(error))
            else:
                _send(self.stream, event="result", **answer)

    def _check(
        self,
        operations: int,
        seed: int,
        wild: bool = False,
        waivers: list[dict[str, Any]] | None = None,
        stop_at_first: bool = False,
    ) -> dict[str, Any]:
        from conformance.engine import check

        states = {w["name"]: self._witness(w) for w in waivers or ()}
        waived = frozenset(
            (w["clause"], w["anomaly"]) for w in waivers or () if states[w["name"]] == "active"
        )
        reported = 0

        def progress(done: int, deviations: int) -> None:
            nonlocal reported
            if done - reported >= _PROGRESS_EVERY:
                reported = done
                _send(self.stream, event="progress", operations=done, deviations=deviations)

        result = check(
            self.surface,
            operations=operations,
            seed=seed,
            wild=wild,
            compiled=self.config.compiled,
            waived=waived,
            progress=progress,
            recorder=self.recorder,
            stop_at_first=stop_at_first,
        )
        names = {(w["clause"], w["anomaly"]): w["name"] for w in waivers or ()}
        for deviation in result.deviations:
            if (deviation.clause, deviation.anomaly) in waived:
                deviation.waiver = names[deviation.clause, deviation.anomaly]
        return {
            "deviations": [deviation.as_json() for deviation in result.deviations],
            "operations": result.operations,
            "calls": result.calls,
            "traces": result.traces,
            "reached": dict(result.reached),
            "waivers": states,
            "surface": self.surface.as_json(),
        }

    def _witness(self, waiver: dict[str, Any]) -> str:
        """Replay a waiver's witness: ``active``, ``stale``, or ``elsewhere`` (another process)."""
        from conformance.engine import replay_one
        from generators.operations import Trace

        trace = Trace.from_json(waiver["trace"])
        here = (self.surface.debug, self.config.compiled)
        if (trace.header.debug, trace.header.compiled) != here:
            return "elsewhere"
        deviation = replay_one(self.surface, self._fit(trace))
        if deviation is None:
            return "stale"
        same = (deviation.clause, deviation.anomaly) == (waiver["clause"], waiver["anomaly"])
        return "active" if same else "stale"

    def _fit(self, trace: Any) -> Any:
        """The trace with token ids that this tree's path carries."""
        bits = min(trace.header.token_bits, self.surface.capabilities.token_bits)
        header = dataclasses.replace(trace.header, token_bits=bits)
        return dataclasses.replace(trace, header=header)

    def _replay(self, trace: dict[str, Any]) -> dict[str, Any]:
        from conformance.engine import capabilities_for, replay_one
        from conformance.errors import UserError
        from generators.operations import Trace
        from generators.protocol import IllegalOperation, check

        parsed = self._fit(Trace.from_json(trace))
        wild = any(operation.wild or operation.op == "idle" for operation in parsed.operations)
        try:
            check(parsed, capabilities_for(self.surface, wild=wild))
        except IllegalOperation as error:
            raise UserError(f"the trace is not legal on this tree: {error}") from None
        if self.recorder is not None:
            self.recorder(parsed, 0)
        deviation = replay_one(self.surface, parsed)
        return {
            "deviation": deviation.as_json() if deviation else None,
            "surface": self.surface.as_json(),
        }


def main() -> None:
    """Entry of a spawned worker: the connection's file descriptor is the only argument."""
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
