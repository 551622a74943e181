"""The numbered clauses: what must be true of the hand-over, one record each.

Numbers are stable: a clause may be retired, never renumbered. ``black_box`` clauses speak of
resolved values, shapes and errors; the others name buffers and fields of the tree, and are skipped
where the tree's are not recognised. ``since`` says what a tree must have for the clause to apply;
the surface probe decides, not a version.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Clause:
    """One statement of the specification.

    Attributes:
        number: stable name, for example ``R1``.
        statement: one sentence that needs no context.
        calls: the calls into the tree that the suite checks it at.
        needs: capability of the tree without which it does not apply, or "".
        black_box: whether it is stated without naming the tree's internals.
        wild: what it says of uses no scheduler path issues, or "".
        wild_calls: where the suite checks that.
    """

    number: str
    statement: str
    calls: tuple[str, ...]
    needs: str = ""
    black_box: bool = True
    wild: str = ""
    wild_calls: tuple[str, ...] = ()


KERNEL_CALLS = (
    "kernel-prepare",
    "kernel-accept",
    "kernel-correct",
    "kernel-fused",
    "kernel-gather",
    "kernel-selector",
)
"""The calls at which kernels answer."""

_ALL = (
    Clause(
        "I1",
        "An idle draft input has zero rows and the dtype, rank, trailing dimensions and device "
        "of a live one.",
        ("idle-input",),
    ),
    Clause(
        "I2",
        "An idle draft input, as a step leaves it, is neutral for merge on either side.",
        ("law-neutral", "law-merge-idle"),
        wild="A raw idle draft input is neutral too, or merging it is a clear error.",
        wild_calls=("wild-merge-raw-idle-right", "wild-merge-raw-idle-left"),
    ),
    Clause(
        "I3",
        "Publishing or stashing zero rows changes nothing: no buffer, no event, no flag.",
        ("idle-signals",),
        needs="idle",
        black_box=False,
    ),
    Clause(
        "I4",
        "Resolving a batch without draft input, or with zero rows, changes nothing and raises "
        "nothing.",
        ("idle-resolve", "admit-resolve", "resolve-nothing"),
        wild="Resolving a draft input without future_indices is a no-op or a clear error.",
        wild_calls=("wild-resolve-without-indices",),
    ),
    Clause(
        "I5",
        "An idle step, the first one included, leaves every other request's observations as they "
        "were.",
        ("idle",),
        needs="idle",
    ),
    Clause(
        "F1",
        "After a filter, row j is the former row keep[j].",
        ("filter", "retract", "absorb-filter", "law-filter"),
    ),
    Clause("F2", "Host mirrors and their sums follow a filter.", ("law-filter",), black_box=False),
    Clause("F3", "Filtering by a and then by b is filtering by a[b].", ("law-compose",)),
    Clause("F4", "Keeping every row is the identity.", ("law-keep-all",)),
    Clause(
        "F5",
        "The host-index path of a filter agrees with its device-index path.",
        ("law-host-path",),
        needs="host_index_filter",
    ),
    Clause(
        "F6",
        "A filter leaves the relay alone, and tensors that others hold keep their contents.",
        ("filter", "retract", "absorb-filter", "law-filter"),
        black_box=False,
    ),
    Clause(
        "F7",
        "Every attribute of a draft input and of the relay is declared.",
        ("build", "prepare", "relay", "stash"),
        black_box=False,
    ),
    Clause("M1", "A merge has the left rows, then the right rows.", ("merge", "law-merge")),
    Clause("M2", "Merging is associative.", ("law-associate",)),
    Clause("M3", "Filtering distributes over merging.", ("law-distribute",)),
    Clause(
        "M4",
        "Host mirrors and sums follow a merge when both sides have them.",
        ("law-merge",),
        black_box=False,
        wild="A mirror on one side only never yields a wrong length.",
        wild_calls=("wild-mirror-left-only", "wild-mirror-right-only"),
    ),
    Clause(
        "M5",
        "A merge keeps the dtype of device fields and the values of host mirrors.",
        ("merge", "law-merge"),
    ),
    Clause(
        "M6",
        "A merge leaves its right operand unchanged and shares no storage with it.",
        ("merge", "law-merge"),
    ),
    Clause(
        "M7",
        "A step never merges a relayed draft input with a stored one.",
        ("merge",),
        wild="Merging a relayed draft input with a stored one is a clear error.",
        wild_calls=("wild-relayed-with-stored", "wild-stored-with-relayed"),
    ),
    Clause(
        "P1",
        "Publish and stash write exactly the addressed rows.",
        ("publish", "stash"),
        needs="channels",
        black_box=False,
    ),
    Clause(
        "P2",
        "Publish and stash keep every other row and every other buffer.",
        ("publish", "stash"),
        needs="channels",
        black_box=False,
    ),
    Clause(
        "P3",
        "The last write of a row before it is resolved wins.",
        ("publish", "stash"),
        needs="channels",
        black_box=False,
    ),
    Clause(
        "P4", "Token ids survive the relay exactly.", ("stash",), needs="channels", black_box=False
    ),
    Clause(
        "P5",
        "Relayed rows are copies: the source may be overwritten afterwards.",
        ("publish", "stash"),
        needs="channels",
        black_box=False,
    ),
    Clause(
        "P8",
        "The published length is the KV length, and the stashed token's position is that length.",
        ("build",),
    ),
    Clause("R1", "Every row receives its own request's last token.", ("resolve",)),
    Clause(
        "R2",
        "Every row receives its own request's last length, from the token's step.",
        ("resolve",),
    ),
    Clause(
        "R3",
        "Resolved tokens and lengths have the channel's dtype, shape, device and contiguity.",
        ("resolve",),
    ),
    Clause(
        "R4",
        "Resolved device values share no storage with the relay.",
        ("resolve",),
        needs="channels",
        black_box=False,
    ),
    Clause(
        "R5",
        "A resolve leaves the relay unchanged; under debug it poisons exactly the consumed rows.",
        ("resolve",),
        needs="channels",
        black_box=False,
    ),
    Clause(
        "R6",
        "Under debug, consuming a row twice without a write between raises.",
        ("consume-twice",),
        needs="debug",
    ),
    Clause(
        "R7",
        "Host lengths equal the device's and their sum is right, or both are None; where they lag, "
        "committed <= true <= planning.",
        ("resolve", "prepare"),
    ),
    Clause("R8", "A reused slot never shows its former occupant.", ("resolve",)),
    Clause(
        "R9",
        "After filters and merges, future_indices, req_pool_indices and the order of requests "
        "agree.",
        ("filter", "retract", "merge", "absorb-filter"),
    ),
    Clause(
        "R11",
        "After a step every batch field but spec_info and input_ids has its post-resolve value.",
        ("restore",),
        needs="isolation",
        black_box=False,
    ),
    Clause(
        "R12",
        "Under debug, publishes and resolves alternate: the freshness assertion never fires.",
        ("resolve",),
        needs="freshness",
        black_box=False,
    ),
    # The kernels, for the arguments that the worker gives them; outside those, wild.
    Clause(
        "B1",
        "A block's ids are the bonus token, then mask tokens.",
        ("kernel-prepare",),
        needs="kernel_prepare",
        black_box=False,
    ),
    Clause(
        "B2",
        "A block's positions are prefix + column.",
        ("kernel-prepare",),
        needs="kernel_prepare",
        black_box=False,
    ),
    Clause(
        "B3",
        "A block's cache locations come from the request's row; past its width they are 0.",
        ("kernel-prepare",),
        needs="kernel_prepare",
        black_box=False,
    ),
    Clause(
        "B4",
        "The longest prefix of drafts that the target predicts is accepted; the bonus token is the "
        "target's next; the committed tokens are those, the new length prefix + commit.",
        ("kernel-accept", "kernel-correct", "kernel-fused"),
        needs="kernel_acceptance",
        black_box=False,
    ),
    Clause(
        "B5",
        "A gather returns exactly the addressed rows.",
        ("kernel-gather",),
        needs="kernel_gather",
        black_box=False,
    ),
    Clause(
        "B6",
        "The selector picks what torch.argmax picks, NaN included, or inverts the CDF; its choice "
        "is always a candidate.",
        ("kernel-selector",),
        needs="kernel_selector",
        black_box=False,
    ),
    Clause(
        "B7",
        "A kernel writes all of its outputs and nothing else.",
        KERNEL_CALLS,
        needs="kernels",
        black_box=False,
        wild="Arguments of a wrong shape or type are rejected before anything is written.",
        wild_calls=("kernel-misuse",),
    ),
    Clause(
        "B8",
        "Any stride and offset that a wrapper accepts gives the same answer.",
        ("kernel-layout",),
        needs="kernels",
        black_box=False,
        wild="A layout that a kernel cannot read is rejected.",
        wild_calls=("kernel-misuse",),
    ),
    Clause(
        "B10",
        "A batch of no rows is a no-op, or a clear error.",
        ("kernel-nothing",),
        needs="kernels",
        black_box=False,
    ),
)

CLAUSES: dict[str, Clause] = {clause.number: clause for clause in _ALL}
"""All clauses by number, in declared order."""
