"""Write a page for every pair of neighbouring releases: what changed in the hand-over.

``python docs/gate/generate.py [BASE HEAD]``: each page is the ``summary.md`` of a gate whose
changes are accepted by ``BASE-HEAD.toml`` beside it, if there is one. Takes about a minute a pair.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from conformance.sut.source import SUPPORTED

HERE = Path(__file__).parent


def generate(base: str, head: str) -> int:
    """Write one page; returns the gate's exit status."""
    records = HERE / f"{base}-{head}.toml"
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "conformance", "gate"),
            *("--base", base, "--head", head, "--report", folder),
            *(("--accept", str(records)) if records.exists() else ()),
        ]
        status = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
        if status in (0, 1):
            shutil.copyfile(Path(folder, "summary.md"), HERE / f"{base}-{head}.md")
    return status


def main() -> None:
    chosen = sys.argv[1:] or SUPPORTED
    statuses = {f"{base}-{head}": generate(base, head) for base, head in itertools.pairwise(chosen)}
    print(*(f"{pair}: exit status {status}" for pair, status in statuses.items()), sep="\n")
    sys.exit(max(statuses.values()))


if __name__ == "__main__":
    main()
