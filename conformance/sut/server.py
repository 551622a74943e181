"""The fork server: preloads torch and triton once, then forks a worker per request.

Over its control socket it receives one file descriptor per worker (the worker's connection) and
answers ``{"exit": pid, "status": wait status}`` when one ends. It ends with the socket.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys


def preload() -> None:
    """Import what every worker needs; nothing here may start a thread."""
    import hypothesis  # noqa: F401
    import torch
    import torch._inductor.config  # deterministic mode asks for it, and it takes a second
    import triton  # noqa: F401

    import conformance.engine
    import conformance.faults  # noqa: F401

    torch.set_num_threads(1)
    # The first draw builds Hypothesis's tables; do it once for all workers.
    from generators.protocol import Capabilities
    from generators.strategies import Enough, generate, traces

    def stop(_: object) -> None:
        raise Enough

    generate(traces(Capabilities()), 0, stop)


def serve(control: socket.socket) -> None:
    """Fork workers until the control socket closes."""
    from conformance.sut import worker

    children: set[int] = set()
    while True:
        readable, _, _ = select.select([control], [], [], 0.05 if children else None)
        if readable:
            data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not data:
                return
            pid = os.fork()
            if pid == 0:
                control.close()
                status = 0
                try:
                    worker.serve(socket.socket(fileno=descriptors[0]))
                except (BrokenPipeError, ConnectionResetError):
                    pass  # the parent is gone
                finally:
                    # No interpreter teardown: it would only print what native modules leak.
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(status)
            os.close(descriptors[0])
            children.add(pid)
            control.sendall(json.dumps({"started": pid}).encode() + b"\n")
        for pid in list(children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                children.discard(pid)
                control.sendall(json.dumps({"exit": pid, "status": status}).encode() + b"\n")


def main() -> None:
    """Entry: the control socket's file descriptor is the only argument."""
    control = socket.socket(fileno=int(sys.argv[1]))
    preload()
    control.sendall(b'{"ready": true}\n')
    serve(control)
    os._exit(0)


if __name__ == "__main__":
    main()
