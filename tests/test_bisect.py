"""A failure's trace under the real ``git bisect run`` finds the commit that broke it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from small_repository import SmallRepository, file_of

from conformance.faults import FAULTS
from conformance.sut.surface import RELAY

FAULT = next(fault for fault in FAULTS if fault.name == "merge-order-relayed")

# Six commits after the good one, so git tries the third first: the one that cannot be tested. Its
# neighbours are sound, so skipping it leaves the answer unique.
GOOD = "0.5.15"
HISTORY = {
    "0.5.16": "good",
    "0.5.17": "good",
    "0.5.18": "skip",
    "0.5.19": "good",
    "0.5.20": "bad",
    "0.5.21": "bad",
}


def build(path: Path) -> tuple[SmallRepository, dict[str, str]]:
    """The repository, and the commit of every release."""
    repository = SmallRepository(path)
    commits = {}
    for release, verdict in {GOOD: "good", **HISTORY}.items():
        repository.lay(release, FAULT if verdict == "bad" else None)
        if verdict == "skip":
            (repository.sources / file_of(RELAY)).unlink()
        commits[release] = repository.commit(release)
    return repository, commits


def find_failure(tree: str, report: Path) -> Path:
    """The failure file of a run on the faulty tree, with the smallest budget that shows it."""
    code = (
        "from conformance import cli, runner\n"
        "runner.PROFILES['quick'] = runner.Profile('quick', 2_000, 0, 0)\n"
        "cli.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "run", "--sglang", tree, "--report", str(report)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    clause, anomaly = FAULT.expect
    (failure,) = (report / "failures").glob(f"*-{clause}-{anomaly}.json")
    return failure


def test_bisect_names_the_commit_that_brought_the_fault(tmp_path: Path) -> None:
    repository, commits = build(tmp_path / "sglang")
    failure = find_failure(f"{repository.path}@HEAD", tmp_path / "report")

    newest, first_bad = list(HISTORY)[-1], "0.5.20"
    repository.git("bisect", "start", commits[newest], commits[GOOD])
    replay = (sys.executable, "-m", "conformance", "replay", str(failure), "--sglang", ".")
    printed = repository.git("bisect", "run", *replay)
    assert f"{commits[first_bad]} is the first bad commit" in printed, printed

    # Lines such as "# bad: [<commit>] <release>": what git made of every exit status.
    noted = {}
    for line in repository.git("bisect", "log").splitlines():
        verdict, _, rest = line.removeprefix("# ").partition(": [")
        if line.startswith("# ") and verdict in ("good", "bad", "skip"):
            noted[rest.partition("] ")[2]] = verdict
    assert noted == {r: v for r, v in {GOOD: "good", **HISTORY}.items() if r in noted}
    assert {noted["0.5.18"], noted["0.5.19"], noted["0.5.20"]} == {"skip", "good", "bad"}
