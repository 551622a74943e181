"""The kernels' part of a run: its jobs, and what trees with the same source share; without torch.

A kernel is checked once per source: in a matrix the first tree that has it runs it, and what came
of it counts for the trees after it too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.kernels import sources
from conformance.kernels.misuse import MISUSES
from conformance.pool import Job
from conformance.sut.source import Tree
from conformance.sut.worker import Config


@dataclass
class Sharing:
    """What has been planned and found, by kernel and source.

    Attributes:
        relocated: module name to a path below a tree's root.
    """

    relocated: Mapping[str, str]
    _planned: dict[tuple[str, str, bool], str] = field(default_factory=dict)
    _found: dict[tuple[str, str, bool], dict[str, Any]] = field(default_factory=dict)
    _read: dict[Path, dict[str, sources.Source]] = field(default_factory=dict)

    def jobs(
        self, tree: Tree, config: Config, *, wild: bool, waivers: Sequence[dict[str, Any]]
    ) -> list[Job]:
        """The jobs of one tree: the kernels that no tree before it has; wild misuse one by one.

        Args:
            config: of the tree's workers.
            waivers: with a kernel case as their witness.
        """
        mine = self._keys(tree)
        names = [kernel for kernel, key in mine.items() if key not in self._planned]
        for kernel in names:
            self._planned[mine[kernel]] = tree.label
        request = {"do": "kernels", "names": names, "waivers": list(waivers)}
        jobs = [Job(f"{tree.label}, kernels", config, request)]
        if wild:
            # What is accepted may write or read anywhere: a process of its own for each.
            jobs += [
                Job(f"{tree.label}, misuse", config, {"do": "misuse", "name": misuse.name})
                for misuse in MISUSES.values()
                if misuse.refuses and misuse.kernel in names
            ]
        return jobs

    def keep(
        self, tree: Tree, kernels: Mapping[str, dict[str, Any]], crashed: dict[str, Any] | None
    ) -> None:
        """Remember what a job said of a tree's kernels.

        Args:
            kernels: outcomes by kernel, as the worker describes them.
            crashed: the deviation of a worker that a kernel killed.
        """
        outcomes = dict(kernels)
        if crashed is not None:
            outcomes[crashed["case"]["kernel"]] = {
                "deviations": [crashed],
                "reached": {crashed["difference"]["call"]: 1},
                "waivers": {},
            }
        keys = self._keys(tree) if outcomes else {}
        for kernel, outcome in outcomes.items():
            empty: dict[str, Any] = {"deviations": [], "reached": {}, "waivers": {}}
            kept = self._found.setdefault(keys[kernel], empty)
            kept["deviations"] += outcome["deviations"]
            kept["reached"].update(outcome["reached"])
            kept["waivers"].update(outcome["waivers"])

    def lent(self, tree: Tree) -> list[dict[str, Any]]:
        """What trees before this one showed of the kernels it has in common with them."""
        return [
            self._found[key]
            for key in self._keys(tree).values()
            if key in self._found and self._planned[key] != tree.label
        ]

    def table(self, tree: Tree) -> dict[str, dict[str, str]]:
        """The tree's kernels for a report: module, digest, and the tree they were checked on."""
        found, keys = self._sources(tree), self._keys(tree)
        return {
            kernel: {
                "module": source.module,
                "digest": source.digest,
                "checked_on": self._planned[keys[kernel]],
            }
            for kernel, source in found.items()
        }

    def _keys(self, tree: Tree) -> dict[str, tuple[str, str, bool]]:
        found = self._sources(tree)
        return {kernel: (kernel, s.digest, s.narrow) for kernel, s in found.items()}

    def _sources(self, tree: Tree) -> dict[str, sources.Source]:
        """The tree's kernels; their modules are parsed once."""
        if tree.root not in self._read:
            self._read[tree.root] = sources.find(tree.root, self.relocated)
        return self._read[tree.root]
