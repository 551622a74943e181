"""A git repository of small SGLang trees: the files that the suite loads, from real releases."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from trees import copy_surface

from conformance import faults
from conformance.faults import Fault
from conformance.sut.source import locate


def file_of(module: str) -> Path:
    """Where a module is, below the folder that holds ``sglang/``."""
    return Path(*module.split(".")).with_suffix(".py")


class SmallRepository:
    """A repository laid out like SGLang's: the sources below ``python/``.

    Args:
        path: made and initialized here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sources = path / "python"
        path.mkdir()
        self.git("init", "--quiet", "--initial-branch", "main")

    def git(self, *arguments: str) -> str:
        """Run git here, untouched by the user's settings; returns what it printed."""
        identity = {
            f"GIT_{role}_{what}": value
            for role in ("AUTHOR", "COMMITTER")
            for what, value in (("NAME", "Nobody"), ("EMAIL", "nobody@example.org"))
        }
        done = subprocess.run(
            ["git", *arguments],
            cwd=self.path,
            env={**os.environ, **identity, "GIT_CONFIG_GLOBAL": os.devnull, "LC_ALL": "C"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            raise AssertionError(f"git {' '.join(arguments)}: {done.stdout}")
        return done.stdout

    def lay(self, release: str, fault: Fault | None = None) -> None:
        """Make the sources those of a release, with a fault or without; nothing is committed."""
        shutil.rmtree(self.sources, ignore_errors=True)
        copy_surface(locate(release), self.sources, faults.apply(fault.edits if fault else ()))

    def commit(self, message: str) -> str:
        """Commit the sources as they are; returns the commit."""
        self.git("add", "--all", "--force")
        self.git("commit", "--quiet", "--message", message)
        return self.git("rev-parse", "HEAD").strip()
