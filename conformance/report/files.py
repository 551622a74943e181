"""Write a report folder: report.json, junit.xml, summary.md, annotations.txt, a file per failure.

Each file appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import shlex
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conformance.errors import UserError
from conformance.report import explain, github
from conformance.sut import lines


def open_folder(path: Path) -> Path:
    """Make sure the folder can be written before any work is done.

    Raises:
        UserError: it cannot.
    """
    try:
        failures, changes = path / "failures", path / "changes"
        failures.mkdir(parents=True, exist_ok=True)
        for folder in (path, failures, *([changes] if os.path.lexists(changes) else [])):
            with tempfile.TemporaryFile(dir=folder):
                pass
    except OSError as error:
        raise UserError(
            f"report folder {path}: {error.strerror}; give --report a folder that can be written"
        ) from None
    return path


def write(folder: Path, report: dict[str, Any]) -> dict[str, Path]:
    """Write the folder of a run or matrix; see :func:`write_texts`."""
    verdict = "notice" if report["verdict"] == "conforms" else "error"
    first = github.line(verdict, "dflash-conformance", f"{report['tree']} {report['verdict']}")
    notes = github.limited([first, *github.of_deviations(report["deviations"])])
    texts = {
        "junit.xml": xml(suites(report["trees"])),
        "summary.md": summary(report),
        "annotations.txt": "\n".join(notes) + "\n",
    }
    return write_texts(folder, report, texts)


def write_texts(
    folder: Path,
    report: dict[str, Any],
    texts: dict[str, str],
    traces: dict[str, dict[str, Any]] | None = None,
) -> dict[str, Path]:
    """Write report.json, `texts` by file name, and one replayable file per deviation.

    Args:
        traces: further traces by file name below ``changes/``.

    Returns:
        The failure file of every deviation by its stem.

    Raises:
        UserError: the folder cannot be written any more.
    """
    try:
        open_folder(folder)
        files = {}
        for stale in [*folder.glob("failures/*.json"), *folder.glob("changes/*.json")]:
            stale.unlink(missing_ok=True)
        for deviation in report["deviations"]:
            path = folder / "failures" / f"{stem(deviation)}.json"
            _write(path, _json({"schema": report["schema"], "seed": report["seed"], **deviation}))
            files[stem(deviation)] = path
        for name, trace in (traces or {}).items():
            (folder / "changes").mkdir(exist_ok=True)
            _write(folder / "changes" / f"{name}.json", _json(trace))
        _write(folder / "report.json", _json(report))
        for name, text in texts.items():
            _write(folder / name, text)
        return files
    except OSError as error:
        raise UserError(f"report folder {folder}: {error.strerror}") from None


def stem(deviation: dict[str, Any]) -> str:
    """File name of a failure, without its ending."""
    tree = "".join(c if c.isalnum() or c in ".-" else "-" for c in deviation["tree"]).strip("-.")
    name = f"{tree}-{deviation['clause']}-{deviation['anomaly']}"
    if deviation["waiver"] is not None:
        return f"{name}-{deviation['waiver']}"
    return name if deviation["mode"] == "legal" else f"{name}-wild"


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _json(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=2) + "\n"


def suites(trees: Sequence[dict[str, Any]]) -> ET.Element:
    """JUnit: one test suite per tree, one case per clause."""
    root = ET.Element("testsuites", name="dflash-conformance")
    for tree in trees:
        by_clause: dict[str, list[dict[str, Any]]] = {}
        for deviation in tree["deviations"]:
            by_clause.setdefault(deviation["clause"], []).append(
                {**deviation, "tree": tree["label"]}
            )
        suite = ET.SubElement(root, "testsuite", name=f"sglang {tree['label']}")
        counts = {"tests": 0, "failures": 0, "skipped": 0, "errors": 0}
        for clause in tree["clauses"]:
            counts["tests"] += 1
            case = ET.SubElement(
                suite,
                "testcase",
                classname=f"conformance.{tree['label']}",
                name=f"{clause['clause']} {clause['statement']}",
            )
            found = by_clause.get(clause["clause"], [])
            open_ = [d for d in found if d["mode"] == "legal" and d["waiver"] is None]
            if open_:
                counts["failures"] += 1
                failure = ET.SubElement(case, "failure", message=explain.headline(open_[0]))
                failure.text = "\n".join("\n".join(explain.lines(d)) for d in open_)
            elif clause["checked"] is None or not clause["checked"]:
                counts["skipped"] += 1
                ET.SubElement(case, "skipped", message="the tree has nothing it applies to")
            if len(found) > len(open_):
                out = ET.SubElement(case, "system-out")
                out.text = "\n".join(explain.headline(d) for d in found if d not in open_)
        if tree["refusal"]:
            counts["tests"] += 1
            counts["errors"] += 1
            case = ET.SubElement(
                suite, "testcase", classname=f"conformance.{tree['label']}", name="entry points"
            )
            ET.SubElement(case, "error", message=tree["refusal"])
        for key, value in counts.items():
            suite.set(key, str(value))
    return root


def xml(root: ET.Element) -> str:
    """An XML file's text."""
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def uncovered_lines(tree: dict[str, Any]) -> list[str]:
    """Lines of the surface that no operation executed, by function, and what stood in."""
    text = []
    for module, functions in tree["unexecuted_lines"].items():
        text.append(f"Never executed in {module} (in a traced sample):")
        text += [f"- {name}: {lines.spans(numbers)}" for name, numbers in functions.items()]
    surface = tree["surface"]
    if surface:
        text += [
            "",
            f"Loaded: {len(surface['real'])} real modules, {len(surface['doubles'])} doubles, "
            f"{len(surface['inert'])} inert stand-ins (report.json lists them).",
        ]
    return text


def summary(report: dict[str, Any]) -> str:
    """The report as Markdown: verdict, trees, deviations with traces, what was not covered."""
    totals = report["totals"]
    text = [
        f"# dflash-conformance: {report['tree']} {report['verdict']}",
        "",
        f"{totals['operations']:,} operations, {totals['calls']:,} calls into the tree, "
        f"profile {report['profile']}, seed {report['seed']}"
        f"{', wild uses included' if report['wild'] else ''}; "
        f"torch {report['environment']['torch']}, triton {report['environment']['triton']}.",
        "",
        "| tree | verdict | operations | deviations | waived | contract gaps |",
        "|---|---|---|---|---|---|",
    ]
    for tree in report["trees"]:
        legal = [d for d in tree["deviations"] if d["mode"] == "legal"]
        waived = sum(d["waiver"] is not None for d in legal)
        gaps = len(tree["deviations"]) - len(legal)
        text.append(
            f"| {tree['label']} | {tree['refusal'] or tree['verdict']} "
            f"| {tree['totals']['operations']:,} | {len(legal) - waived} | {waived} | {gaps} |"
        )
    for deviation in report["deviations"]:
        text += [
            "",
            f"## {deviation['tree']}: {explain.headline(deviation)}",
            "",
            "```",
            *explain.lines(
                deviation,
                replay=f"dflash-conformance replay failures/{stem(deviation)}.json "
                f"--sglang {shlex.quote(deviation['tree'])}",
            ),
            "```",
        ]
    if len(report["trees"]) == 1 and report["trees"][0]["exhaustive"]:
        bounds = explain.exhaustive(report["trees"][0])
        text += ["", "## Tried exhaustively", "", *(f"- {line}" for line in bounds)]
    text += ["", "## Not covered", "", *(f"- {line}" for line in report["not_covered"]), ""]
    for tree in report["trees"]:
        for note in tree["surface"].get("notes", []):
            text.append(f"- {tree['label']}: {note}")
    if len(report["trees"]) == 1:
        text += ["", *uncovered_lines(report["trees"][0])]
    return "\n".join(text) + "\n"
