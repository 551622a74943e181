"""Compare two trees on the same traces: does a change preserve behaviour, and if not, where?

Both trees are checked against the model, and what they make visible is recorded
(:mod:`conformance.record`) and compared. A difference between them is a :class:`Change`: one thing
that took another form, or other values, with the smallest trace that shows it. Deviations from the
specification that the base has too are told apart from those that the head brings.

Runs in the parent and never imports torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from conformance.acceptance import Acceptance
from conformance.changes import Agreement, Change, Differences
from conformance.kernels import sources
from conformance.pairs import Examples, Shard, Table
from conformance.pool import Answer, Job, Pool
from conformance.runner import Profile, TreeReport, add, check_trees, plan, result_of, settle
from conformance.sut.fields import FIELDS
from conformance.sut.source import Tree
from conformance.sut.worker import Config
from conformance.waivers import Waiver

PRESERVED = "behaviour preserved"
CHANGED = "behaviour changed, conforming"
DEVIATES = "deviates"


@dataclass
class Comparison:
    """What a gate found.

    Attributes:
        base, head: each tree's own report; the head's holds only deviations that are new.
        changes: differences between them.
        agreements: values that are the same on both.
        known: deviations that the base has too, or that a waiver covers.
        fixed: deviations of the base that the head no longer has.
        traces, observations: how many of both trees were compared.
        notes: what the reader should know, one line each.
    """

    base: TreeReport
    head: TreeReport
    changes: list[Change] = field(default_factory=list)
    agreements: list[Agreement] = field(default_factory=list)
    known: list[dict[str, Any]] = field(default_factory=list)
    fixed: list[dict[str, Any]] = field(default_factory=list)
    traces: int = 0
    observations: int = 0
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        """:data:`PRESERVED`, :data:`CHANGED` or :data:`DEVIATES`."""
        if any(d["mode"] == "legal" for d in self.head.deviations):
            return DEVIATES
        mended = any(d["mode"] == "legal" for d in self.fixed)
        return CHANGED if mended or any(change.counts for change in self.changes) else PRESERVED

    @property
    def passes(self) -> bool:
        """Whether nothing is left to decide: preserved, or every change accepted."""
        open_ = [change for change in self.changes if change.counts and change.accepted is None]
        return self.verdict != DEVIATES and not open_


def compare(
    base: Tree,
    head: Tree,
    profile: Profile,
    pool: Pool,
    *,
    seed: int = 0,
    wild: bool = False,
    waivers: Sequence[Waiver] = (),
    acceptances: Sequence[Acceptance] = (),
    relocated: dict[str, str] | None = None,
    declared: list[list[str]] | None = None,
    fault: str | None = None,
    device: str = "cpu",
    progress: Callable[[Job, int], None] | None = None,
) -> Comparison:
    """Check both trees on the same traces and say what differs.

    Args:
        fault: name of a seeded fault that is put into the head.

    Raises:
        NoEntryPoint, UserError: one of the trees cannot be checked at all.
        SuiteFault: a worker failed in the suite's own code.
    """
    start = time.monotonic()
    sides = [
        _Side(
            tree,
            Config(str(tree.root), device, False, False, relocated or {}, declared or [], seeded),
        )
        for tree, seeded in ((base, None), (head, fault))
    ]
    _describe(sides, pool)
    common = _common(*(side.capabilities for side in sides))
    with Examples(pool, common) as examples:

        def differences(shards: Sequence[Shard]) -> Differences:
            return Differences(shards, examples, *(side.surface for side in sides))

        _declare_renamed(sides, lambda scout: differences(_play(sides, scout, pool, common)[1]))
        comparison, shards = _play(
            sides, profile, pool, common, progress, seed=seed, wild=wild, waivers=waivers
        )
        found = differences(shards)
        comparison.changes = found.changes()
        comparison.agreements = found.agreements()
    if profile.kernels:
        _check_kernels(comparison, sides, pool, wild=wild, waivers=waivers)
    comparison.traces = sum(len(shard.comparable) for shard in shards)
    ended = sum(shard.traces for shard in shards) - comparison.traces
    if ended:
        comparison.notes.append(
            f"{ended:,} traces were not compared observation by observation: a deviation ended them"
        )
    for title, side in (("base", comparison.base), ("head", comparison.head)):
        comparison.notes += [f"{title}: {note}" for note in side.surface.get("notes", [])]
    comparison.observations = found.observations
    _sort_deviations(comparison, sides, pool)
    _leave_private(comparison)
    _accept(comparison, acceptances)
    comparison.seconds = round(time.monotonic() - start, 2)
    return comparison


def _play(
    sides: Sequence[_Side],
    profile: Profile,
    pool: Pool,
    common: dict[str, Any],
    progress: Callable[[Job, int], None] | None = None,
    *,
    seed: int = 0,
    wild: bool = False,
    waivers: Sequence[Waiver] = (),
) -> tuple[Comparison, list[Shard]]:
    """Check and record the same traces on both trees; the head also with what only it can do."""

    def planned(side: _Side, budget: Profile, shared: dict[str, Any] | None) -> list[Job]:
        return plan(
            side.tree.label,
            side.config,
            budget,
            seed=seed,
            wild=wild,
            waivers=waivers,
            common=shared,
        )

    jobs = [planned(side, profile, common) for side in sides]
    own: list[Job] = []
    if sides[1].capabilities != common:
        # There is nothing to compare it with, but it must conform.
        share = replace(profile, plain=profile.plain // 4, debug=profile.debug // 4, compiled=0)
        own = planned(sides[1], share, None)
    paired = [job for pair in zip(*jobs, strict=True) for job in pair]
    base_report, head_report = (TreeReport(s.tree, device=s.config.device) for s in sides)
    comparison = Comparison(base_report, head_report)
    shards: list[Shard] = []
    base: Answer | None = None
    for number, answer in enumerate(pool.run(paired + own, progress)):
        if number < len(paired) and not number % 2:
            add(comparison.base, answer, single=True)
            base = answer
            continue
        add(comparison.head, answer, single=True)
        if number >= len(paired) or base is None or not base.result or not answer.result:
            continue
        if answer.result["recorded"] is not None:
            tables = (Table(one.result["recorded"]) for one in (base, answer) if one.result)
            shards.append(Shard(base.job.config, answer.job.config, *tables))
    for report in (comparison.base, comparison.head):
        settle(report)
    return comparison, shards


_SCOUT = Profile("scout", 500, 0, 0)
"""Traces that tell a renamed field from a new one."""


def _declare_renamed(sides: Sequence[_Side], differences: Callable[[Profile], Differences]) -> None:
    """Let the census know a field that the head only calls by another name than the base."""
    head = sides[1]
    declared = head.config.declared
    known = {(f.owner, f.name) for f in FIELDS} | {tuple(d[:2]) for d in declared}
    new = {(owner, n) for owner in ("draft", "relay") for n in head.surface["fields"][owner]}
    roles = {(role.partition(".")[0], name) for role, name in head.surface["roles"].items()}
    if new <= known | roles:
        return
    renamed = differences(_SCOUT).renamed()
    for record in FIELDS:
        after = renamed.get(f"{record.owner}.{record.name}")
        if after is not None:
            sums = renamed.get(f"{record.owner}.{record.sums}", record.sums or "")
            names = [after, sums] if record.sums else [after]
            first, *rest = (name.rpartition(".")[2] for name in names)
            declared = [*declared, [record.owner, first, record.kind, *rest]]
    head.config = replace(head.config, declared=declared)


@dataclass
class _Side:
    """One of the two trees, how its workers are configured, and what it offers."""

    tree: Tree
    config: Config
    surface: dict[str, Any] = field(default_factory=dict)

    @property
    def capabilities(self) -> dict[str, Any]:
        found: dict[str, Any] = self.surface["capabilities"]
        return found


def _describe(sides: Sequence[_Side], pool: Pool) -> None:
    """Load each tree once without and once with debug, and note what it offers."""
    modes = (False, True)
    jobs = [
        Job(side.tree.label, replace(side.config, debug=debug), {"do": "describe"})
        for side in sides
        for debug in modes
    ]
    answers = pool.run(jobs)
    for side in sides:
        for _ in modes:
            answer = next(answers)
            surface = result_of(answer)["surface"]
            features = {*side.surface.get("features", ()), *surface["features"]}
            side.surface = {**surface, "features": sorted(features)}


_FORBIDS = frozenset({"filters_first"})
"""Capabilities that leave fewer traces to a tree that has them."""


def _common(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """What both trees can do."""
    return {
        name: max(one[name], other[name]) if name in _FORBIDS else min(one[name], other[name])
        for name in one
    }


# -- kernels ---------------------------------------------------------------------------------------

_KERNELS = Profile("kernels", 0, 0, 0, kernels=True)


def _check_kernels(
    comparison: Comparison,
    sides: Sequence[_Side],
    pool: Pool,
    *,
    wild: bool,
    waivers: Sequence[Waiver],
) -> None:
    """Check the base's kernels, and the head's where their source is another one."""

    def check(side: _Side) -> TreeReport:
        config = side.config
        (report,) = check_trees(
            [side.tree],
            _KERNELS,
            pool,
            wild=wild,
            waivers=waivers,
            relocated=config.relocated,
            fault=config.fault,
            device=config.device,
        )
        return report

    base = check(sides[0])
    comparison.base.absorb(base)
    same = sides[1].config.fault is None and _sources(sides[0]) == _sources(sides[1])
    head = base if same else check(sides[1])
    comparison.head.absorb(head)
    comparison.changes += _kernel_changes(base.kernels, head.kernels)


def _sources(side: _Side) -> dict[str, tuple[str, bool]]:
    """The tree's kernels, and what makes two of them the same."""
    found = sources.find(side.tree.root, side.config.relocated)
    return {name: (source.digest, source.narrow) for name, source in found.items()}


def _kernel_changes(
    base: dict[str, dict[str, str]], head: dict[str, dict[str, str]]
) -> Iterator[Change]:
    for name in sorted(base.keys() | head.keys()):
        if name not in head:
            yield Change("function", name, f"kernel {name} removed")
        elif name not in base:
            yield Change("function", name, f"new: kernel {name}", compatible=True)
        elif base[name]["digest"] != head[name]["digest"]:
            line = f"kernel {name}: its source changed (both are checked against the reference)"
            yield Change("function", name, line, compatible=True)


# -- deviations -----------------------------------------------------------------------------------


def _sort_deviations(comparison: Comparison, sides: Sequence[_Side], pool: Pool) -> None:
    """Tell new deviations from known and fixed ones, by replaying each on the other tree."""
    base, head = sides
    found = comparison.head.deviations
    covered = [d for d in found if d["waiver"] is not None]
    mine = [d for d in comparison.base.deviations if d["waiver"] is None]
    theirs = [d for d in found if d["waiver"] is None]
    # Kernels are given the same cases on both trees.
    kernels = {_kernel(d) for d in mine if d["trace"] is None}
    mine = [d for d in mine if d["trace"] is not None]
    cases = [d for d in theirs if d["trace"] is None]
    theirs = [d for d in theirs if d["trace"] is not None]
    shown = _replayed(base, theirs, pool)
    comparison.known = covered + [d for d, known in zip(theirs, shown, strict=True) if known]
    comparison.known += [d for d in cases if _kernel(d) in kernels]
    comparison.head.deviations = [d for d, known in zip(theirs, shown, strict=True) if not known]
    comparison.head.deviations += [d for d in cases if _kernel(d) not in kernels]
    still = _replayed(head, mine, pool)
    comparison.fixed = [d for d, known in zip(mine, still, strict=True) if not known]
    # A waiver's witness runs on both trees, so what it shows on the base alone is fixed.
    left = {(d["waiver"], d["clause"]) for d in covered}
    comparison.fixed += [
        d
        for d in comparison.base.deviations
        if d["waiver"] is not None and (d["waiver"], d["clause"]) not in left
    ]


def _kernel(deviation: dict[str, Any]) -> tuple[str, ...]:
    """What makes two deviations of a kernel the same."""
    keys = ("clause", "anomaly", "mode")
    return (deviation["case"]["kernel"], *(deviation[key] for key in keys))


def _replayed(side: _Side, deviations: Sequence[dict[str, Any]], pool: Pool) -> list[bool]:
    """For each deviation of the other tree, whether its trace shows the same on this one."""
    jobs = []
    for deviation in deviations:
        header = deviation["trace"]["header"]
        config = replace(side.config, debug=header["debug"], compiled=header.get("compiled", False))
        request = {
            "do": "replay",
            "trace": deviation["trace"],
            "wild": deviation["mode"] == "wild",
        }
        jobs.append(Job(side.tree.label, config, request))
    return [
        _shows(answer, deviation)
        for answer, deviation in zip(pool.run(jobs), deviations, strict=True)
    ]


def _shows(answer: Answer, deviation: dict[str, Any]) -> bool:
    if answer.crash is not None:
        return bool(deviation["anomaly"] == "crash")
    if answer.error is not None and answer.error["status"] != 3:
        return False  # the other tree's scheduler does not issue it
    other = result_of(answer)["deviation"]
    keys = ("clause", "anomaly", "mode")
    return other is not None and all(other[key] == deviation[key] for key in keys)


def _leave_private(comparison: Comparison) -> None:
    """What is undeclared (F7) but private is the tree's own business, and listed as internal."""
    comparison.head.deviations = [
        deviation
        for deviation in comparison.head.deviations
        if deviation["clause"] != "F7" or not all(n.startswith("_") for n in _names(deviation))
    ]


def _names(deviation: dict[str, Any]) -> list[str]:
    """The attributes that a census deviation found, from the list it shows."""
    text: str = deviation["difference"]["observed"]
    return [name.strip(" '\"") for name in text.strip("[]").split(",")]


def _accept(comparison: Comparison, acceptances: Sequence[Acceptance]) -> None:
    """Match changes with the records that accept them; say which records are expired or unused."""
    # Of two records for one change the one that holds counts.
    ordered = sorted(acceptances, key=lambda record: not record.expired)
    records = {line: record for record in ordered for line in record.changes}
    for change in comparison.changes:
        record = records.pop(change.line, None)
        if record is None:
            continue
        if record.expired:
            comparison.notes.append(
                f"the acceptance of '{change.line}' expired on {record.expires}: "
                "renew its date, or undo the change"
            )
        else:
            change.accepted = record
    comparison.notes += [
        f"the acceptance of '{line}' is not needed: nothing changed that way" for line in records
    ]
