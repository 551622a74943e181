"""The parent's side of the workers: start them, feed them jobs, survive their deaths.

Never imports torch. On a CPU workers are forked from one preloaded server; a worker that dies is a
result (:attr:`Answer.crash`) that says which operation it was at and how it ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conformance.errors import UserError
from conformance.sut import recorder
from conformance.sut.worker import DEVICE_LOST, Config

STALL = 600.0
"""Seconds after which a worker that says nothing is killed: shrinking, compiling and the kernels
are silent, but for a minute or so."""

_TURN = 1.0
"""Seconds of one wait, the most that is counted as a worker's silence at a time: a suspended
parent, or one that is busy elsewhere, does not count."""

_MERCY = 10.0
"""Seconds in which a killed worker ends, if it can."""


@dataclass
class Job:
    """One request to a worker of its own.

    Attributes:
        label: for progress and errors.
        config: what the worker loads.
        request: ``{"do": "check" | "replay", ...}``.
        weight: operations it will carry out, for progress.
    """

    label: str
    config: Config
    request: dict[str, Any]
    weight: int = 0


@dataclass
class Crash:
    """A worker that died.

    Attributes:
        how: for example ``signal 11 (SIGSEGV)``.
        trace, operation: where it was, or None if it had not started a trace.
    """

    how: str
    trace: dict[str, Any] | None
    operation: int


@dataclass
class Answer:
    """What came of a job: exactly one of the three is set.

    Attributes:
        result: the worker's answer.
        error: ``status``, ``message`` and ``traceback`` of a request that failed.
        crash: how the worker died.
    """

    job: Job
    result: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    crash: Crash | None = None


Progress = Callable[[Job, int], None]
"""Called with a job and the operations it has done so far."""


class _Connection:
    def __init__(self, job: Job, sock: socket.socket, record: Path) -> None:
        self.job, self.socket, self.record = job, sock, record
        self.pid = 0
        self.forks = False
        self.buffer = b""
        self.silent = 0.0

    def close(self) -> None:
        self.socket.close()
        self.record.unlink()

    def send(self, message: dict[str, Any]) -> None:
        self.silent = 0.0
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """Whole messages that have arrived; None at the end of the connection."""
        self.silent = 0.0
        try:
            data = self.socket.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            return None
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        return [json.loads(line) for line in lines if line]


class Session:
    """One worker that answers one request after the other; a dead one is replaced.

    Use it as a context manager.
    """

    def __init__(self, pool: Pool, label: str, config: Config) -> None:
        self._pool, self._label, self._config = pool, label, config
        self._connection: _Connection | None = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        if self._connection is not None:
            self._connection.close()

    def send(self, request: dict[str, Any]) -> None:
        """Put a request; :meth:`receive` gives its answer."""
        job = Job(self._label, self._config, request)
        if self._connection is None:
            self._connection = self._pool.start(job)
        else:
            self._connection.job = job
            self._connection.send(request)

    def receive(self) -> Answer:
        """The answer to the last request."""
        connection = self._connection
        assert connection is not None
        with selectors.DefaultSelector() as selector:
            selector.register(connection.socket, selectors.EVENT_READ, connection)
            while not (answers := self._pool.turn(selector, None)):
                pass
        ((_, answer),) = answers
        if answer.result is None:
            connection.close()
            self._connection = None
        return answer


class Pool:
    """Runs jobs on workers, at most `size` at a time.

    Args:
        cache: folder for what torch, triton and Hypothesis write.
        size: workers at a time; default the machine's cores.
        device: of all jobs; it decides whether Triton interprets or compiles.
        stall: see :data:`STALL`.
    """

    def __init__(
        self, cache: Path, size: int | None = None, device: str = "cpu", stall: float = STALL
    ) -> None:
        self.cache, self.stall = cache, stall
        self._interpret = "1" if device == "cpu" else "0"
        self.size = size or os.cpu_count() or 1
        self._exits: dict[int, int] = {}
        self._started: list[int] = []
        self._connections = 0
        self._control_buffer = b""
        self._temporary = tempfile.TemporaryDirectory(prefix="dflash-conformance-")
        self._start_server()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self._control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._server.wait(5)
        self._server.kill()
        self._server.wait()
        self._temporary.cleanup()

    @property
    def server_pid(self) -> int:
        """Process id of the fork server, the parent of all workers."""
        return self._server.pid

    def _environment(self) -> dict[str, str]:
        """The workers' environment: on a CPU Triton's interpreter, and caches in one place."""
        root = str(Path(__file__).parent.parent)
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TRITON_INTERPRET": self._interpret,
            "TRITON_CACHE_DIR": str(self.cache / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.cache / "inductor"),
            "HYPOTHESIS_STORAGE_DIRECTORY": str(self.cache / "hypothesis"),
        }

    def _start_server(self) -> None:
        self._control, theirs = socket.socketpair()
        self._errors = Path(self._temporary.name) / "stderr"
        with self._errors.open("wb") as errors:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "conformance.sut.server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=self._environment(),
                stderr=errors,
            )
        theirs.close()
        self._ready = False

    def _server_died(self) -> UserError:
        self._server.wait()
        text = self._errors.read_text(errors="replace").strip().splitlines()
        last = text[-1] if text else "no message"
        return UserError(
            f"the workers could not start ({last}); check that torch, triton and numpy import in "
            "this environment"
        )

    def _read_control(self) -> None:
        try:
            data = self._control.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            raise self._server_died()
        *lines, self._control_buffer = (self._control_buffer + data).split(b"\n")
        for message in map(json.loads, lines):
            if "exit" in message:
                self._exits[message["exit"]] = message["status"]
            elif "started" in message:
                self._started.append(message["started"])
            else:
                self._ready = True

    def start(self, job: Job, *, forks: bool = False) -> _Connection:
        """A worker for a job, and if it `forks` for others of the same configuration."""
        mine, theirs = socket.socketpair()
        self._connections += 1
        record = Path(self._temporary.name) / f"recorder-{self._connections}"
        recorder.create(record)
        while not self._ready:
            self._read_control()
        socket.send_fds(self._control, [b"w"], [theirs.fileno()])
        theirs.close()
        while not self._started:
            self._read_control()
        connection = _Connection(job, mine, record)
        connection.pid = self._started.pop(0)
        config = asdict(job.config)
        config |= {"recorder": str(record), "forks": forks}
        connection.forks = forks
        connection.send(config)
        return connection

    def run(self, jobs: list[Job], progress: Progress | None = None) -> Iterator[Answer]:
        """Run the jobs; answers come in the order of `jobs`, each as soon as it can.

        On a CPU a tree is loaded once for the jobs of a worker, and forked for each of them; a
        process that has used a GPU cannot be forked.
        """
        forks = self._interpret == "1"
        answers: dict[int, Answer] = {}
        following = 0
        waiting = list(enumerate(jobs))
        busy: dict[_Connection, int] = {}
        with selectors.DefaultSelector() as selector:
            try:
                while waiting or busy:
                    while waiting and len(busy) < self.size:
                        number, job = waiting.pop(0)
                        connection = self.start(job, forks=forks)
                        selector.register(connection.socket, selectors.EVENT_READ, connection)
                        busy[connection] = number
                    for connection, answer in self.turn(selector, progress):
                        answers[busy.pop(connection)] = answer
                        config = answer.job.config
                        more = [entry for entry in waiting if entry[1].config == config]
                        if more and connection.forks and answer.result is not None:
                            waiting.remove(more[0])
                            busy[connection], connection.job = more[0]
                            connection.send(connection.job.request)
                        else:
                            selector.unregister(connection.socket)
                            connection.close()
                    while following in answers:
                        yield answers.pop(following)
                        following += 1
            finally:
                for connection in busy:
                    connection.socket.close()

    def session(self, label: str, config: Config) -> Session:
        """A worker for several requests, beside those of :meth:`run`."""
        return Session(self, label, config)

    def turn(
        self, selector: selectors.BaseSelector, progress: Progress | None
    ) -> list[tuple[_Connection, Answer]]:
        """Wait a moment for what workers say.

        Args:
            selector: of the workers' connections.

        Returns:
            The answers that are complete now, those of silent workers included.
        """
        began = time.monotonic()
        spoke = {key.data for key, _ in selector.select(_TURN)}
        waited = min(time.monotonic() - began, _TURN)
        answers = []
        for key in selector.get_map().values():
            connection: _Connection = key.data
            if connection in spoke:
                answer = self._react(connection, progress)
            else:
                answer = self._bear(connection, waited)
            if answer is not None:
                answers.append((connection, answer))
        return answers

    def _bear(self, connection: _Connection, waited: float) -> Answer | None:
        """Note that a worker was silent; end one that was so for too long."""
        connection.silent += waited
        if connection.silent < self.stall:
            return None
        with contextlib.suppress(ProcessLookupError):
            kill = os.killpg if connection.forks else os.kill
            kill(connection.pid, signal.SIGKILL)
        deadline = time.monotonic() + _MERCY
        while connection.pid not in self._exits:
            # A process that hangs in a driver outlives its signal.
            left = max(deadline - time.monotonic(), 0.0)
            if not select.select([self._control], [], [], left)[0]:
                break
            self._read_control()
        self._exits.pop(connection.pid, None)
        how = f"no sign of life for {connection.silent:.0f} s, killed"
        return Answer(connection.job, crash=self._crash(connection, how))

    def _react(self, connection: _Connection, progress: Progress | None) -> Answer | None:
        """Take what a worker said; its answer, once it is complete."""
        job = connection.job
        messages = connection.receive()
        if messages is None:
            return Answer(job, crash=self._crash(connection, self._end(connection)))
        for message in messages:
            event = message.pop("event")
            if event == "ready":
                connection.send(job.request)
            elif event == "progress":
                if progress is not None:
                    progress(job, message["operations"])
            elif event == "result":
                return Answer(job, result=message)
            else:
                return Answer(job, error=message)
        return None

    def _end(self, connection: _Connection) -> str:
        """How a worker that hung up ended."""
        while connection.pid not in self._exits:
            self._read_control()
        status = self._exits.pop(connection.pid)
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            return f"signal {number} ({signal.Signals(number).name})"
        code = os.WEXITSTATUS(status)
        if code == DEVICE_LOST:
            return "the device was lost (a failed assertion, or an access out of bounds)"
        return f"exit status {code}"

    @staticmethod
    def _crash(connection: _Connection, how: str) -> Crash:
        recorded = recorder.read(connection.record)
        if recorded is None:
            return Crash(how, None, -1)
        return Crash(how, *recorded)
