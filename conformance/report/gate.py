"""The report of a gate: one JSON document, and the page that fits a pull-request comment.

Everything outside ``timings`` and ``environment`` is the same for the same seed and trees.
"""

from __future__ import annotations

import datetime
import json
import shlex
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from conformance import words
from conformance.changes import Change
from conformance.gate import CHANGED, DEVIATES, PRESERVED, Comparison
from conformance.report import explain, files, github
from conformance.report.document import SCHEMA, environment, not_covered, tree_document
from conformance.runner import KV_MODE
from generators.operations import Trace
from generators.protocol import KV_SITUATIONS, SITUATIONS

MOST_CHARACTERS = 60_000
"""A GitHub comment holds 65,536 characters."""

_MOST_TEXT = 1_000
"""Characters of one annotation."""

_MOST_EXAMPLES = 12
_MOST_DEVIATIONS = 6

_KINDS = {
    "field": "Fields",
    "function": "Functions",
    "capability": "What the tree can do",
    "form": "Types",
    "presence": "When it is there",
    "value": "Values",
    "exception": "Exceptions",
}


def document(comparison: Comparison, *, profile: str, seed: int, wild: bool) -> dict[str, Any]:
    """The gate's report."""
    base, head = comparison.base, comparison.head
    reports = (base, head)
    label = head.tree.label
    return {
        "schema": SCHEMA,
        "kind": "gate",
        "verdict": comparison.verdict,
        "passes": comparison.passes,
        "tree": label,
        "base": tree_document(base, wild=wild),
        "head": tree_document(head, wild=wild),
        "profile": profile,
        "seed": seed,
        "wild": wild,
        "totals": {
            "operations": base.operations + head.operations,
            "calls": base.calls + head.calls,
            "traces": base.traces + head.traces,
            "compared_traces": comparison.traces,
            "compared_observations": comparison.observations,
        },
        "changes": [_change(change) for change in comparison.changes],
        "same": [
            {
                "thing": agreement.thing,
                "what": words.thing(agreement.thing),
                "calls": agreement.calls,
                "observations": agreement.observations,
            }
            for agreement in comparison.agreements
        ],
        "deviations": [{**d, "tree": label} for d in head.deviations],
        "known": [{**d, "tree": label} for d in comparison.known],
        "fixed": [{**d, "tree": base.tree.label} for d in comparison.fixed],
        "notes": comparison.notes,
        "not_covered": [
            *not_covered(
                head.device,
                kernels=bool(head.kernels),
                kv=KV_MODE in head.modes,
                loop=bool(head.steps),
            ),
            "a second bug of the clause, anomaly and mode of a known deviation, but as a change",
        ],
        "environment": environment(reports),
        "timings": {"seconds": comparison.seconds},
    }


def _change(change: Change) -> dict[str, Any]:
    accepted = change.accepted
    return {
        "kind": change.kind,
        "thing": change.thing,
        "line": change.line,
        "calls": change.calls,
        "before": change.before,
        "after": change.after,
        "counts": change.counts,
        "internal": change.internal,
        "compatible": change.compatible,
        "wild": change.wild,
        "traces": change.count,
        "trace": change.trace,
        "accepted": None
        if accepted is None
        else {
            "link": accepted.link,
            "reason": accepted.reason,
            "expires": accepted.expires.isoformat(),
        },
    }


def headline(report: dict[str, Any]) -> str:
    """The verdict in one line."""
    verdict = report["verdict"]
    counted, open_ = _counted(report), _open(report)
    if verdict == DEVIATES:
        new = [d for d in report["deviations"] if d["mode"] == "legal"]
        names = ", ".join(f"{d['clause']} {d['anomaly']}" for d in new)
        return f"{DEVIATES}: {names}"
    if verdict == PRESERVED:
        return f"{PRESERVED}: the same on {report['totals']['compared_traces']:,} traces"
    accepted = f"{len(counted) - len(open_)} accepted, {len(open_)} to decide"
    text = f"{CHANGED}: {_count(counted, 'change')} ({accepted})"
    fixed = [d for d in report["fixed"] if d["mode"] == "legal"]
    return f"{text}, {_count(fixed, 'deviation')} fixed" if fixed else text


def _counted(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Changes that make the difference between preserved and changed."""
    return [change for change in report["changes"] if change["counts"]]


def _open(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of them that nobody has accepted yet."""
    return [change for change in _counted(report) if change["accepted"] is None]


def _count(things: Sequence[Any], noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


# -- the page -------------------------------------------------------------------------------------


def summary(report: dict[str, Any]) -> str:
    """The report as Markdown, short enough for one comment."""
    for examples in (_MOST_EXAMPLES, 3, 0):
        text = "\n".join(_page(report, examples)) + "\n"
        if len(text) <= MOST_CHARACTERS:
            return text
    note = "\n\nThis page was cut; report.json has the rest.\n"
    return text[: MOST_CHARACTERS - len(note)] + note


def _page(report: dict[str, Any], examples: int) -> Iterator[str]:
    base, head = report["base"]["label"], report["head"]["label"]
    yield f"# DFlash hand-over, {base} to {head}"
    yield ""
    yield f"**{headline(report)}.**"
    for note in report["notes"]:
        yield f"\n> {note}"
    yield from _deviations(report)
    deviates = report["verdict"] == DEVIATES
    # Beside a deviation the changes are mostly its consequences; nobody has to decide them.
    yield from _folded(_changes(report, examples), "What else changed", fold=deviates)
    yield from _folded(_same(report), "What is the same on both", fold=not _decidable(report))
    yield from _apart(report)
    yield from _ran(report)
    yield from _folded(_LEGEND, "How to read this")
    yield from _folded((f"- {line}" for line in report["not_covered"]), "Not covered")


def _decidable(report: dict[str, Any]) -> bool:
    return bool(report["verdict"] == CHANGED)


def _folded(lines: Iterable[str], title: str, *, fold: bool = True) -> Iterator[str]:
    """The lines, behind a title to open if `fold`; nothing if there are none."""
    text = list(lines)
    if not text or not fold:
        yield from text
        return
    yield f"\n<details><summary>{title}</summary>\n"
    yield from text
    yield "\n</details>"


_LEGEND = (
    "- `r0@1 len 5`: request 0 in slot 1, five tokens in its KV cache. `step accepted [2]`: two "
    "drafts accepted. `redundant`: a step of a request whose end is in flight.",
    "- `build`: what the worker hands over. `publish`, `stash`: what the relay takes. `resolve`: "
    "what the next step gets back; `admit-resolve` before a prefill. `absorb-filter`: the filter "
    "of a prefill batch before it is merged or adopted. `restore`: the end of a forward.",
    "- `mix`: a prefill takes the running batch along; `mixed-resolve`: what their forward gets. "
    "`seed`: the rows of requests that arrive prefilled. `results`: a batch as it was launched, "
    "when the host processes its result.",
    "- A *law* is an algebraic law on fresh draft inputs, a *wild use* one that nobody issues.",
    "- `int64[n]`: one row per request (or per slot of the relay); `_`: a row not written yet.",
)


def _deviations(report: dict[str, Any]) -> Iterator[str]:
    found = [d for d in report["deviations"] if d["mode"] == "legal"]
    if not found:
        return
    yield ""
    yield "## Deviations that the base does not have"
    for deviation in found[:_MOST_DEVIATIONS]:
        yield ""
        yield from _explained(deviation)
    if len(found) > _MOST_DEVIATIONS:
        yield f"\nAnd {len(found) - _MOST_DEVIATIONS} more in report.json."


def _explained(deviation: dict[str, Any]) -> Iterator[str]:
    yield f"### {explain.headline(deviation)}"
    yield ""
    yield "```"
    replay = (
        f"dflash-conformance replay failures/{files.stem(deviation)}.json "
        f"--sglang {shlex.quote(deviation['tree'])}"
    )
    yield from explain.lines(deviation, replay=replay)
    yield "```"


def _changes(report: dict[str, Any], examples: int) -> Iterator[str]:
    counted, open_ = _counted(report), _open(report)
    if open_:
        yield ""
        yield "## Changes to decide" if report["verdict"] == CHANGED else "## Changes"
        for kind, title in _KINDS.items():
            changes = [change for change in open_ if change["kind"] == kind]
            if changes:
                yield f"\n**{title}**\n"
                yield from map(_line, changes)
    if len(open_) < len(counted):
        yield ""
        yield "## Accepted changes"
    decided: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for change in counted:
        if change["accepted"] is not None:
            key = tuple(change["accepted"][k] for k in ("reason", "link", "expires"))
            decided.setdefault(key, []).append(change)
    for (reason, link, expires), changes in decided.items():
        yield f"\n**{reason}** <{link}> (until {expires})\n"
        yield from map(_line, changes)
    shown = [change for change in counted if change["trace"] is not None][:examples]
    if shown:
        yield ""
        yield "<details><summary>The smallest trace that shows each</summary>"
        for change in shown:
            yield f"\n{_code(change['line'])}\n"
            yield "```"
            yield from example(change)
            yield "```"
        yield ""
        yield "</details>"


def _line(change: dict[str, Any]) -> str:
    line = f"- {_code(change['line'])}"
    if len(change["calls"]) > 1:
        calls, laws = _hand_over(change["calls"])
        named = [*calls[:6], *(["..."] if len(calls) > 6 else []), *([laws] if laws else [])]
        line += f" (at {', '.join(named)})"
    return line


def _hand_over(calls: Sequence[str]) -> tuple[list[str], str]:
    """The calls of the hand-over itself, and how many laws and wild uses there are beside them."""
    own = [call for call in calls if not call.startswith(("law-", "wild-"))]
    laws = len(calls) - len(own)
    return own, _count(range(laws), "law") if laws else ""


def _code(text: str) -> str:
    return f"`{text}`"


def example(change: dict[str, Any]) -> Iterator[str]:
    """The trace of a change, and what both trees show at its end."""
    trace = Trace.from_json(change["trace"])
    yield trace.header.line()
    yield from trace.lines()
    yield f"  before  {change['before']}"
    yield f"  after   {change['after']}"


def _same(report: dict[str, Any]) -> Iterator[str]:
    if not report["same"]:
        return
    yield ""
    yield "## The same on both"
    yield ""
    yield "For the same traces, value by value (whatever their integer type):"
    yield ""
    yield "| what | compared at | observations |"
    yield "|---|---|---|"
    for row in report["same"]:
        calls, laws = _hand_over(row["calls"])
        places = ", ".join([*calls, *([laws] if laws else [])])
        yield f"| {row['what']} | {places} | {row['observations']:,} |"


def _apart(report: dict[str, Any]) -> Iterator[str]:
    """What does not count: listed, so that nobody has to wonder."""
    internal = [c for c in report["changes"] if c["internal"]]
    compatible = [c for c in report["changes"] if c["compatible"] and not c["internal"]]
    wild = [c for c in report["changes"] if c["wild"]]
    gaps = [d for d in report["deviations"] if d["mode"] == "wild"]
    known, fixed = report["known"], report["fixed"]
    if not any((internal, compatible, wild, gaps, known, fixed)):
        return
    yield ""
    yield "## Apart from the verdict"
    yield ""
    for title, changes in (
        ("Added, and nobody has to change", compatible),
        ("Inside the tree's own code", internal),
        ("At uses that no scheduler path issues", wild),
    ):
        yield from (f"- {title}: {_code(change['line'])}" for change in changes)
    for deviation in known:
        by = f"waived: {deviation['waiver']}" if deviation["waiver"] else "the base has it too"
        yield f"- Known: {deviation['clause']} {deviation['anomaly']} ({by})"
    for deviation in fixed:
        yield f"- Fixed: {deviation['clause']} {deviation['anomaly']}, which the base has"
    for deviation in gaps:
        yield f"- Contract gap (wild use): {deviation['clause']} {deviation['anomaly']}"


def _ran(report: dict[str, Any]) -> Iterator[str]:
    totals, environment_ = report["totals"], report["environment"]
    yield ""
    yield "## What ran"
    yield ""
    yield "| tree | source | operations | calls into it | by mode |"
    yield "|---|---|---|---|---|"
    for side in (report["base"], report["head"]):
        source = side["source"]
        where = source["commit"] or source["version"] or source["kind"]
        modes = ", ".join(f"{name} {n:,}" for name, n in side["totals"]["by_mode"].items())
        yield (
            f"| {side['label']} | {where} | {side['totals']['operations']:,} "
            f"| {side['totals']['calls']:,} | {modes} |"
        )
    reached = report["head"]["reached"]
    pooled = KV_MODE in report["head"]["totals"]["by_mode"]
    named = [*SITUATIONS, *(KV_SITUATIONS if pooled else ())]
    missed = [name for name in named if not reached.get(f"situation {name}")]
    operations = sum(name.startswith("operation ") for name in reached)
    of = f"{len(named) - len(missed)} of {len(named)} situations reached"
    without = f" (not {', '.join(missed)})" if missed else ""
    yield ""
    yield (
        f"{totals['compared_traces']:,} traces and {totals['compared_observations']:,} "
        f"observations compared; {operations} kinds of operation and {of}{without}. "
        f"Profile {report['profile']}, seed {report['seed']}"
        f"{', wild uses included' if report['wild'] else ''}; torch {environment_['torch']}, "
        f"triton {environment_['triton']}, hypothesis {environment_['hypothesis']}."
    )


# -- other forms ----------------------------------------------------------------------------------


def write(folder: Path, report: dict[str, Any]) -> dict[str, Path]:
    """Write the gate's report folder; returns the failure file of every deviation by its stem.

    Beside what a run writes there are ``changes/``, one replayable trace each, and ``accept.toml``
    with a record for every change that is still to be decided.

    Raises:
        UserError: the folder cannot be written.
    """
    texts = {
        "junit.xml": files.xml(_suites(report)),
        "summary.md": summary(report),
        "annotations.txt": "\n".join(annotated(report)) + "\n",
        "accept.toml": acceptances(report),
    }
    shown = [change for change in report["changes"] if change["trace"] is not None]
    traces = {
        f"{number:02}-{_slug(change['line'])}": {**change, "schema": report["schema"]}
        for number, change in enumerate(shown, 1)
    }
    return files.write_texts(folder, report, texts, traces)


def _slug(text: str) -> str:
    """A file name out of words."""
    return "-".join("".join(c if c.isalnum() else " " for c in text).split())[:60]


def _suites(report: dict[str, Any]) -> ET.Element:
    """JUnit: the head's clauses, and one case per change that counts."""
    root = files.suites([report["head"]])
    counted, open_ = _counted(report), _open(report)
    suite = ET.SubElement(
        root,
        "testsuite",
        name=f"changes from {report['base']['label']}",
        tests=str(len(counted)),
        failures=str(len(open_)),
    )
    for change in counted:
        case = ET.SubElement(
            suite, "testcase", classname="conformance.changes", name=change["line"]
        )
        if change["accepted"] is None:
            failure = ET.SubElement(case, "failure", message="changed, and nobody accepted it")
            failure.text = "\n".join(example(change)) if change["trace"] else change["line"]
    return root


def annotated(report: dict[str, Any]) -> list[str]:
    """Workflow commands: the verdict, then what makes it."""
    level = "notice" if report["passes"] else "error"
    lines = [github.line(level, "DFlash hand-over", headline(report))]
    lines += github.of_deviations(report["deviations"])
    lines += [github.line("warning", "DFlash hand-over", note) for note in report["notes"]]
    for kind, title in _KINDS.items():
        open_ = [change["line"] for change in _open(report) if change["kind"] == kind]
        if open_:
            text = f"{_count(open_, 'change')} to decide: {'; '.join(open_)}"
            lines.append(github.line("warning", f"DFlash hand-over: {title}", text[:_MOST_TEXT]))
    return github.limited(lines)


def acceptances(report: dict[str, Any]) -> str:
    """A record for the changes to be decided, as TOML; who accepts them fills in where and why."""
    lines = [change["line"] for change in _open(report)]
    if not lines:
        return "# Nothing is left to be decided.\n"
    expires = datetime.date.today() + datetime.timedelta(days=365)
    text = [
        "# Copy into your acceptance file what is meant, and say where and why it was decided.",
        "[[accept]]",
        'link = ""',
        'reason = ""',
        f"expires = {expires}",
        "changes = [",
        *(f"    {json.dumps(line)}," for line in lines),
        "]",
    ]
    return "\n".join(text) + "\n"


# -- the terminal ---------------------------------------------------------------------------------

_STYLES = {PRESERVED: "green", CHANGED: "yellow", DEVIATES: "bold red"}


def show(console: Console, report: dict[str, Any], written: dict[str, Path]) -> None:
    """Everything a person needs after a gate."""
    for deviation in report["deviations"]:
        console.print()
        console.print(f"[bold]{explain.headline(deviation)}[/]", highlight=False, soft_wrap=True)
        file = written.get(files.stem(deviation))
        words_ = ("dflash-conformance", "replay", str(file), "--sglang", deviation["tree"])
        for line in explain.lines(deviation, replay=shlex.join(words_) if file else None):
            _plain(console, line)
    counted = _counted(report)
    for kind, title in _KINDS.items():
        changes = [change for change in counted if change["kind"] == kind]
        if changes:
            console.print()
            console.print(f"[bold]{title}[/]", highlight=False)
        for change in changes:
            mark = "accepted" if change["accepted"] else "changed"
            _plain(console, f"  {mark:<9} {change['line']}")
    console.print()
    for line in _apart(report):
        if line.startswith("- "):
            _plain(console, line[2:].replace("`", ""))
    for note in report["notes"]:
        _plain(console, f"note: {note}")
    for side in (report["base"], report["head"]):
        _plain(
            console,
            f"{side['label']}: {side['totals']['operations']:,} operations, "
            f"{side['totals']['calls']:,} calls into the tree",
        )
    totals, environment_ = report["totals"], report["environment"]
    style = _STYLES[report["verdict"]]
    verdict, _, rest = headline(report).partition(":")
    console.print(
        f"[{style}]{verdict}[/]:{escape(rest)}; {totals['compared_observations']:,} observations "
        f"compared, seed {report['seed']}, torch {environment_['torch']}, "
        f"triton {environment_['triton']}",
        highlight=False,
        soft_wrap=True,
    )


def _plain(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
