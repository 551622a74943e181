"""Seeded faults: one small bug each, and what the suite must report for it.

A detector that nothing ever sets off proves nothing. Every :class:`Fault` edits the syntax tree of
one release while it loads and names the clause and the anomaly that the engine must then report
first; without the edit the same run must stay silent.

An :class:`Edit` points at code by module, function, node class and ordinal, never by source text.
What it puts there is a *template*: Python with holes, ``{0}`` for the node that was there and
``{1}``, ``{2}``, ... for the expressions directly below it. So ``"{0} + 1"`` is off by one,
``"[{2}, {1}]"`` swaps a pair, ``"pass"`` drops a statement and ``"if ready:\\n    {0}"`` guards it.
This module needs neither torch nor SGLang.
"""

from __future__ import annotations

import ast
import copy
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from conformance.sut.isolation import Edit as Transformation

# -- edits ----------------------------------------------------------------------------------------

_HOLE = re.compile(r"\{(\d+)\}")
_FILLING = re.compile(r"__hole_(\d+)__")


class InapplicableEdit(ValueError):
    """An edit points at a node that the tree does not have; the message says which."""


@dataclass(frozen=True)
class Edit:
    """One node of a tree, and what replaces it.

    Attributes:
        module: import name.
        function: qualified name in the module, for example ``FutureMap.stash``.
        kind: name of an :mod:`ast` class, ``stmt`` and ``expr`` included.
        ordinal: which of the function's nodes of that kind, in source order, from 0.
        template: what stands there instead; an expression for an expression, else statements.
    """

    module: str
    function: str
    kind: str
    ordinal: int
    template: str

    def __str__(self) -> str:
        return f"{self.module}:{self.function} {self.kind} {self.ordinal}"

    def find(self, tree: ast.Module) -> ast.expr | ast.stmt:
        """The node in `tree` that the edit replaces.

        Raises:
            InapplicableEdit: there is no such function, or it has too few nodes of the kind.
        """
        nodes = [n for n in body_nodes(self._function(tree)) if isinstance(n, self._class())]
        if not 0 <= self.ordinal < len(nodes):
            raise InapplicableEdit(
                f"{self.module}:{self.function} has {len(nodes)} nodes of kind {self.kind}, "
                f"so there is no number {self.ordinal} (counted from 0)"
            )
        return nodes[self.ordinal]

    def replacement(self, node: ast.expr | ast.stmt) -> ast.expr | list[ast.stmt]:
        """The filled template, in the place of `node`."""
        parts = [node, *(n for n in ast.iter_child_nodes(node) if isinstance(n, ast.expr))]
        text = _HOLE.sub(r"__hole_\1__", textwrap.dedent(self.template).strip())
        try:
            template = ast.parse(text, mode="eval" if isinstance(node, ast.expr) else "exec")
        except SyntaxError as error:
            raise InapplicableEdit(f"{self}: its template is no code: {error}") from error
        for new in ast.walk(template):
            if isinstance(new, ast.expr | ast.stmt):
                ast.copy_location(new, node)
        filled = _Fill(parts, self).visit(template)
        if isinstance(node, ast.expr):
            result: ast.expr = filled.body
            _set_context(result, getattr(node, "ctx", ast.Load()))
            return result
        statements: list[ast.stmt] = filled.body
        return statements

    def _function(self, tree: ast.Module) -> ast.FunctionDef | ast.AsyncFunctionDef:
        scope: ast.AST = tree
        for name in self.function.split("."):
            named = [n for n in getattr(scope, "body", []) if getattr(n, "name", None) == name]
            if not named:
                raise InapplicableEdit(f"{self.module} has no function {self.function}")
            scope = named[-1]
        if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            raise InapplicableEdit(f"{self.module}:{self.function} is not a function")
        return scope

    def _class(self) -> type[ast.expr] | type[ast.stmt]:
        found = getattr(ast, self.kind, None)
        if not (isinstance(found, type) and issubclass(found, ast.expr | ast.stmt)):
            raise InapplicableEdit(f"{self}: {self.kind} is no kind of statement or expression")
        return found


def body_nodes(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.expr | ast.stmt]:
    """Statements and expressions of a function's body in source order, outer before inner."""

    def below(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
        if isinstance(node, ast.expr | ast.stmt):
            yield node
        for child in ast.iter_child_nodes(node):
            yield from below(child)

    nodes = [node for statement in function.body for node in below(statement)]
    return sorted(nodes, key=lambda node: (node.lineno, node.col_offset))


class _Fill(ast.NodeTransformer):
    """Puts the parts of the original node into a template's holes."""

    def __init__(self, parts: list[ast.expr | ast.stmt], edit: Edit) -> None:
        self.parts, self.edit = parts, edit

    def visit_Name(self, node: ast.Name) -> ast.AST:
        hole = _FILLING.fullmatch(node.id)
        if hole is None:
            return node
        number = int(hole[1])
        if number >= len(self.parts):
            raise InapplicableEdit(
                f"{self.edit}: its template asks for part {number} of {len(self.parts) - 1}"
            )
        part = copy.deepcopy(self.parts[number])
        _set_context(part, node.ctx)
        return part

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        filled = self.generic_visit(node)
        # A hole that stands alone on its line takes a statement.
        value: ast.AST = node.value
        return value if isinstance(value, ast.stmt) else filled


def _set_context(node: ast.AST, context: ast.expr_context) -> None:
    """Make an expression the target or the source of an assignment, as its new place asks."""
    if hasattr(node, "ctx"):
        node.ctx = context
        if isinstance(node, ast.Tuple | ast.List):
            for element in node.elts:
                _set_context(element, context)


class _Rewrite(ast.NodeTransformer):
    """Replaces the chosen nodes, innermost first."""

    def __init__(self, chosen: dict[int, Edit]) -> None:
        self.chosen = chosen

    def visit(self, node: ast.AST) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        edit = self.chosen.pop(id(node), None)
        if edit is None:
            return node
        assert isinstance(node, ast.expr | ast.stmt)
        return edit.replacement(node)


def apply(edits: Iterable[Edit]) -> Mapping[str, Transformation]:
    """The edits as syntax-tree transformations by module, for ``open_tree(edits=...)``.

    All ordinals are of the unedited tree. A transformation applies each of its edits exactly once
    or raises :class:`InapplicableEdit`.
    """
    by_module: dict[str, list[Edit]] = defaultdict(list)
    for edit in edits:
        by_module[edit.module].append(edit)

    def transformation(mine: list[Edit]) -> Transformation:
        def transform(tree: ast.Module) -> ast.Module:
            chosen: dict[int, Edit] = {}
            for edit in mine:
                other = chosen.setdefault(id(edit.find(tree)), edit)
                if other is not edit:
                    raise InapplicableEdit(f"{edit} and {other} replace the same node")
            edited = _Rewrite(chosen).visit(tree)
            assert isinstance(edited, ast.Module)
            assert not chosen
            return edited

        return transform

    return {module: transformation(mine) for module, mine in by_module.items()}


def before(template: str) -> str:
    """Template that runs statements before the statement that is there."""
    return textwrap.dedent(template).strip() + "\n{0}"


def after(template: str) -> str:
    """Template that runs statements after the statement that is there."""
    return "{0}\n" + textwrap.dedent(template).strip()


DROP = "pass"
"""Template that leaves a statement out."""

SWAP = "[{2}, {1}]"
"""Template that exchanges a list's two elements."""


# -- the registry ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """One seeded bug.

    Attributes:
        name: unique, for people and test ids.
        summary: the bug as a maintainer would describe it.
        edits: what makes a correct tree have it.
        expect: (clause, anomaly) that the engine must report.
        also: names that are as right, where an operation that meets the bug first has another.
        release: the tree that the edits are written for.
        debug: whether it shows under the tree's debug assertions only.
        kernel: the kernel that it is in, or "" for the hand-over.
        mends: the tree has the contract gap `expect`, and the edits close it.
    """

    name: str
    summary: str
    edits: tuple[Edit, ...]
    expect: tuple[str, str]
    release: str = "0.5.23"
    debug: bool = False
    also: tuple[tuple[str, str], ...] = ()
    kernel: str = ""
    mends: bool = False


_SRT = "sglang.srt"


@dataclass(frozen=True)
class At:
    """A function that faults are put into: ``at(kind, ordinal, template)`` is an edit of it."""

    module: str
    function: str

    def __call__(self, kind: str, ordinal: int, template: str) -> Edit:
        return Edit(f"{_SRT}.{self.module}", self.function, kind, ordinal, template)


_RELAY = "managers.overlap_utils"
_BATCH = "managers.schedule_batch"
_DRAFT = "speculative.dflash_info_v2"

_relay_init = At(_RELAY, "FutureMap.__init__")
_publish = At(_RELAY, "FutureMap.publish")
_stash = At(_RELAY, "FutureMap.stash")
_lengths = At(_RELAY, "FutureMap.resolve_seq_lens_cpu")
_tokens = At(_RELAY, "FutureMap._resolve_spec_extras")
_inputs = At(_RELAY, "resolve_forward_inputs")
_payload = At(_RELAY, "RelayPayload.from_draft_input")
_poison = At(_RELAY, "_assert_nonneg_and_invalidate")
_filter = At(_DRAFT, "DFlashDraftInputV2.filter_batch")
_merge = At(_DRAFT, "DFlashDraftInputV2.merge_batch")
_idle = At(_DRAFT, "DFlashDraftInputV2.create_idle_input")
_prepare = At(_DRAFT, "DFlashDraftInputV2.prepare_for_decode")
_draft_init = At(_DRAFT, "DFlashDraftInputV2.__post_init__")
_batch_filter = At(_BATCH, "ScheduleBatch.filter_batch")
_batch_merge = At(_BATCH, "ScheduleBatch.merge_batch")
_build = At("speculative.draft_worker_common", "make_draft_input_v2")
_isolation = At("managers.scheduler", "Scheduler._forward_isolation")
_mix = At(_BATCH, "ScheduleBatch.mix_with_running")
_tails = At(_RELAY, "FutureMap.resolve_mixed_spec_tails")
_stash_bonus = At(_RELAY, "FutureMap.stash_bonus_tokens")
_copy = At(_BATCH, "ScheduleBatch.copy")
_seed = At("speculative.dflash_disaggregation", "build_dflash_disagg_draft_input")
_prebuilt = At(
    "disaggregation.decode_schedule_batch_mixin",
    "ScheduleBatchDisaggregationDecodeMixin.process_prebuilt",
)
_decode_server = At(
    "disaggregation.decode", "SchedulerDisaggregationDecodeMixin._get_new_prebuilt_batch"
)

# Where a fault needs memory between calls, it keeps it in a declared attribute that DFlash leaves
# alone (another algorithm's buffer), so that the census does not report the memory instead.

FAULTS: tuple[Fault, ...] = (
    # Publish and stash.
    Fault(
        "stash-off-by-one",
        "The bonus tokens go to the rows below the batch's.",
        (_stash("Subscript", 3, "{1}[{2} - 1]"),),
        ("P1", "lost-update"),
    ),
    Fault(
        "stash-reversed",
        "The bonus tokens are written in reverse row order.",
        (_stash("Call", 4, "{0}.flip(0)"),),
        ("P1", "wrong-owner"),
    ),
    Fault(
        "publish-reversed",
        "The lengths are published in reverse row order.",
        (_publish("Call", 0, "{0}.flip(0)"),),
        ("P1", "wrong-owner"),
    ),
    Fault(
        "publish-skips-last",
        "The last row's length is not published when the batch has more than one row.",
        (
            _publish(
                "Assign",
                3,
                """
                kept = self.new_seq_lens_buf[indices[1:]][-1:].clone()
                {0}
                self.new_seq_lens_buf[indices[1:][-1:]] = kept
                """,
            ),
        ),
        ("P1", "lost-update"),
    ),
    Fault(
        "publish-pads",
        "Publishing also writes the padding row.",
        (_publish("Assign", 3, after("self.new_seq_lens_buf[0] = new_seq_lens[0]")),),
        ("P7", "phantom-row"),
    ),
    Fault(
        "publish-neighbour",
        "Publishing also writes the row above the batch's highest slot.",
        (
            _publish(
                "Assign",
                3,
                after("self.new_seq_lens_buf[int(indices.max()) + 1 :][:1] = new_seq_lens[0]"),
            ),
        ),
        ("P2", "phantom-row"),
    ),
    Fault(
        "publish-clears-tokens",
        "Publishing a length invalidates the bonus token of the padding row.",
        (_publish("Assign", 3, after("self.output_tokens_buf[0] = 0")),),
        ("P7", "phantom-row"),
    ),
    Fault(
        "stash-keeps-unread",
        "A stash does not replace a bonus token that was never consumed.",
        (
            _stash(
                "Assign",
                5,
                """
                waiting = self.output_tokens_buf[indices]
                {0}
                self.output_tokens_buf[indices] = torch.where(
                    waiting < 0, self.output_tokens_buf[indices], waiting
                )
                """,
            ),
        ),
        ("P3", "lost-update"),
        debug=True,
    ),
    Fault(
        "stash-int32",
        "The bonus tokens pass through int32.",
        (_stash("Call", 4, "{0}.to(torch.int32).to(torch.int64)"),),
        ("P4", "wrong-type"),
    ),
    Fault(
        "stash-float32",
        "The bonus tokens pass through float32.",
        (_stash("Call", 4, "{0}.to(torch.float32).to(torch.int64)"),),
        ("P4", "wrong-type"),
    ),
    Fault(
        "publish-adopts-source",
        "The relay takes the worker's output buffer for its own instead of copying from it.",
        (
            _publish(
                "Assign",
                3,
                after(
                    """
                    storage = new_seq_lens.untyped_storage()
                    if storage.nbytes() >= 8 * self.new_seq_lens_buf.shape[0]:
                        held = self.new_seq_lens_buf.clone()
                        self.new_seq_lens_buf = held.new_empty(0).set_(storage, 0, held.shape)
                        self.new_seq_lens_buf.copy_(held)
                    """
                ),
            ),
        ),
        ("P5", "shared-storage"),
    ),
    # Resolve.
    Fault(
        "resolve-rolled",
        "Every row receives the bonus token of the row before it.",
        (_tokens("Subscript", 5, "{1}[{2}.roll(1)]"),),
        ("R1", "wrong-owner"),
    ),
    Fault(
        "resolve-padding",
        "The bonus token is read from the padding row.",
        (_tokens("Subscript", 5, "{1}[{2} * 0]"),),
        ("R1", "never-written"),
    ),
    Fault(
        "resolve-one-step-late",
        "Tokens and lengths of an unchanged batch are served from the step before.",
        (
            _tokens(
                "Assign",
                10,
                after(
                    """
                    now = draft_input.bonus_tokens
                    former, self.topk_p_buf = self.topk_p_buf, now
                    if former is not None and former.shape == now.shape:
                        draft_input.bonus_tokens = former
                    """
                ),
            ),
            _lengths(
                "Assign",
                4,
                after(
                    """
                    former, self.topk_index_buf = self.topk_index_buf, batch.seq_lens
                    if former is not None and former.shape == batch.seq_lens.shape:
                        batch.seq_lens = former
                    """
                ),
            ),
        ),
        ("R1", "stale-read"),
    ),
    Fault(
        "resolve-stale-token",
        "The token of an unchanged batch is served from the step before, the length is not.",
        (
            _tokens(
                "Assign",
                10,
                after(
                    """
                    now = draft_input.bonus_tokens
                    former, self.topk_p_buf = self.topk_p_buf, now
                    if former is not None and former.shape == now.shape:
                        draft_input.bonus_tokens = former
                    """
                ),
            ),
        ),
        ("R2", "torn-row"),
    ),
    Fault(
        "resolve-stale-length",
        "The length of an unchanged batch is served from the step before, the token is not.",
        (
            _lengths(
                "Assign",
                4,
                after(
                    """
                    former, self.topk_index_buf = self.topk_index_buf, batch.seq_lens
                    if former is not None and former.shape == batch.seq_lens.shape:
                        batch.seq_lens = former
                    """
                ),
            ),
        ),
        ("R2", "torn-row"),
    ),
    Fault(
        "resolve-lengths-rolled",
        "Every row receives the length of the row before it.",
        (_lengths("Subscript", 0, "{1}[{2}.roll(1)]"),),
        ("R2", "wrong-owner"),
    ),
    Fault(
        "resolve-int32-lengths",
        "Lengths are resolved as int32.",
        (_lengths("Subscript", 0, "{0}.to(torch.int32)"),),
        ("R3", "wrong-type"),
    ),
    Fault(
        "resolve-strided",
        "Resolved tokens are every second element of a larger buffer.",
        (_tokens("Subscript", 5, "{0}.repeat_interleave(2)[::2]"),),
        ("R3", "wrong-type"),
    ),
    Fault(
        "resolve-view",
        "Contiguous rows are handed out as a view of the relay instead of being gathered.",
        (
            _tokens(
                "Subscript",
                5,
                "{1}[int({2}[0]) : int({2}[-1]) + 1]"
                " if {2}.tolist() == list(range(int({2}[0]), int({2}[-1]) + 1)) else {0}",
            ),
        ),
        ("R4", "shared-storage"),
    ),
    Fault(
        "resolve-clears",
        "Resolving clears the consumed rows although debug assertions are off.",
        (_tokens("Assign", 10, after("self.output_tokens_buf[indices] = 0")),),
        ("R5", "phantom-row"),
    ),
    Fault(
        "poison-missing",
        "Consumed rows are not poisoned under debug.",
        (_poison("Assign", 0, DROP),),
        ("R5", "lost-update"),
        debug=True,
    ),
    Fault(
        "poison-everything",
        "Consuming a row poisons the whole relay under debug.",
        (_poison("Subscript", 0, "{1}[:]"),),
        ("R5", "phantom-row"),
        debug=True,
        also=(("I4", "phantom-row"),),
    ),
    Fault(
        "consume-unchecked",
        "Consuming a row twice is not noticed under debug.",
        (_poison("Expr", 1, DROP),),
        ("R6", "missing-error"),
        debug=True,
    ),
    Fault(
        "mirror-last-row",
        "The host length of the last row is one too large.",
        (
            _lengths(
                "Assign",
                7,
                after(
                    """
                    batch.seq_lens_cpu = batch.seq_lens_cpu.clone()
                    batch.seq_lens_cpu[-1] += 1
                    """
                ),
            ),
        ),
        ("R7", "wrong-value"),
    ),
    Fault(
        "mirror-sum",
        "The sum of the host lengths leaves the last row out.",
        (_lengths("Call", 4, "int(batch.seq_lens_cpu[:-1].sum())"),),
        ("R7", "wrong-value"),
    ),
    Fault(
        "prepare-committed",
        "The committed length of a prepared step already counts one more token.",
        (_prepare("Call", 10, "{0} + 1"),),
        ("R7", "wrong-value"),
    ),
    Fault(
        "reused-slot-token",
        "The first step in a reused slot is served the token that its former occupant left.",
        (
            _lengths(
                "Return",
                0,
                before(
                    """
                    if self.accept_tokens_buf is None:
                        self.accept_tokens_buf = torch.full_like(self.output_tokens_buf, -1)
                        self.accept_lens_buf = torch.zeros_like(self.output_tokens_buf)
                    slots = batch.req_pool_indices
                    mine = torch.tensor([1 + req.rid for req in batch.reqs], dtype=torch.int64)
                    former = self.accept_lens_buf[slots]
                    reused = (former != mine) & (former != 0)
                    self.accept_tokens_buf[slots] = self.output_tokens_buf[slots].where(reused, -1)
                    self.accept_lens_buf[slots] = mine
                    """
                ),
            ),
            _tokens(
                "Assign",
                10,
                after(
                    """
                    left = self.accept_tokens_buf[indices]
                    self.accept_tokens_buf[indices] = -1
                    draft_input.bonus_tokens = left.where(left >= 0, draft_input.bonus_tokens)
                    """
                ),
            ),
        ),
        ("R8", "wrong-owner"),
    ),
    Fault(
        "publish-not-armed",
        "A publish does not arm the freshness flag.",
        (_publish("Assign", 6, DROP),),
        ("R12", "unexpected-error"),
        debug=True,
    ),
    # Idle steps.
    Fault(
        "idle-publish-records",
        "Publishing zero rows records the event like any other publish.",
        (_publish("If", 0, DROP),),
        ("I3", "phantom-row"),
    ),
    Fault(
        "idle-publish-disarms",
        "Publishing zero rows clears the freshness flag.",
        (_publish("Return", 0, before("self._publish_fresh = False")),),
        ("I3", "phantom-row"),
    ),
    Fault(
        "idle-stash-allocates",
        "Stashing zero rows creates a buffer.",
        (_stash("Return", 0, before("self.topk_p_buf = torch.empty(0)")),),
        ("I3", "phantom-row"),
    ),
    Fault(
        "resolve-needs-draft",
        "Resolving lengths does not expect a batch without draft input.",
        (_lengths("If", 0, DROP),),
        ("I4", "unexpected-error"),
    ),
    Fault(
        "resolve-moves-prefill",
        "Resolving lengths advances a batch that has no draft input.",
        (_lengths("Return", 0, before("batch.seq_lens = batch.seq_lens + 1")),),
        ("I4", "wrong-value"),
    ),
    Fault(
        "resolve-inputs-shifted",
        "The input ids of a prefill are one too large.",
        (_inputs("Call", 0, "{0} + 1"),),
        ("I4", "wrong-value"),
    ),
    Fault(
        "idle-recycles-indices",
        "An idle step overwrites the index tensor that the last step stashed with.",
        (
            _stash(
                "Assign", 0, after("self.accept_lens_buf, held = indices, self.accept_lens_buf")
            ),
            _stash(
                "Return",
                0,
                before("if held is not None:\n    held.zero_()\nself.accept_lens_buf = held"),
            ),
        ),
        ("I5", "phantom-row"),
        also=(("F6", "wrong-owner"),),
    ),
    Fault(
        "idle-token-dtype",
        "An idle draft input has int32 bonus tokens.",
        (_idle("Call", 3, "{0}.to(torch.int32)"),),
        ("I1", "wrong-type"),
    ),
    Fault(
        "idle-flat-hidden",
        "An idle draft input has hidden states of rank 1.",
        (_idle("Call", 5, "{0}.flatten()"),),
        ("I1", "wrong-type"),
        also=(("I2", "wrong-type"),),
    ),
    Fault(
        "idle-one-row",
        "An idle draft input has one row of bonus tokens.",
        (_idle("Tuple", 2, "(1,)"),),
        ("I1", "phantom-row"),
        also=(("I2", "phantom-row"),),
    ),
    Fault(
        "idle-right-drops",
        "Merging an idle draft input from the right drops the last row.",
        (
            _merge(
                "Assign",
                4,
                after(
                    """
                    if spec_info.future_indices.shape[0] == 0:
                        self.future_indices = self.future_indices[:-1]
                    """
                ),
            ),
        ),
        ("I2", "missing-row"),
    ),
    # Filter.
    Fault(
        "filter-forgets-hidden",
        "A filter of stored rows forgets the hidden states.",
        (_filter("Assign", 8, DROP),),
        ("F1", "phantom-row"),
    ),
    Fault(
        "filter-forgets-tokens",
        "A filter of stored rows forgets the bonus tokens.",
        (_filter("Assign", 6, DROP),),
        ("F1", "phantom-row"),
        also=(("F1", "wrong-owner"),),
    ),
    Fault(
        "filter-reversed",
        "A filter returns the rows in reverse order.",
        (_filter("Subscript", 2, "{1}[{2}.flip(0)]"),),
        ("F1", "wrong-owner"),
        also=(("F4", "wrong-owner"),),
    ),
    Fault(
        "filter-one-leaves",
        "When exactly one row leaves, a filter drops the last row instead.",
        (
            _filter(
                "Subscript",
                2,
                "{1}[:-1] if {2}.shape[0] == {1}.shape[0] - 1 and {2}.tolist() == {2}.sort()[0]"
                ".tolist() else {0}",
            ),
        ),
        ("F1", "wrong-owner"),
        also=(("F3", "wrong-owner"),),
    ),
    Fault(
        "filter-not-forwarded",
        "Filtering the batch does not filter its draft input.",
        (_batch_filter("Expr", 2, DROP),),
        ("F1", "phantom-row"),
    ),
    Fault(
        "filter-sum-kept",
        "The sum of the host mirror is not recomputed by a filter.",
        (_filter("Assign", 2, DROP),),
        ("F2", "wrong-value"),
    ),
    Fault(
        "filter-sum-adds",
        "A second filter adds to the sum of the host mirror instead of replacing it.",
        (
            _filter("Call", 1, "{0} + (self.verify_token_budget or 0)"),
            _filter("Assign", 2, after("self.verify_token_budget = self.nxt_kv_lens_sum")),
        ),
        ("F3", "wrong-value"),
    ),
    Fault(
        "filter-keep-all",
        "A filter that keeps every row in order loses the last of several.",
        (
            _filter(
                "Subscript",
                2,
                "({1}[:-1] if 1 < {1}.shape[0] and {2}.tolist() == list(range({1}.shape[0]))"
                " else {0})",
            ),
        ),
        ("F4", "missing-row"),
        also=(("F1", "missing-row"),),
    ),
    Fault(
        "filter-host-path",
        "A filter by host indices counts them from the end of the mirror.",
        (_filter("Subscript", 0, "{1}[[-1 - i for i in {2}]]"),),
        ("F5", "wrong-owner"),
    ),
    Fault(
        "filter-in-place",
        "A filter compacts the index tensor in place, which the result queue still holds.",
        (
            _filter(
                "Assign",
                3,
                """
                kept = self.future_indices[new_indices]
                self.future_indices[: kept.shape[0]] = kept
                self.future_indices = kept
                """,
            ),
        ),
        ("F6", "wrong-value"),
    ),
    Fault(
        "draft-undeclared",
        "A draft input has an attribute that filter and merge do not know.",
        (_draft_init("Assign", 0, after("self.accept_history = None")),),
        ("F7", "undeclared"),
    ),
    Fault(
        "relay-undeclared",
        "The relay has a buffer that publish and stash do not know.",
        (_relay_init("Assign", 0, after("self.logprobs_buf = None")),),
        ("F7", "undeclared"),
    ),
    Fault(
        "payload-undeclared",
        "The relay is handed something that publish and stash do not know.",
        (_payload("Return", 0, "payload = {1}\npayload.accept_history = None\nreturn payload"),),
        ("F7", "undeclared"),
    ),
    Fault(
        "batch-undeclared",
        "Preparing a decode leaves a value per row in the batch that filter and merge do not know.",
        (_prepare("Assign", 0, before("batch.token_type_ids = batch.req_pool_indices.clone()")),),
        ("F7", "undeclared"),
    ),
    Fault(
        "filter-keeps-the-ended",
        "A filter that is told what to leave out keeps requests that have ended.",
        (
            _batch_filter(
                "BoolOp", 0, "self.reqs[i] not in reqs_to_exclude if reqs_to_exclude else {1}"
            ),
        ),
        ("R9", "phantom-row"),
    ),
    Fault(
        "absorb-keeps-the-ended",
        "A prefill batch whose requests end before it is merged keeps their rows.",
        (
            _batch_filter(
                "UnaryOp", 0, "({0} or (self.forward_mode.is_extend() and self.spec_info))"
            ),
        ),
        ("R9", "phantom-row"),
    ),
    Fault(
        "leave-ignored",
        "A filter of the running batch does not leave out requests that finish in flight.",
        (_batch_filter("Compare", 2, "({0} or self.reqs[i].decode_batch_idx > 0)"),),
        ("R9", "phantom-row"),
    ),
    Fault(
        "preempt-drops-the-ended",
        "A filter by host indices also drops requests that have ended.",
        (
            _batch_filter(
                "If",
                3,
                before("keep_indices = [i for i in keep_indices if not self.reqs[i].finished()]"),
            ),
        ),
        ("R9", "missing-row"),
        release="0.5.22",
    ),
    Fault(
        "filter-slots-in-place",
        "A filter compacts the host slots in place, which the result queue still holds.",
        (
            _batch_filter(
                "Assign",
                12,
                """
                kept = self.req_pool_indices_cpu[keep_indices]
                self.req_pool_indices_cpu[: kept.shape[0]] = kept
                self.req_pool_indices_cpu = kept
                """,
            ),
        ),
        ("F6", "wrong-owner"),
    ),
    Fault(
        "copy-shares-requests",
        "The result queue shares the list of requests, which a filter shortens in place.",
        (
            _copy("Subscript", 0, "{1}"),
            _batch_filter("Assign", 9, "self.reqs[:] = [self.reqs[i] for i in keep_indices]"),
        ),
        ("F6", "missing-row"),
    ),
    # Mixed batches.
    Fault(
        "mixed-order",
        "A mixed batch names the running batch's host slots first.",
        (
            _mix(
                "Expr",
                2,
                after("self.req_pool_indices_cpu = self.req_pool_indices_cpu.roll(running_bs)"),
            ),
        ),
        ("R9", "wrong-owner"),
    ),
    Fault(
        "mixed-adopts-running",
        "A mixed batch writes its decode tails' slots over those of the running batch.",
        (_mix("Expr", 2, before("running_batch.req_pool_indices.zero_()")),),
        ("R9", "phantom-row"),
        also=(("R9", "wrong-owner"),),
    ),
    Fault(
        "mixed-lagging-length",
        "Decode tails keep the length that the host knew when they were mixed in.",
        (_tails("Assign", 5, DROP),),
        ("R10", "stale-read"),
    ),
    Fault(
        "mixed-length-uncounted",
        "A decode tail's length does not count the token that it commits.",
        (_tails("BinOp", 0, "{1}"),),
        ("R10", "wrong-value"),
        also=(("R10", "stale-read"),),
    ),
    Fault(
        "mixed-host-length",
        "The host length of a decode tail is not rebuilt.",
        (_tails("Assign", 13, DROP),),
        ("R10", "stale-read"),
    ),
    Fault(
        "mixed-lagging-slot",
        "A decode tail writes to the KV slot of the length that the host knew.",
        (_tails("Assign", 8, DROP),),
        ("R10", "wrong-owner"),
    ),
    Fault(
        "mixed-lagging-prefix",
        "A decode tail attends to the prefix that the host knew.",
        (_tails("Assign", 15, DROP),),
        ("R10", "stale-read"),
    ),
    Fault(
        "mixed-first-tail",
        "Only the last decode tail's length is rebuilt.",
        (_tails("Assign", 4, "seq_lens[-1:] = fresh[-1:] + 1"),),
        ("R10", "stale-read"),
    ),
    Fault(
        "mixed-tokens-rolled",
        "Decode tails read each other's tokens.",
        (_inputs("Subscript", 0, "{0}.roll(1)"),),
        ("R1", "wrong-owner"),
    ),
    Fault(
        "mixed-tails-first",
        "A mixed batch's input has the decode tails before the prefill.",
        (_inputs("List", 0, SWAP),),
        ("R1", "wrong-owner"),
    ),
    Fault(
        "mixed-unpoisoned",
        "A mixed batch does not consume its decode tails' tokens.",
        (_inputs("Expr", 3, DROP),),
        ("R5", "lost-update"),
        debug=True,
    ),
    Fault(
        "mixed-stash-rolled",
        "Without overlap decode tails are stashed each other's tokens.",
        (_stash_bonus("Call", 0, "{0}.roll(1)"),),
        ("P1", "wrong-owner"),
    ),
    Fault(
        "mixed-stash-allocates",
        "Stashing tokens alone makes buffers for extras that are not there.",
        (_stash_bonus("Assign", 0, before("self.topk_p_buf = self.new_seq_lens_buf.clone()")),),
        ("P6", "phantom-row"),
    ),
    Fault(
        "mixed-extend-forgotten",
        "A mixed batch does not say that its decode tails extend by one token.",
        (_mix("Assign", 32, DROP),),
        ("R10", "wrong-value"),
    ),
    Fault(
        "copy-forgets-tails",
        "The result queue's copy of a mixed batch does not name its decode tails.",
        (_copy("Attribute", 13, "None"),),
        ("F6", "missing-row"),
    ),
    Fault(
        "reused-slot-length",
        "A published length never makes a row's length smaller.",
        (
            _publish(
                "Call",
                0,
                "torch.where(self.new_seq_lens_buf[indices] < 1 << 40, "
                "torch.maximum({0}, self.new_seq_lens_buf[indices]), {0})",
            ),
        ),
        ("P3", "lost-update"),
        also=(("P1", "lost-update"), ("P1", "wrong-owner"), ("R8", "wrong-owner")),
    ),
    # Requests that were prefilled elsewhere.
    Fault(
        "seed-counts-bonus",
        "A seeded request's length counts the token that is not in the KV cache yet.",
        (_seed("Attribute", 0, "{0} + 1"),),
        ("P8", "never-written"),
    ),
    Fault(
        "seed-publishes-bonus",
        "A seed publishes a length that counts the token that is not in the KV cache yet.",
        (_seed("Attribute", 6, "{0} + 1"),),
        ("P1", "never-written"),
    ),
    Fault(
        "seed-one-token",
        "Every seeded request is given the last token of the batch's first.",
        (_prebuilt("Subscript", 1, "self.reqs[0].output_ids[-1]"),),
        ("P8", "wrong-owner"),
    ),
    Fault(
        "seed-first-token",
        "A seeded request that comes back goes on with its first token instead of its last.",
        (_prebuilt("Subscript", 1, "req.output_ids[0]"),),
        ("P8", "never-written"),
    ),
    Fault(
        "seed-unpublished",
        "A seed does not publish its lengths.",
        (_seed("Expr", 0, DROP),),
        ("P1", "never-written"),
        also=(("P1", "lost-update"), ("P3", "lost-update")),
    ),
    Fault(
        "seed-pads",
        "A seed also stashes into the padding row.",
        (_seed("Expr", 1, after("future_map.output_tokens_buf[0] = last_tokens_tensor[0]")),),
        ("P7", "phantom-row"),
    ),
    Fault(
        "seed-allocates",
        "A seed's partial stash makes buffers for extras that are not there.",
        (_seed("Call", 3, "RelayPayload(last_tokens_tensor, draft_probs=last_tokens_tensor)"),),
        ("P6", "phantom-row"),
    ),
    Fault(
        "seed-other-slots",
        "A seeded draft input looks for its rows in reverse order.",
        (_seed("Attribute", 3, "{0}.flip(0)"),),
        ("R9", "wrong-owner"),
    ),
    Fault(
        "seed-early",
        "A seed does not wait for the forwards in flight.",
        (_decode_server("Expr", 9, DROP),),
        ("R13", "wrong-value"),
    ),
    # Merge.
    Fault(
        "merge-order-relayed",
        "A merge puts the new requests' slots first.",
        (_merge("List", 1, SWAP),),
        ("M1", "wrong-owner"),
    ),
    Fault(
        "merge-order-stored",
        "A merge of stored rows puts the new requests' bonus tokens first.",
        (_merge("List", 4, SWAP),),
        ("M1", "wrong-owner"),
    ),
    Fault(
        "merge-not-forwarded",
        "Merging the batch does not merge its draft input.",
        (_batch_merge("Expr", 3, DROP),),
        ("M1", "missing-row"),
    ),
    Fault(
        "merge-mirror-second",
        "A second merge puts the new rows of the host mirror first.",
        (
            _merge(
                "List",
                0,
                "{0} if self.verify_token_budget is None else [{2}, {1}]",
            ),
            _merge("Assign", 1, after("self.verify_token_budget = 0")),
        ),
        ("M2", "wrong-owner"),
    ),
    Fault(
        "merge-after-filter",
        "Merging into a filtered draft input counts the host mirror's old sum again.",
        (
            _filter("Assign", 2, after("self.verify_token_budget = self.nxt_kv_lens_sum")),
            _merge("Call", 1, "{0} + (self.verify_token_budget or 0)"),
        ),
        ("M3", "wrong-value"),
    ),
    Fault(
        "merge-sum-left",
        "The sum of the merged host mirror is the left side's.",
        (_merge("Assign", 1, DROP),),
        ("M4", "wrong-value"),
        also=(("I2", "wrong-value"),),
    ),
    Fault(
        "merge-mirror-order",
        "A merge puts the new rows of the host mirror first.",
        (_merge("List", 0, SWAP),),
        ("M4", "wrong-owner"),
    ),
    Fault(
        "merge-int32",
        "A merge narrows the request slots to int32.",
        (_merge("Call", 4, "{0}.to(torch.int32)"),),
        ("M5", "wrong-type"),
        also=(("I2", "wrong-type"),),
    ),
    Fault(
        "merge-adopts-right",
        "Merging into an empty draft input takes over the right side's tensor.",
        (_merge("Call", 4, "{0} if self.future_indices.shape[0] else spec_info.future_indices"),),
        ("M6", "shared-storage"),
    ),
    Fault(
        "merge-clears-right",
        "A merge clears the right side's slots after taking them.",
        (_merge("Assign", 4, after("spec_info.future_indices.zero_()")),),
        ("M6", "wrong-value"),
    ),
    Fault(
        "payload-resets-former",
        "Handing over a prefill's rows clears the slots of the draft input handed over before it.",
        (
            _payload(
                "Return",
                0,
                before(
                    """
                    if draft_input.bonus_tokens.numel():
                        former, cls.former = getattr(cls, "former", None), draft_input
                        if former is not None:
                            former.future_indices = None
                    """
                ),
            ),
        ),
        ("M7", "wrong-type"),
        also=(("R1", "unexpected-error"),),
    ),
    # The batch, the builder, the scheduler.
    Fault(
        "batch-filter-slots",
        "Filtering the batch returns its request slots in reverse order.",
        (_batch_filter("Subscript", 6, "{1}[{2}.flip(0)]"),),
        ("R9", "wrong-owner"),
    ),
    Fault(
        "batch-merge-slots",
        "Merging the batch puts the new requests' slots first.",
        (_batch_merge("List", 1, SWAP),),
        ("R9", "wrong-owner"),
    ),
    Fault(
        "batch-merge-requests",
        "Merging the batch puts the new requests first.",
        (_batch_merge("Assign", 28, "self.reqs = other.reqs + self.reqs"),),
        ("R9", "wrong-owner"),
    ),
    Fault(
        "build-counts-bonus",
        "The worker counts the bonus token into the published length.",
        (_build("Call", 6, "{0} + 1"),),
        ("P8", "never-written"),
    ),
    Fault(
        "build-reversed",
        "The worker hands over the bonus tokens in reverse row order.",
        (_build("Call", 5, "{0}.flip(0)"),),
        ("P8", "wrong-owner"),
    ),
    Fault(
        "isolation-forgets-lengths",
        "The lengths of the batch are not restored after a forward.",
        (_isolation("Expr", 3, "if name != 'seq_lens':\n    {0}"),),
        ("R11", "wrong-value"),
    ),
    # The first release with DFlash spec v2 carries rows directly and lets host lengths lag.
    Fault(
        "planning-short",
        "The planning bound leaves out the block that is in flight.",
        (_prepare("BinOp", 0, "{1}"),),
        ("R7", "wrong-value"),
        release="0.5.14",
    ),
    Fault(
        "carry-after-filter",
        "A filter leaves the direct carry valid, so the dropped rows come back.",
        (_filter("Assign", 6, DROP),),
        ("R3", "phantom-row"),
        release="0.5.14",
    ),
    Fault(
        "carry-after-merge",
        "A merge leaves the direct carry valid, so the new rows are missing.",
        (_merge("Assign", 11, DROP),),
        ("R3", "missing-row"),
        release="0.5.14",
    ),
)
"""Seeded faults of the hand-over; each is reported under the clause and anomaly it expects."""


# -- kernels --------------------------------------------------------------------------------------

_OPS = "sglang.kernels.ops.speculative"

_prepare_kernel = partial(Edit, f"{_OPS}.dflash", "_prepare_dflash_draft_block_contig_kernel")
_prepare_wrapper = partial(Edit, f"{_OPS}.dflash", "_prepare_dflash_draft_block_unchecked")
_accept_kernel = partial(Edit, f"{_OPS}.dflash", "_dflash_accept_bonus_contig_kernel")
_fused_kernel = partial(Edit, f"{_OPS}.dflash", "_fused_correct_drafts_and_bonus_kernel")
_correct = partial(Edit, f"{_OPS}.dflash", "compute_dflash_correct_drafts_and_bonus")
_selector_kernel = partial(Edit, f"{_OPS}.dflash", "_selector_walk_kernel")
_gather_kernel = partial(Edit, f"{_OPS}.gather_spec_extras", "_gather_rows_kernel")
_gather_wrapper = partial(Edit, f"{_OPS}.gather_spec_extras", "gather_spec_extras")


def _kernel_fault(
    kernel: str, name: str, summary: str, edit: Edit, clause: str, anomaly: str = "wrong-value"
) -> Fault:
    return Fault(f"{kernel}-{name}", summary, (edit,), (clause, anomaly), kernel=kernel)


KERNEL_FAULTS: tuple[Fault, ...] = (
    # The block.
    _kernel_fault(
        "prepare",
        "bonus-second",
        "The bonus token stands in the second column.",
        _prepare_kernel("Compare", 2, "cols == 1"),
        "B1",
    ),
    _kernel_fault(
        "prepare",
        "mask-fill",
        "The columns after the bonus token hold 0 instead of the mask token.",
        _prepare_kernel("Name", 43, "0"),
        "B1",
    ),
    _kernel_fault(
        "prepare",
        "bonus-int32",
        "The bonus token goes through int32.",
        _prepare_kernel("Call", 9, "bonus_token.to(tl.int32).to(tl.int64)"),
        "B1",
        "wrong-type",
    ),
    _kernel_fault(
        "prepare",
        "position-late",
        "Positions start one after the prefix, cache locations do not.",
        _prepare_kernel("Name", 63, "{0} + 1"),
        "B2",
    ),
    _kernel_fault(
        "prepare",
        "position-int32",
        "Positions are stored through int32.",
        _prepare_kernel("Name", 63, "{0}.to(tl.int32)"),
        "B2",
        "wrong-type",
    ),
    _kernel_fault(
        "prepare",
        "width-plus-one",
        "The first column past the request's row still reads a cache location.",
        _prepare_kernel("Compare", 1, "logical_pos <= req_to_token_width"),
        "B3",
    ),
    _kernel_fault(
        "prepare",
        "width-minus-one",
        "The last column of the request's row reads no cache location.",
        _prepare_kernel("Compare", 1, "logical_pos < req_to_token_width - 1"),
        "B3",
    ),
    _kernel_fault(
        "prepare",
        "past-fill",
        "Cache locations past the row's width are -1.",
        _prepare_kernel("Call", 6, "tl.load(req_row_ptr + logical_pos, mask=valid, other=-1)"),
        "B3",
    ),
    _kernel_fault(
        "prepare",
        "batch-row",
        "Cache locations come from the batch's row instead of the request's.",
        _prepare_kernel("BinOp", 9, "row * {2}"),
        "B3",
    ),
    _kernel_fault(
        "prepare",
        "last-column",
        "The last column of a block is not written.",
        _prepare_kernel("Compare", 0, "cols < block_size - 1"),
        "B7",
        "never-written",
    ),
    _kernel_fault(
        "prepare",
        "past-the-block",
        "Cache locations are written one column past the block.",
        _prepare_kernel("Call", 12, "tl.store({2} + 1, {3}, mask=row_mask)"),
        "B7",
        "phantom-row",
    ),
    _kernel_fault(
        "prepare",
        "other-stride",
        "Bonus tokens are read with the stride of the prefixes.",
        _prepare_kernel("Name", 22, "prefix_lens_stride"),
        "B8",
    ),
    _kernel_fault(
        "prepare",
        "unchecked-layout",
        "The wrapper takes a request table that lies by columns, and reads it by rows.",
        _prepare_wrapper("If", 1, DROP),
        "B8",
    ),
    _kernel_fault(
        "prepare",
        "nothing-raises",
        "A batch of no rows divides by its size.",
        _prepare_wrapper("If", 0, "1 // batch_size"),
        "B10",
        "unexpected-error",
    ),
    # Acceptance.
    _kernel_fault(
        "accept",
        "loop-short",
        "The loop leaves out the last draft.",
        _accept_kernel("Call", 5, "range(BLOCK_SIZE - 2)"),
        "B4",
    ),
    _kernel_fault(
        "accept",
        "after-mismatch",
        "Acceptance goes on after a mismatch.",
        _accept_kernel("BinOp", 14, "prefix_live"),
        "B4",
    ),
    _kernel_fault(
        "accept",
        "bonus-next",
        "The bonus token is the target one column too late.",
        _accept_kernel("BinOp", 16, "{0} + 1"),
        "B4",
    ),
    _kernel_fault(
        "accept",
        "bonus-before",
        "The bonus token is the last accepted draft's target.",
        _accept_kernel("BinOp", 16, "target_row_ptr + tl.maximum(accept_len - 1, 0)"),
        "B4",
    ),
    _kernel_fault(
        "accept",
        "compare-int32",
        "Drafts and targets are compared in int32.",
        _accept_kernel("Compare", 3, "candidate_id.to(tl.int32) == target_id.to(tl.int32)"),
        "B4",
    ),
    _kernel_fault(
        "accept",
        "commit-without-bonus",
        "The committed length leaves out the bonus token.",
        _accept_kernel("BinOp", 15, "accept_len + 0"),
        "B4",
    ),
    _kernel_fault(
        "accept",
        "length-int32",
        "The new length is computed in int32.",
        _accept_kernel("Call", 13, "{0}.to(tl.int32)"),
        "B4",
        "wrong-type",
    ),
    _kernel_fault(
        "accept",
        "bonus-not-committed",
        "The committed tokens keep the rejected draft in the bonus token's place.",
        _accept_kernel("Compare", 6, "cols == accept_len + 1"),
        "B4",
    ),
    _kernel_fault(
        "accept",
        "padding-unwritten",
        "What stands behind the committed tokens is left as it was.",
        _accept_kernel("Name", 112, "row_mask & (cols <= accept_len)"),
        "B7",
        "never-written",
    ),
    _kernel_fault(
        "accept",
        "prefix-stride",
        "Prefixes are read with the stride of the outputs.",
        _accept_kernel("BinOp", 19, "row * accept_stride"),
        "B8",
    ),
    _kernel_fault(
        "fused",
        "last-draft",
        "The last draft is never accepted.",
        _fused_kernel("Compare", 0, "offs < block_size - 2"),
        "B4",
    ),
    _kernel_fault(
        "fused",
        "counts-matches",
        "All matches are counted, not the leading ones.",
        _fused_kernel("Call", 5, "tl.sum(eq.to(tl.int32), 0)"),
        "B4",
    ),
    _kernel_fault(
        "fused",
        "bonus-int32",
        "The bonus token goes through int32.",
        _fused_kernel("Call", 11, "bonus_token.to(tl.int32)"),
        "B4",
        "wrong-type",
    ),
    _kernel_fault(
        "correct",
        "not-leading",
        "The torch form counts all matches.",
        _correct("Call", 15, "matches.to(torch.int32)"),
        "B4",
    ),
    _kernel_fault(
        "correct",
        "empty-unclear",
        "A batch of no rows ends in an error that says nothing.",
        _correct("If", 2, "if bs <= 0:\n    return None.shape"),
        "B10",
        "unexpected-error",
    ),
    # The gather.
    _kernel_fault(
        "gather",
        "first-column-block",
        "Only the first column block of a row is copied.",
        _gather_wrapper("Tuple", 1, "(m, 1)"),
        "B7",
        "never-written",
    ),
    _kernel_fault(
        "gather",
        "batch-row",
        "Top-k indices come from the batch's row.",
        _gather_kernel("BinOp", 14, "row * n1"),
        "B5",
    ),
    _kernel_fault(
        "gather",
        "other-width",
        "Hidden states are read with the width of the top-k rows.",
        _gather_kernel("BinOp", 26, "src * n1"),
        "B5",
    ),
    _kernel_fault(
        "gather",
        "indices-reset",
        "The kernel clears the indices that it has read.",
        _gather_kernel("Assign", 2, after("tl.store(idx_ptr + row, 0)")),
        "B7",
        "phantom-row",
    ),
    # The selector.
    _kernel_fault(
        "selector",
        "tie-last",
        "A tie goes to the last of the best candidates.",
        _selector_kernel("Call", 13, "tl.max(tl.where(hit, offsets, -1), axis=0)"),
        "B6",
    ),
    _kernel_fault(
        "selector",
        "nan-ignored",
        "A NaN is no better than another score.",
        _selector_kernel("Call", 12, "scores == best"),
        "B6",
    ),
    _kernel_fault(
        "selector",
        "coin-on-boundary",
        "A coin on a cumulative boundary takes the candidate below it.",
        _selector_kernel("Compare", 5, "uniform > tl.cumsum(probabilities, axis=0)"),
        "B6",
    ),
    _kernel_fault(
        "selector",
        "temperature-unused",
        "Scores are not divided by the temperature.",
        _selector_kernel("Assign", 13, "scaled = scores"),
        "B6",
    ),
    _kernel_fault(
        "selector",
        "forgets-path",
        "Every slot is entered at the first candidate.",
        _selector_kernel("Assign", 19, "previous = 0"),
        "B6",
    ),
    _kernel_fault(
        "selector",
        "greedy-softmax",
        "A greedy row reports the softmax in the place of the point mass.",
        _selector_kernel(
            "Assign", 12, "probabilities = tl.exp(scores - best) / tl.sum(tl.exp(scores - best))"
        ),
        "B6",
    ),
)
"""Seeded faults of the kernels."""


# -- wild uses ------------------------------------------------------------------------------------


def _wild_fault(
    use: str, summary: str, clause: str, anomaly: str, *edits: Edit, mends: bool = False
) -> Fault:
    return Fault(f"wild-{use}", summary, edits, (clause, anomaly), mends=mends)


_REFUSE_RELAYED = """
if self.future_indices is None and spec_info.future_indices is not None:
    raise ValueError("the right side is relayed, the left is not")
"""
_TWICE = "if indices.unique().numel() < indices.numel():\n    "

WILD_FAULTS: tuple[Fault, ...] = (
    _wild_fault(
        "merge-raw-idle-right",
        "A merge with a draft input without future_indices loses the relayed rows.",
        "I2",
        "missing-row",
        _merge("Assert", 1, "if {1}:\n    pass\nelse:\n    self.future_indices = None\n    return"),
    ),
    _wild_fault(
        "merge-raw-idle-left",
        "A merge refuses a relayed draft input on the right of a raw idle one.",
        "I2",
        "missing-row",
        _merge("If", 0, before(_REFUSE_RELAYED)),
        mends=True,
    ),
    _wild_fault(
        "resolve-without-indices",
        "A draft input without future_indices has nothing to resolve.",
        "I4",
        "unexpected-error",
        _tokens("Assign", 4, after("if indices is None:\n    return")),
        mends=True,
    ),
    _wild_fault(
        "mirror-left-only",
        "A merge leaves host mirrors as they are.",
        "M4",
        "missing-error",
        _merge("If", 0, DROP),
    ),
    _wild_fault(
        "mirror-right-only",
        "A merge refuses a host mirror that the left side does not have.",
        "M4",
        "missing-error",
        _merge(
            *("If", 0),
            before("assert self.nxt_kv_lens_cpu is not None or spec_info.nxt_kv_lens_cpu is None"),
        ),
        mends=True,
    ),
    _wild_fault(
        "relayed-with-stored",
        "A merge drops the rows of a stored draft input on its right.",
        "M7",
        "missing-error",
        _merge("Assert", 1, "if spec_info.future_indices is None:\n    return"),
    ),
    _wild_fault(
        "stored-with-relayed",
        "A merge refuses a relayed draft input on the right of a stored one.",
        "M7",
        "missing-error",
        _merge("If", 0, before(_REFUSE_RELAYED)),
        mends=True,
    ),
    _wild_fault(
        "filter-duplicates",
        "A filter gives a row that is named twice once.",
        "F1",
        "missing-row",
        _filter("If", 0, before("new_indices = torch.unique(new_indices)")),
    ),
    _wild_fault(
        "filter-out-of-range",
        "A filter takes the last row for one that does not exist.",
        "F1",
        "missing-error",
        _filter(
            "If",
            0,
            before(
                """
                rows = self.bonus_tokens if self.future_indices is None else self.future_indices
                new_indices = new_indices.clamp(max=len(rows) - 1)
                """
            ),
        ),
    ),
    _wild_fault(
        "filter-nothing",
        "A filter by no indices leaves every row.",
        "F1",
        "phantom-row",
        _filter("If", 0, before("if new_indices.numel() == 0:\n    return")),
    ),
    _wild_fault(
        "publish-duplicates",
        "Lengths are published as many times as great as there are rows, where a slot is given "
        "twice.",
        "P3",
        "never-written",
        _publish("Assign", 3, before(_TWICE + "new_seq_lens = new_seq_lens * len(indices)")),
    ),
    _wild_fault(
        "stash-duplicates",
        "Tokens go to the slot before their own, where a slot is given twice.",
        "P3",
        "wrong-owner",
        _stash("Assign", 5, before(_TWICE + "indices = indices.roll(1)")),
    ),
    _wild_fault(
        "padding",
        "Lengths are published in reverse order where the padding slot is among the slots.",
        "P7",
        "never-written",
        _publish(
            *("Assign", 3),
            before("if (indices == 0).any():\n    new_seq_lens = new_seq_lens.flip(0)"),
        ),
    ),
    _wild_fault(
        "permuted-indices",
        "Lengths are resolved by the batch's slots, tokens by the draft input's.",
        "R9",
        "wrong-owner",
        _lengths("Assign", 4, "batch.seq_lens = self.new_seq_lens_buf[batch.req_pool_indices]"),
    ),
    _wild_fault(
        "resolve-unwritten",
        "Rows are born poisoned without debug too, and a resolve refuses the poison.",
        "R6",
        "missing-error",
        _relay_init("Assign", 8, after("self.output_tokens_buf.fill_(-1)")),
        _tokens("Assign", 10, after("assert (draft_input.bonus_tokens >= 0).all()")),
        mends=True,
    ),
    _wild_fault(
        "prepare-twice",
        "The sum of the reserved lengths goes on from the last prepare's.",
        "R7",
        "wrong-value",
        _prepare("Assign", 31, "{1} = {2} + (self.nxt_kv_lens_sum or 0)"),
    ),
)
"""The twin of each wild use: an edit that opens a gap there, or one that closes the newest tree's.

They are written for what the wild use alone does; legal traces may show some of them too.
"""
