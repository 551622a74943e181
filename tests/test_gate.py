"""The gate on real trees: the same, refactored, faulty, and faulty on both sides."""

from __future__ import annotations

import ast
import datetime
import json
import subprocess
import textwrap
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_cli import call, refused
from trees import copy_surface

from conformance import acceptance, faults, waivers, words
from conformance.acceptance import Acceptance
from conformance.errors import UserError
from conformance.gate import CHANGED, DEVIATES, PRESERVED, Comparison, compare
from conformance.pairs import Cell, facets
from conformance.pool import Pool
from conformance.report import gate as page
from conformance.runner import Profile
from conformance.sut.source import NEWEST, Tree, locate
from conformance.sut.surface import DRAFT, RELAY

SMALL = Profile("small", 1_000, 500, 0)
BY_NAME = {fault.name: fault for fault in faults.FAULTS}


def gate(base: Tree, head: Tree, pool: Pool, **options: Any) -> Comparison:
    return compare(base, head, options.pop("profile", SMALL), pool, **options)


def lines_of(comparison: Comparison) -> list[str]:
    return [change.line for change in comparison.changes if change.counts]


def as_document(comparison: Comparison) -> dict[str, Any]:
    return page.document(comparison, profile="small", seed=0, wild=False)


def names_of(deviations: list[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(d["clause"], d["anomaly"]) for d in deviations}


# -- the same tree ---------------------------------------------------------------------------------


def test_an_unchanged_tree_is_preserved_and_both_sides_really_ran(newest: Tree, pool: Pool) -> None:
    comparison = gate(newest, newest, pool)
    assert comparison.verdict == PRESERVED
    assert comparison.passes
    assert comparison.changes == []
    assert comparison.base.operations == comparison.head.operations >= 1_500
    assert comparison.base.calls == comparison.head.calls > 4_000
    assert comparison.observations > 30_000
    same = {agreement.thing: agreement for agreement in comparison.agreements}
    assert "resolve" in same["tokens"].calls
    assert same["tokens"].observations > 1_000


def test_gaps_of_wild_uses_are_known_on_both(newest: Tree, pool: Pool) -> None:
    comparison = gate(newest, newest, pool, wild=True, profile=Profile("small", 400, 0, 0))
    assert comparison.verdict == PRESERVED
    assert {d["mode"] for d in comparison.known} == {"wild"}
    assert comparison.head.deviations == []


# -- releases --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folded(pool: Pool) -> Comparison:
    """The change that this project exists for: one token channel instead of two."""
    return gate(locate("0.5.14"), locate("0.5.15"), pool)


def test_the_story_of_the_folded_channel(folded: Comparison) -> None:
    assert folded.verdict == CHANGED
    assert not folded.passes
    lines = lines_of(folded)
    assert "draft input: field verified_id renamed to bonus_tokens" in lines
    assert "relay: field verified_id_buf removed" in lines
    assert "bonus tokens widen from int32[n] to int64[n]" in lines
    assert "no longer: a batch whose shape did not change skips the relay" in lines
    # The values that the next step gets are the same, whatever their type.
    same = {agreement.thing: agreement.calls for agreement in folded.agreements}
    assert {"resolve", "filter", "merge"} <= set(same["tokens"])
    assert {"resolve", "publish"} <= set(same["lengths"]) | set(same["relay_lengths"])


def test_every_change_that_traces_show_has_a_small_one(folded: Comparison) -> None:
    shown = [change for change in folded.changes if change.kind in ("form", "value", "presence")]
    assert len(shown) > 5
    for change in shown:
        assert change.trace is not None
        assert 1 <= len(change.trace["operations"]) <= 8
        assert change.before != change.after


def test_the_page_and_its_companions(folded: Comparison, tmp_path: Path) -> None:
    report = as_document(folded)
    page.write(tmp_path, report)
    text = (tmp_path / "summary.md").read_text()
    assert len(text) < page.MOST_CHARACTERS
    for part in (
        CHANGED,
        "How to read this",
        "## Changes to decide",
        "## The same on both",
        "## What ran",
        "seed 0",
    ):
        assert part in text
    notes = (tmp_path / "annotations.txt").read_text().splitlines()
    assert 1 < len(notes) <= 10
    assert notes[0].startswith("::error title=")
    assert sum("to decide: " in note for note in notes) >= 4, "one line a kind, not one a change"
    root = ET.parse(tmp_path / "junit.xml").getroot()
    (changes,) = [s for s in root.iter("testsuite") if s.get("name") == "changes from 0.5.14"]
    assert int(changes.get("failures", "0")) == len(lines_of(folded))
    traces = sorted((tmp_path / "changes").glob("*.json"))
    assert len(traces) == sum(change.trace is not None for change in folded.changes)
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == CHANGED
    # What is to be decided is handed out as a record; without a reason it accepts nothing.
    with pytest.raises(UserError, match="'link' is missing"):
        acceptance.load(tmp_path / "accept.toml")


def test_accepted_changes_pass_and_expired_ones_do_not(
    folded: Comparison, tmp_path: Path, pool: Pool
) -> None:
    page.write(tmp_path, as_document(folded))
    path = tmp_path / "accept.toml"
    filled = path.read_text().replace('""', '"decided"')
    path.write_text(filled)
    trees = locate("0.5.14"), locate("0.5.15")
    accepted = gate(*trees, pool, acceptances=acceptance.load(path))
    assert accepted.verdict == CHANGED
    assert accepted.passes
    assert accepted.notes == []
    assert "decided" in page.summary(as_document(accepted))

    (record,) = acceptance.load(path, today=datetime.date(2999, 1, 1))
    assert record.expired
    unneeded = replace(record, changes=("no such change",), expired=False)
    expired = gate(*trees, pool, acceptances=[record, unneeded])
    assert not expired.passes
    assert sum("expired on" in note for note in expired.notes) == len(lines_of(folded))
    assert "the acceptance of 'no such change' is not needed" in expired.notes[-1]


# -- refactorings ----------------------------------------------------------------------------------


def in_class(
    name: str, change: Callable[[ast.ClassDef], None]
) -> Callable[[ast.Module], ast.Module]:
    """An edit of one class of a module."""

    def edit(tree: ast.Module) -> ast.Module:
        (found,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name]
        change(found)
        return tree

    return edit


def aliased(old: str, new: str) -> Callable[[ast.ClassDef], None]:
    """Rename a dataclass field and keep its old name as a property."""

    def change(found: ast.ClassDef) -> None:
        for node in found.body:
            if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == old:
                node.target = ast.Name(new, ast.Store())
        alias = f"{old} = property(lambda s: s.{new}, lambda s, v: setattr(s, {new!r}, v))"
        found.body += ast.parse(alias).body

    return change


def extracted(method: str, helper: str) -> Callable[[ast.ClassDef], None]:
    """Move a method's body to a helper that the method calls."""

    def change(found: ast.ClassDef) -> None:
        (body,) = [n for n in found.body if getattr(n, "name", "") == method]
        assert isinstance(body, ast.FunctionDef)
        names = [argument.arg for argument in body.args.args[1:]]
        moved = ast.FunctionDef(helper, body.args, body.body, [], None, lineno=body.lineno)
        call = f"return self.{helper}({', '.join(names)})"
        body.body = ast.parse(f"def f():\n    {call}").body[0].body  # type: ignore[attr-defined]
        found.body.append(moved)

    return change


def keyword_renamed(function: str, old: str, new: str) -> Callable[[ast.Module], ast.Module]:
    """Rename a keyword argument wherever a function is called."""

    def edit(tree: ast.Module) -> ast.Module:
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and function in ast.unparse(node.func):
                for keyword in node.keywords:
                    if keyword.arg == old:
                        keyword.arg = new
        return tree

    return edit


DRAFT_INPUT = "DFlashDraftInputV2"
BUILDER = "sglang.srt.speculative.draft_worker_common"


def test_an_extracted_helper_preserves_behaviour(newest: Tree, pool: Pool, tmp_path: Path) -> None:
    edits = {
        RELAY: in_class("FutureMap", extracted("stash", "_stash_rows")),
        DRAFT: in_class(DRAFT_INPUT, extracted("merge_batch", "merge_rows")),
    }
    head = copy_surface(newest, tmp_path / "head", edits)
    comparison = gate(newest, head, pool)
    assert comparison.verdict == PRESERVED
    assert lines_of(comparison) == []
    (added,) = comparison.changes
    assert added.compatible
    assert added.line == f"new: {DRAFT_INPUT}.merge_rows(spec_info)"


def test_fields_renamed_through_an_alias_are_told_as_such(
    newest: Tree, pool: Pool, tmp_path: Path
) -> None:
    def both(found: ast.ClassDef) -> None:
        aliased("nxt_kv_lens_cpu", "next_kv_lens_cpu")(found)
        aliased("bonus_tokens", "bonus_ids")(found)

    def draft(tree: ast.Module) -> ast.Module:
        return keyword_renamed("cls", "bonus_tokens", "bonus_ids")(
            in_class(DRAFT_INPUT, both)(tree)
        )

    edits = {DRAFT: draft, BUILDER: keyword_renamed(DRAFT_INPUT, "bonus_tokens", "bonus_ids")}
    head = copy_surface(newest, tmp_path / "head", edits)
    comparison = gate(newest, head, pool)
    assert comparison.head.deviations == []
    assert comparison.verdict == CHANGED
    assert lines_of(comparison) == [
        "draft input: field bonus_tokens renamed to bonus_ids",
        "draft input: field nxt_kv_lens_cpu renamed to next_kv_lens_cpu",
    ]


def test_a_field_that_is_new_and_undeclared_is_no_renaming(
    newest: Tree, pool: Pool, tmp_path: Path
) -> None:
    def marked(found: ast.ClassDef) -> None:
        found.body += ast.parse("marks: int = 0").body

    head = copy_surface(newest, tmp_path / "head", {DRAFT: in_class(DRAFT_INPUT, marked)})
    comparison = gate(newest, head, pool)
    assert comparison.verdict == DEVIATES
    assert names_of(comparison.head.deviations) == {("F7", "undeclared")}
    assert lines_of(comparison) == ["draft input: new field marks"]


def appended(text: str) -> Callable[[ast.Module], ast.Module]:
    """Add statements at the end of a module."""

    def edit(tree: ast.Module) -> ast.Module:
        tree.body += ast.parse(textwrap.dedent(text)).body
        return tree

    return edit


def test_private_attributes_do_not_count(newest: Tree, pool: Pool, tmp_path: Path) -> None:
    private = appended("""
    def _counted(self, *args, before=FutureMap.publish):
        self._stats = 1
        before(self, *args)
    _counted.__wrapped__ = FutureMap.publish
    FutureMap.publish = _counted
    """)
    head = copy_surface(newest, tmp_path / "head", {RELAY: private})
    comparison = gate(newest, head, pool)
    assert comparison.verdict == PRESERVED
    assert [change.line for change in comparison.changes] == ["relay: new field _stats"]


def test_a_dropped_assertion_is_a_change_and_a_renamed_flag_is_none(
    newest: Tree, pool: Pool, tmp_path: Path
) -> None:
    def renamed(tree: ast.Module) -> ast.Module:
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr == "_publish_fresh":
                node.attr = "_is_fresh"
        return tree

    class Drop(ast.NodeTransformer):
        def visit_Assert(self, node: ast.Assert) -> ast.AST:
            return ast.Pass() if "_publish_fresh" in ast.unparse(node.test) else node

    head = copy_surface(newest, tmp_path / "renamed", {RELAY: renamed})
    assert gate(newest, head, pool).verdict == PRESERVED
    head = copy_surface(newest, tmp_path / "dropped", {RELAY: Drop().visit})
    assert lines_of(gate(newest, head, pool)) == ["no longer: debug: a publish is consumed once"]


def test_a_tree_that_is_not_steady_is_told_as_such_even_beside_itself(
    newest: Tree, pool: Pool, tmp_path: Path
) -> None:
    clock = appended("""
    def _timed(self, batch, before=DFlashDraftInputV2.prepare_for_decode):
        import time
        before(self, batch)
        batch.launch_ts = time.monotonic()
    _timed.__wrapped__ = DFlashDraftInputV2.prepare_for_decode
    DFlashDraftInputV2.prepare_for_decode = _timed
    """)
    tree = copy_surface(newest, tmp_path / "tree", {DRAFT: clock})
    comparison = gate(tree, tree, pool)
    (change,) = comparison.changes
    assert change.thing == "batch.launch_ts"


def test_two_exceptions_are_two_changes_of_their_own(
    newest: Tree, pool: Pool, tmp_path: Path
) -> None:
    wild = appended("""
    def _refusing(self, other, before=DFlashDraftInputV2.merge_batch):
        if (self.future_indices is None) != (other.future_indices is None):
            raise KeyError("mixed")
        before(self, other)
    _refusing.__wrapped__ = DFlashDraftInputV2.merge_batch
    DFlashDraftInputV2.merge_batch = _refusing
    """)
    head = copy_surface(newest, tmp_path / "head", {DRAFT: wild})
    # Large enough to meet each of the wild uses.
    comparison = gate(newest, head, pool, wild=True, profile=Profile("wild", 3_000, 0, 0))
    lines = {change.line for change in comparison.changes}
    assert "wild-stored-with-relayed: no exception -> raises KeyError" in lines
    assert any(line.startswith("wild-relayed-with-stored: raises") for line in lines)
    assert not any(change.counts for change in comparison.changes)


# -- faults ----------------------------------------------------------------------------------------


def fault_profile(fault: faults.Fault, operations: int) -> Profile:
    """A budget in the mode in which the fault shows."""
    return Profile(fault.name, 0 if fault.debug else operations, operations * fault.debug, 0)


def assert_deviates(fault: faults.Fault, pool: Pool, operations: int) -> None:
    tree = locate(fault.release)
    profile = fault_profile(fault, operations)
    comparison = gate(tree, tree, pool, fault=fault.name, profile=profile)
    assert comparison.verdict == DEVIATES
    assert not comparison.passes
    names = names_of(comparison.head.deviations)
    assert names & {fault.expect, *fault.also}, names
    assert comparison.known == comparison.fixed == []
    text = page.summary(as_document(comparison))
    assert f"## Deviations that the base does not have\n\n### {min(names)[0]}" in text


SAMPLE = ("merge-order-relayed", "relay-undeclared", "poison-missing", "merge-int32")


@pytest.mark.parametrize("name", SAMPLE)
def test_a_fault_as_head_deviates(name: str, pool: Pool) -> None:
    assert_deviates(BY_NAME[name], pool, 600)


@pytest.mark.sweep
@pytest.mark.parametrize("name", BY_NAME)
def test_every_fault_as_head_deviates(name: str, pool: Pool) -> None:
    assert_deviates(BY_NAME[name], pool, 1_500)


KERNELS = Profile("kernels", 300, 0, 0, kernels=True)


def test_kernels_are_checked_on_the_head_where_their_source_differs(pool: Pool) -> None:
    """0.5.22 mended the selector's walk, which a waiver covers on the releases before."""
    trees, waived = (locate("0.5.21"), locate("0.5.22")), waivers.load()
    mended = gate(*trees, pool, profile=KERNELS, waivers=waived)
    assert ("B6", "wrong-value") in names_of(mended.fixed)
    (kernel,) = [change for change in mended.changes if change.line.startswith("kernel ")]
    assert kernel.compatible
    assert "selector" in kernel.line
    assert mended.head.programs


def test_a_kernel_fault_as_head_deviates(pool: Pool) -> None:
    (fault, *_) = faults.KERNEL_FAULTS
    tree = locate(fault.release)
    comparison = gate(tree, tree, pool, profile=KERNELS, fault=fault.name)
    assert comparison.verdict == DEVIATES
    assert fault.expect in names_of(comparison.head.deviations)
    assert fault.expect[0] in page.summary(as_document(comparison))


def test_what_the_base_has_too_is_known_and_what_the_head_lacks_is_fixed(
    newest: Tree, pool: Pool, tmp_path: Path
) -> None:
    edits = faults.apply(BY_NAME["merge-order-relayed"].edits)
    faulty = copy_surface(newest, tmp_path / "faulty", edits)
    profile = Profile("small", 600, 0, 0)
    both = gate(faulty, faulty, pool, profile=profile)
    assert both.verdict == PRESERVED
    assert both.passes
    assert ("M1", "wrong-owner") in names_of(both.known)
    mended = gate(faulty, newest, pool, profile=profile)
    assert mended.head.deviations == []
    assert mended.verdict == CHANGED
    assert mended.passes
    assert ("M1", "wrong-owner") in names_of(mended.fixed)
    assert "1 deviation fixed" in page.summary(as_document(mended))


def test_a_second_fault_beside_a_known_one_is_new(newest: Tree, pool: Pool, tmp_path: Path) -> None:
    known, new = BY_NAME["merge-order-relayed"], BY_NAME["filter-reversed"]
    base = copy_surface(newest, tmp_path / "base", faults.apply(known.edits))
    head = copy_surface(newest, tmp_path / "head", faults.apply(known.edits + new.edits))
    comparison = gate(base, head, pool, profile=Profile("small", 1_000, 0, 0))
    assert comparison.verdict == DEVIATES
    assert new.expect in names_of(comparison.head.deviations)
    assert known.expect in names_of(comparison.known)


# -- words and pieces ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (Cell(("int64[n]",), 2, 7), Cell(("int64[n]",), 2, 7), ()),
        (Cell(("int32[n]",), 2, 7), Cell(("int64[n]",), 2, 7), ("form",)),
        (Cell(("int32[n]",), 2, 7), Cell(("int64[n]",), 2, 8), ("form", "value")),
        (Cell(("int64[n]",), 2, 7), Cell(("int64[n]",), 2, 8), ("value",)),
        (Cell(("int64[n]",), 2, 7), Cell(("int64[n]",), 3, 8), ("presence",)),
        (Cell(("int64[n]",), 2, 7), Cell(("None",), 2, 8), ("form",)),
        (Cell(), Cell(("int64[n]",), 3, 8), ("presence",)),
    ],
)
def test_facets(one: Cell, other: Cell, expected: tuple[str, ...]) -> None:
    assert facets("resolve: tokens", one, other) == expected


def test_an_attribute_that_is_none_differs_from_a_missing_one_in_nothing() -> None:
    assert facets("stash: relay.extra", Cell(), Cell(("None",), 1, 2)) == ()
    assert facets("stash: relay.extra", Cell(), Cell(("int64[n]",), 1, 2)) == ("form",)


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        (("int32[n]",), ("int64[n]",), "bonus tokens widen from int32[n] to int64[n]"),
        (("int64[n]",), ("int32[n]",), "bonus tokens narrow from int64[n] to int32[n]"),
        (("int64[n]",), ("float32[n]",), "bonus tokens: int64[n] -> float32[n]"),
        (("int64[n]",), ("int64[n, 1]",), "bonus tokens: int64[n] -> int64[n, 1]"),
        (("None",), ("int64[n]", "None"), "bonus tokens: None -> int64[n] or None"),
        ((), ("int64[n]",), "bonus tokens: now there at filter (int64[n])"),
        (("int64[n]",), (), "bonus tokens: no longer there at filter (int64[n])"),
    ],
)
def test_changes_of_form_in_words(
    before: tuple[str, ...], after: tuple[str, ...], line: str
) -> None:
    assert words.change("tokens", "form", ["merge", "filter"], before, after) == line


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ("int64[n] [1]", "int64[n] [2]", "at merge int64[n] [1] -> int64[n] [2]"),
        ("[a, b]", "[a, c]", "at merge now also c and no longer b"),
        ("[]", "[a]", "at merge now also a"),
        ("[a, b]", "[b, a]", "at merge [a, b] -> [b, a]"),
        ("[0]", "[1]", "at merge [0] -> [1]"),
    ],
)
def test_changes_of_value_in_words(before: str, after: str, line: str) -> None:
    shown = (before, after)
    assert words.change("batch", "value", ["merge"], (), (), shown).endswith(f": {line}")


def test_exceptions_in_words() -> None:
    assert (
        words.change("error", "presence", ["stash"], (), ("raises TypeError",))
        == "stash: no exception -> raises TypeError"
    )


@pytest.mark.parametrize(
    ("before", "after", "fits"),
    [
        ("(a, b=1)", "(a, b=1, c=None)", True),
        ("(a, b)", "(a, b=1)", True),
        ("(a)", "(a, *, c=1)", True),
        ("()", "(c=...)", True),
        ("(a=1)", "(a=2)", False),
        ("(a)", "(a, c)", False),
        ("(a, b)", "(a)", False),
        ("(a)", "(b)", False),
        ("(a=1)", "(a)", False),
        ("(a, b)", "(b, a)", False),
    ],
)
def test_a_call_that_fits(before: str, after: str, fits: bool) -> None:
    assert words.call_fits(before, after) is fits


def test_a_long_page_is_cut(folded: Comparison) -> None:
    report = as_document(folded)
    change = {**report["changes"][-1], "line": "x" * 300, "counts": True}
    report["changes"] = [change] * 500
    assert len(page.summary(report)) <= page.MOST_CHARACTERS
    assert "report.json has the rest" in page.summary(report)
    assert max(map(len, page.annotated(report))) < 1_200
    report["notes"] = ["a note"] * 20
    assert len(page.annotated(report)) == 10


RECORD = """
[[accept]]
changes = ["a line"]
link = "l"
reason = "r"
expires = 2999-01-01
"""


def test_acceptance_files(tmp_path: Path) -> None:
    path = tmp_path / "accept.toml"
    path.write_text(RECORD)
    assert acceptance.load(path) == [
        Acceptance(("a line",), "l", "r", datetime.date(2999, 1, 1), expired=False)
    ]
    for change, reason in (
        (('reason = "r"', ""), "'reason' is missing"),
        (('["a line"]', '"a line"'), "'changes' must be a list"),
        (('["a line"]', "[]"), "'changes' must be a list"),
        (("2999-01-01", '"soon"'), "'expires' must be a date"),
        (('link = "l"', 'link = "l"\ncolour = 3'), "'colour' is not known"),
        (("[[accept]]", "[[acept]]"), "[[accept]] tables and nothing else"),
        (("[[accept]]", "[[accept"), "not TOML"),
    ):
        path.write_text(RECORD.replace(*change))
        with pytest.raises(UserError, match="acceptance file") as error:
            acceptance.load(path)
        assert reason in str(error.value)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="No such file"):
        acceptance.load(tmp_path / "none.toml")


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository whose only commit holds no SGLang."""
    folder = tmp_path_factory.mktemp("repository")
    (folder / "README").write_text("nothing here")
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    for arguments in (("init", "-q", "-b", "main"), ("add", "."), ("commit", "-qm", "first")):
        subprocess.run(["git", *identity, *arguments], cwd=folder, check=True)
    return folder


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--repo", "{repository}", "--base", "nowhere", "--head", "main"), "no commit 'nowhere'"),
        (("--repo", "{repository}", "--base", "main", "--head", "main"), "holds no SGLang"),
        (("--base", NEWEST, "--head", "9.9.9"), "9.9.9"),
        (("--base", NEWEST, "--head", NEWEST, "--accept", "none.toml"), "none.toml"),
        (("--base", NEWEST, "--head", NEWEST, "--waivers", "none.toml"), "none.toml"),
    ],
)
def test_bad_requests_are_refused_in_one_line(
    arguments: tuple[str, ...], reason: str, repository: Path
) -> None:
    given = [argument.format(repository=repository) for argument in arguments]
    refused(call("gate", *given), reason)


def test_a_gate_needs_two_trees() -> None:
    done = call("gate", "--base", NEWEST)
    assert done.returncode == 2
    assert "--head" in done.stderr
