"""Draw docs/accept-length.svg: accept length over decode steps, healthy and with one corruption.

    python docs/accept_length.py [RELEASE]

Needs matplotlib beside what the suite needs. The same schedule is served twice by the release's own
loop: as it is, and with the seeded fault ``draft-kv-lost-once``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

FAULT = "draft-kv-lost-once"
WINDOW = 5  # decode steps of a running mean
OUT = Path(__file__).with_name("accept-length.svg")


def serve(release: str, fault: str) -> list[tuple[int, float]]:
    """(launch, mean accept length of its requests) of every decode step, in a fresh process."""
    done = subprocess.run(
        [sys.executable, __file__, release, fault],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(OUT.parent.parent)},
        stdout=subprocess.PIPE,
        check=True,
    )
    measured = json.loads(done.stdout)
    print(f"{fault or 'healthy'}: {len(measured['steps'])} steps, text right: {measured['right']}")
    return measured["steps"]


def measure(release: str, fault: str) -> None:
    """Serve the schedule in this process and print what came of it."""
    from conformance import faults
    from conformance.loop_faults import LOOP_FAULTS
    from conformance.sut.device import open_device
    from conformance.sut.loop import Loop
    from conformance.sut.source import locate
    from conformance.sut.surface import open_tree
    from generators.schedules import Arrival, Schedule, Server

    device = open_device("cpu")
    device.prepare(compiled=False)
    edits = {entry.name: entry.edits for entry in LOOP_FAULTS}.get(fault, ())
    surface = open_tree(locate(release).root, device, debug=False, edits=faults.apply(edits))
    server = Server(block=8, rows=4, context=128, kv_tokens=1024, agreement=7, seed=2)
    requests = tuple(Arrival(n, 1, 4 + n % 3, 60 + 9 * (n % 4)) for n in range(12))
    schedule = Schedule(server, requests)
    service = Loop(surface, schedule).run()
    steps = []
    for result in service.results:
        commits = [row.commits for row in result.rows if row.commits and not row.finished]
        if commits:
            steps.append((result.launch, sum(commits) / len(commits)))
    right = all(service.outputs[r.number] == schedule.output(r) for r in requests)
    print(json.dumps({"steps": steps, "right": right}))


def smooth(steps: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Launches, and the running mean of the steps up to each."""
    means = []
    for index in range(len(steps)):
        window = [value for _, value in steps[max(0, index - WINDOW + 1) : index + 1]]
        means.append(sum(window) / len(window))
    return [launch for launch, _ in steps], means


def draw(release: str) -> None:
    """Serve twice and write the figure."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "accept-length"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
    for fault, label, colour in (
        ("", "healthy", "#1b7837"),
        (FAULT, "one step's write into the draft's KV cache lost, at launch 20", "#b2182b"),
    ):
        axes.plot(*smooth(serve(release, fault)), label=label, color=colour, linewidth=1.8)
    axes.axvline(20, color="#777777", linewidth=0.8, linestyle=":")
    axes.set_xlabel("launch")
    axes.set_ylabel(f"accept length (mean of {WINDOW} steps)")
    axes.set_ylim(0, 8.3)
    axes.set_title(
        f"The text is the same: only the accept length tells (SGLang {release}, block 8)",
        fontsize=11,
    )
    axes.legend(frameon=False, loc="lower right", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(OUT, metadata={"Date": None})


if __name__ == "__main__":
    if len(sys.argv) > 2:
        measure(sys.argv[1], sys.argv[2])
    else:
        from conformance.sut.source import NEWEST

        draw(sys.argv[1] if len(sys.argv) > 1 else NEWEST)
