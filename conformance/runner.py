"""Check trees: plan jobs, run them on the pool, put the answers together into a report.

Runs in the parent and never imports torch. Budgets are operations, and shards are fixed by the
profile, so the same seed gives the same report on any number of cores.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from conformance.errors import NoEntryPoint, UserError
from conformance.kernels.jobs import Sharing
from conformance.kernels.misuse import MISUSES
from conformance.pool import Answer, Job, Pool
from conformance.sut import lines
from conformance.sut.source import Tree
from conformance.sut.worker import Config
from conformance.waivers import Waiver
from generators.exhaustive import Part
from generators.operations import (
    ALPHABET,
    KV_LAWS,
    LAWS,
    WILD_USES,
    Admit,
    Adopt,
    Header,
    Law,
    Trace,
)
from generators.protocol import KV_SITUATIONS, SITUATIONS
from generators.schedules import SITUATIONS as LOOP_SITUATIONS
from reference.clauses import CLAUSES

SHARD = 10_000
"""Operations of one job; a constant, so that results do not depend on the number of cores."""

KV_SHARD = 500
"""The same where there is a KV pool, whose kernels an interpreter runs on a CPU."""

RECORDED = 4
"""A gate records and compares one shard in this many; all are judged on both trees."""

KV_MODE = "KV pool"
"""What the jobs with a KV pool are called."""

LOOP_SHARD = 300
"""Decode steps of one job that runs the tree's event loop."""

LOOP_MODE = "loop"
"""What those jobs are called."""

LOOP_GATED = 3
"""A gate serves one part in this many: on two trees."""

LOOP_DEBUG = 5
"""One of so many of those jobs has debug assertions on."""

SHARES = 4
"""Jobs of the largest of the small scopes."""

TRACED = 1_500
"""Operations of the sample whose executed lines are recorded."""


@dataclass(frozen=True)
class Profile:
    """A budget, per tree, in operations.

    Attributes:
        plain: with debug assertions off.
        debug: with debug assertions on, run eagerly.
        compiled: with debug assertions on and compiled, as in production.
        rows: the algebra is tried in every instance with up to this many rows.
        scope: slots, requests and arrivals of the small scopes that are tried exhaustively.
        both: whether small scopes are played with debug assertions off too.
        kernels: whether the Triton kernels are checked too.
        kv: on real KV pools, with debug assertions off.
        loop: decode steps of the tree's own event loop.
    """

    name: str
    plain: int
    debug: int
    compiled: int
    rows: int = 0
    scope: tuple[int, int, int] | None = None
    both: bool = False
    kernels: bool = False
    kv: int = 0
    loop: int = 0


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("quick", 24_000, 16_000, 150, 4, (2, 3, 2), kernels=True, kv=1_000, loop=1_500),
        Profile(
            *("pr", 180_000, 60_000, 1_000, 5, (3, 4, 2)),
            both=True,
            kernels=True,
            kv=8_000,
            loop=5_000,
        ),
        Profile(
            *("nightly", 8_000_000, 2_000_000, 20_000, 5, (4, 5, 2)),
            both=True,
            kernels=True,
            kv=200_000,
            loop=100_000,
        ),
    )
}


class SuiteFault(Exception):
    """The suite itself is wrong, or something the tree supports was never reached."""


@dataclass
class TreeReport:
    """One tree's part of a report."""

    tree: Tree
    surface: dict[str, Any] = field(default_factory=dict)
    deviations: list[dict[str, Any]] = field(default_factory=list)
    operations: int = 0
    calls: int = 0
    traces: int = 0
    reached: Counter[str] = field(default_factory=Counter)
    waivers: dict[str, str] = field(default_factory=dict)
    modes: dict[str, int] = field(default_factory=dict)
    exhausted: list[dict[str, Any]] = field(default_factory=list)
    unexecuted: dict[str, dict[str, list[int]]] | None = None
    programs: int = 0
    steps: int = 0
    kernels: dict[str, dict[str, str]] = field(default_factory=dict)
    refusal: str | None = None
    status: int = 0
    seconds: float = 0.0
    device: str = "cpu"

    @property
    def verdict(self) -> str:
        """``conforms``, ``deviates`` or ``no entry point``; contract gaps do not count."""
        if self.refusal is not None:
            return "no entry point"
        open_ = [d for d in self.deviations if d["mode"] == "legal" and d["waiver"] is None]
        return "deviates" if open_ else "conforms"

    def absorb(self, other: TreeReport) -> None:
        """Add what another run on the same tree found."""
        for deviation in other.deviations:
            _merge(self.deviations, deviation)
        self.operations += other.operations
        self.calls += other.calls
        self.traces += other.traces
        self.programs += other.programs
        self.steps += other.steps
        self.reached.update(other.reached)
        self.waivers.update(other.waivers)
        self.modes.update(other.modes)
        self.exhausted += other.exhausted
        self.kernels.update(other.kernels)
        if other.surface:
            self.surface = _merged_surface(self.surface, other.surface)

    def exhaustive(self) -> list[dict[str, Any]]:
        """What was tried exhaustively, its parts added up."""
        whole: dict[str, dict[str, Any]] = {}
        for part in self.exhausted:
            size = {k: v for k, v in part.items() if k not in ("traces", "played", "complete")}
            entry = whole.setdefault(
                repr(size), {**size, "traces": 0, "played": 0, "complete": True}
            )
            entry["traces"] += part["traces"]
            entry["played"] += part["played"]
            entry["complete"] &= part["complete"]
        return list(whole.values())

    def features(self) -> set[str]:
        return set(self.surface.get("features", ()))

    def unreached(self, *, wild: bool) -> list[str]:
        """What the tree supports and this run never carried out or checked."""
        wanted = supported(self.features(), wild=wild, device=self.device)
        names = [name for name in wanted if not self.reached[name]]
        counts = self.clause_counts(wild=wild)
        return names + [f"clause {number}" for number, count in counts.items() if count == 0]

    def wild_outcomes(self) -> dict[str, dict[str, int]]:
        """How often each wild use was right, was refused (and how), or was which gap."""
        outcomes: dict[str, dict[str, int]] = {}
        for key, count in sorted(self.reached.items()):
            if key.startswith("outcome wild-"):
                use, _, verdict = key.removeprefix("outcome wild-").partition(": ")
                outcomes.setdefault(use, {})[verdict] = count
        return outcomes

    def clause_counts(self, *, wild: bool) -> dict[str, int | None]:
        """How often each clause was checked; None where the tree has nothing it applies to."""
        counts: dict[str, int | None] = {}
        for clause in CLAUSES.values():
            if clause.needs and clause.needs not in self.features():
                counts[clause.number] = None
            else:
                calls = clause.calls + (clause.wild_calls if wild else ())
                counts[clause.number] = sum(self.reached[call] for call in calls)
        return counts


_ALWAYS = (
    "admit",
    "chunk",
    "adopt",
    "merge",
    "step",
    "redundant",
    "finish",
    "filter",
    "retract",
    "preempt",
    "sync",
)

_WITH = {"mixed": "mixed", "seed": "seed", "skips_finishing": "leave"}
"""Operations that only a tree with a certain feature is given, by the feature."""


def supported(features: set[str], *, wild: bool, device: str = "cpu") -> list[str]:
    """Operations and situations that a run on a tree with these features must reach."""
    operations = [*_ALWAYS, *(name for feature, name in _WITH.items() if feature in features)]
    needs = {"consume-twice": "debug", **dict.fromkeys(KV_LAWS, "kv_pool")}
    operations += [f"law-{law}" for law in LAWS if needs.get(law, "") in {"", *features}]
    if wild:
        # On a GPU a failed assertion ends the process.
        uses = [n for n, use in WILD_USES.items() if device == "cpu" or use.asserts != "always"]
        operations += [f"wild-{use}" for use in uses]
    situations = [*SITUATIONS, *(KV_SITUATIONS if "kv_pool" in features else ())]
    if "loop" in features:
        situations += LOOP_SITUATIONS
        situations += [f"loop {name}" for name in ("mixed", "idle") if name in features]
    if "idle" in features or wild:
        operations.append("idle")
    else:
        situations.remove("idle first")
    if "mixed" not in features:
        situations.remove("lagging tail")
    if "filters_first" in features and "seed" not in features:
        situations.remove("early reuse")
    return [f"operation {name}" for name in operations] + [f"situation {s}" for s in situations]


def plan(
    label: str,
    config: Config,
    profile: Profile,
    *,
    seed: int,
    wild: bool,
    waivers: Sequence[Waiver],
    common: dict[str, Any] | None = None,
) -> list[Job]:
    """The jobs of one tree: shards without debug, with debug, and with debug compiled.

    Args:
        label: the tree, as reports name it.
        config: of its workers; the debug mode is set here.
        common: capabilities that the traces keep to, recording them: what a gate gives two trees.
    """
    modes = (
        ("debug off", replace(config, debug=False), profile.plain),
        ("debug on", replace(config, debug=True), profile.debug),
        ("debug compiled", replace(config, debug=True, compiled=True), profile.compiled),
    )
    waivers = [waiver for waiver in waivers if waiver.case is None]
    served = [w for w in waivers if "requests" in w.trace]
    pooled = [w for w in waivers if w.trace["header"].get("kv_tokens") and w not in served]
    waivers = [waiver for waiver in waivers if waiver not in pooled and waiver not in served]
    # On a GPU a failed assertion ends the process, so what provokes one is played alone.
    alone = [w for w in waivers if config.device != "cpu" and _provokes(w.trace)]
    jobs = []
    for mode, (name, configured, budget) in enumerate(modes):
        for shard, start in enumerate(range(0, budget, SHARD)):
            size = min(SHARD, budget - start)
            request = {
                "do": "check",
                "operations": size,
                "seed": (seed * 3 + mode) * 1_000_003 + shard,
                "wild": wild,
                "waivers": [waiver.request() for waiver in waivers if waiver not in alone],
                "traced": 0 if shard or configured.compiled or common else min(size, TRACED),
                "capabilities": common,
                "recording": common is not None and not shard % RECORDED,
            }
            jobs.append(Job(f"{label}, {name}", configured, request, weight=size))
        if config.device != "cpu" and configured.debug and budget:
            for channel in ("tokens", "lengths"):
                request = {
                    "do": "check",
                    "given": [_consume_twice(channel, compiled=configured.compiled).as_json()],
                    "waivers": [waiver.request() for waiver in alone],
                }
                jobs.append(Job(f"{label}, {name}", configured, request))
    # Compiling takes long: it begins early, beside the first shard.
    jobs[1:] = sorted(jobs[1:], key=lambda job: not job.config.compiled)
    # A gate plays these on two trees, and once more to record them: half of them take as long.
    pooled_budget = profile.kv if common is None else profile.kv // 2
    for shard, start in enumerate(range(0, pooled_budget, KV_SHARD)):
        request = {
            "do": "check",
            "operations": min(KV_SHARD, pooled_budget - start),
            "seed": (seed * 3 + len(modes)) * 1_000_003 + shard,
            "kv_pool": True,
            "waivers": [waiver.request() for waiver in pooled],
            "capabilities": common,
            "recording": common is not None and not shard % RECORDED,
        }
        configured = replace(config, debug=False)
        jobs.append(Job(f"{label}, {KV_MODE}", configured, request, weight=KV_SHARD))
    looped_budget = profile.loop if common is None else profile.loop // LOOP_GATED
    for shard, start in enumerate(range(0, looped_budget, LOOP_SHARD)):
        request = {
            "do": "loop",
            "steps": min(LOOP_SHARD, looped_budget - start),
            "seed": (seed * 3 + len(modes) + 1) * 1_000_003 + shard,
            "waivers": [waiver.request() for waiver in served],
        }
        configured = replace(config, debug=shard % LOOP_DEBUG == LOOP_DEBUG - 1)
        jobs.append(Job(f"{label}, {LOOP_MODE}", configured, request, weight=LOOP_SHARD))
    # Two trees are given random traces, to be compared; the larger profiles also all of a scope.
    for part, debug in _parts(profile) if common is None or profile.both else ():
        request = {
            "do": "check",
            "exhaust": asdict(part),
            "waivers": [waiver.request() for waiver in waivers if waiver not in alone],
            "capabilities": common,
        }
        name = "algebra" if part.rows else "small scope"
        jobs.append(Job(f"{label}, {name}", replace(config, debug=debug), request))
    return jobs


def _parts(profile: Profile) -> Iterator[tuple[Part, bool]]:
    """What the profile tries exhaustively, and whether with debug assertions on.

    Those are the stricter ones: a consumed row is poisoned. Where both are played, host lengths are
    asked for with one and not with the other.
    """
    if profile.rows:
        for overlap in (True, False):
            yield Part(rows=profile.rows, overlap=overlap), True
    if profile.scope is None:
        return
    slots, requests, arrivals = profile.scope
    scope = Part(slots=slots, requests=requests, arrivals=arrivals)
    for debug in (True, False) if profile.both else (True,):
        for seeded, overlap in ((False, True), (True, True), (False, False), (True, False)):
            # Without overlap there is nothing in flight, and few states.
            shares = SHARES >> seeded if overlap else 1
            whole = replace(
                scope,
                overlap=overlap,
                seeded=seeded,
                needs_cpu_seq_lens=debug,
                shares=shares,
            )
            for share in range(shares):
                yield replace(whole, share=share), debug


def _consume_twice(channel: str, *, compiled: bool) -> Trace:
    """The smallest trace that consumes a row twice."""
    operations = (Admit(((0, 1, 1),)), Adopt(), Law("consume-twice", channel=channel))
    return Trace(Header(pool=2, block=1, debug=True, compiled=compiled), operations)


def _provokes(trace: dict[str, Any]) -> bool:
    """Whether a trace provokes an assertion."""
    return any(operation.get("law") == "consume-twice" for operation in trace["operations"])


def check_trees(
    trees: Sequence[Tree],
    profile: Profile,
    pool: Pool,
    *,
    seed: int = 0,
    wild: bool = False,
    waivers: Sequence[Waiver] = (),
    relocated: dict[str, str] | None = None,
    declared: list[list[str]] | None = None,
    fault: str | None = None,
    device: str = "cpu",
    progress: Callable[[Job, int], None] | None = None,
    answered: Callable[[Answer], None] | None = None,
    finished: Callable[[TreeReport], None] | None = None,
) -> list[TreeReport]:
    """Check every tree with the profile's budget.

    Args:
        answered: called with each job's answer.
        finished: called with each tree's report as soon as it is complete.

    Raises:
        SuiteFault: a worker failed in the suite's own code.
        NoEntryPoint, UserError: a single tree cannot be checked at all (with several, its report
            says so instead).
    """
    start = time.monotonic()
    plans = []
    sharing = Sharing(relocated or {})
    for tree in trees:
        config = Config(
            str(tree.root), device, False, False, relocated or {}, declared or [], fault
        )
        jobs = plan(tree.label, config, profile, seed=seed, wild=wild, waivers=waivers)
        if profile.kernels:
            witnesses = [waiver.request() for waiver in waivers if waiver.case is not None]
            jobs += sharing.jobs(tree, config, wild=wild, waivers=witnesses)
        plans.append(jobs)
    answers = pool.run([job for jobs in plans for job in jobs], progress)
    reports = []
    for tree, jobs in zip(trees, plans, strict=True):
        report = TreeReport(tree, device=device)
        for _ in jobs:
            answer = next(answers)
            if answered is not None:
                answered(answer)
            add(report, answer, single=len(trees) == 1)
            crash = crash_deviation(answer) if answer.crash is not None else None
            kernels = (answer.result or {}).get("kernels", {})
            sharing.keep(tree, kernels, crash if crash and crash.get("case") else None)
        if profile.kernels:
            _borrow(report, sharing)
        settle(report)
        report.deviations.sort(key=lambda d: (d["mode"], d["clause"], d["anomaly"]))
        report.seconds = round(time.monotonic() - start, 2)
        start = time.monotonic()
        reports.append(report)
        if finished is not None:
            finished(report)
    return reports


def add(report: TreeReport, answer: Answer, *, single: bool) -> None:
    """Put one job's answer into its tree's report.

    Raises:
        SuiteFault: the worker failed in the suite's own code.
        NoEntryPoint, UserError: the tree cannot be checked and is the only one (`single`).
    """
    if answer.error is not None:
        if answer.error["status"] == 3:
            raise failure_of(answer.error, f"{answer.job.label}: ")
        if single:
            raise failure_of(answer.error)
        report.refusal, report.status = answer.error["message"], answer.error["status"]
        return
    if answer.crash is not None:
        _merge(report.deviations, crash_deviation(answer))
        return
    result = answer.result
    assert result is not None
    report.surface = _merged_surface(report.surface, result["surface"])
    for deviation in result["deviations"]:
        _merge(report.deviations, deviation)
    report.operations += result["operations"]
    report.calls += result["calls"]
    report.traces += result["traces"]
    report.programs += result.get("programs", 0)
    report.steps += result.get("steps", 0)
    report.reached.update(result["reached"])
    if result["unexecuted"] is not None:
        report.unexecuted = lines.common(report.unexecuted, result["unexecuted"])
    if result.get("exhausted"):
        report.exhausted.append({**result["exhausted"], "debug": answer.job.config.debug})
    mode = answer.job.label.rpartition(", ")[2]
    done = result.get("steps", result["operations"])
    report.modes[mode] = report.modes.get(mode, 0) + done
    for name, state in result["waivers"].items():
        if state != "elsewhere":
            report.waivers[name] = state


def settle(report: TreeReport) -> None:
    """Of what a waiver may cover, tell what it does: its witness was replayed by now."""
    found, report.deviations = report.deviations, []
    for deviation in found:
        covered = report.waivers.get(deviation["waiver"]) == "active"
        waiver = deviation["waiver"] if covered else None
        _merge(report.deviations, {**deviation, "waiver": waiver})


def _borrow(report: TreeReport, sharing: Sharing) -> None:
    """Add what other trees' jobs showed of kernels that this tree has too."""
    for outcome in sharing.lent(report.tree):
        for deviation in outcome["deviations"]:
            _merge(report.deviations, deviation)
        report.reached.update(outcome["reached"])
        report.waivers.update(outcome["waivers"])
    report.kernels = sharing.table(report.tree)


def failure_of(error: dict[str, Any], prefix: str = "") -> UserError | SuiteFault:
    """The exception that a worker's error stands for, its message after `prefix`."""
    message = f"{prefix}{error['message']}"
    if error["status"] == 3:
        return SuiteFault(f"{message}\n{error['traceback']}")
    return (NoEntryPoint if error["status"] == 125 else UserError)(message)


def result_of(answer: Answer) -> dict[str, Any]:
    """A job's result.

    Raises:
        SuiteFault: the worker died, or failed in the suite's own code.
        NoEntryPoint, UserError: the tree cannot be checked.
    """
    label = answer.job.label
    if answer.crash is not None:
        raise SuiteFault(f"{label}: a worker died ({answer.crash.how})")
    if answer.error is not None:
        raise failure_of(answer.error, f"{label}: ")
    assert answer.result is not None
    return answer.result


def _merge(found: list[dict[str, Any]], deviation: dict[str, Any]) -> None:
    """Add a deviation, or count it with the one of the same name that has the shorter trace."""
    for index, other in enumerate(found):
        if all(other[key] == deviation[key] for key in ("clause", "anomaly", "mode", "waiver")):
            count = other["count"] + deviation["count"]
            shorter = min((other, deviation), key=_size)
            found[index] = {**shorter, "count": count}
            return
    found.append(deviation)


def _size(deviation: dict[str, Any]) -> int:
    """How much a deviation asks of who reads it: operations of its trace, tokens of its schedule's
    requests, or cells of its case.
    """
    trace = deviation["trace"]
    if trace is not None and "requests" in trace:
        return sum(100 + request["prompt"] + request["limit"] for request in trace["requests"])
    if trace is not None:
        return len(trace["operations"])
    return int(deviation["case"]["batch"] * deviation["case"]["block"])


def crash_deviation(answer: Answer) -> dict[str, Any]:
    """A dead worker as a deviation: where it was and how it ended."""
    crash = answer.crash
    assert crash is not None
    if crash.trace is None:
        raise SuiteFault(f"{answer.job.label}: a worker died at start ({crash.how})")
    if "case" in crash.trace:
        return _kernel_crash(crash.trace["case"], crash.how)
    if "requests" in crash.trace:
        return _crashed(crash.trace, "L1", "legal", "loop-output", crash.how)
    trace = {**crash.trace, "operations": crash.trace["operations"][: crash.operation + 1]}
    last = trace["operations"][-1]["op"]
    return _crashed(trace, "R1", "wild" if ALPHABET[last].wild else "legal", last, crash.how)


def _crashed(
    trace: dict[str, Any] | None, clause: str, mode: str, call: str, how: str
) -> dict[str, Any]:
    """The deviation of a process that died in a call."""
    return {
        "clause": clause,
        "anomaly": "crash",
        "mode": mode,
        "waiver": None,
        "count": 1,
        "difference": {
            "clause": clause,
            "anomaly": "crash",
            "call": call,
            "aspect": "process",
            "expected": "the process lives",
            "observed": how,
            "rows": [],
        },
        "trace": trace,
    }


def _kernel_crash(case: dict[str, Any], how: str) -> dict[str, Any]:
    """A worker that a kernel killed: it wrote or read where it must not."""
    misuse = MISUSES.get(case["misuse"])
    mode = "wild" if misuse is not None and misuse.refuses else "legal"
    call = misuse.call_name if misuse is not None else f"kernel-{case['kernel']}"
    return {
        **_crashed(None, "B7", mode, call, how),
        "case": case,
        "line": ", ".join(f"{key} {value}" for key, value in case.items() if value != ""),
        "arguments": {},
    }


def _merged_surface(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Union over processes: features differ with debug, stand-ins with what was used."""
    if not first:
        return second
    merged = dict(first)
    for key in ("features", "real", "doubles", "inert", "missing_packages", "notes"):
        merged[key] = sorted(set(first[key]) | set(second[key]))
    return merged
