"""The operation alphabet, and the traces that operations form.

A trace is self-contained JSON: a header and a list of operations. Everything a player needs follows
from it (token values from the header's seed, see :mod:`generators.values`); nothing in it depends
on a tree. Requests are numbered by the trace; a request that is retracted and admitted again keeps
its number and gets a new *generation*.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from dataclasses import dataclass, field
from typing import Any, ClassVar

SCHEMA = 1
"""Version of the trace format; a reader refuses any other."""


class TraceError(ValueError):
    """A trace that cannot be read; the message is one line for people."""


def _redundant(requests: tuple[int, ...]) -> str:
    return "".join(f", r{request} redundant" for request in requests)


@dataclass(frozen=True, slots=True)
class Operation:
    """One entry of a trace. Subclasses are the alphabet; their fields are the JSON fields."""

    op: ClassVar[str]
    wild: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """The alphabet's name for what this entry does (``chunk`` for an unfinished prefill)."""
        return self.op

    def line(self) -> str:
        """The operation as one printed line."""
        return self.op

    def as_json(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        kept = {k: v for k, v in values.items() if v != defaults[k]}
        return {"op": self.op, **kept}


@dataclass(frozen=True, slots=True)
class Admit(Operation):
    """Prefill of a batch: ``rows`` are (request, slot, prompt tokens in the KV cache afterwards).

    ``chunk`` names the one request of the batch whose prompt goes on after this prefill: its stash
    is never read. A request that already holds its slot continues an earlier chunk.
    """

    op: ClassVar[str] = "admit"
    rows: tuple[tuple[int, int, int], ...]
    chunk: int | None = None

    @property
    def name(self) -> str:
        return "admit" if self.chunk is None else "chunk"

    def line(self) -> str:
        rows = ", ".join(
            f"r{request}@{slot} len {length}{' (chunk)' if request == self.chunk else ''}"
            for request, slot, length in self.rows
        )
        return f"{self.name} {rows}"


@dataclass(frozen=True, slots=True)
class Mixed(Admit):
    """A prefill that takes the whole running batch with it, one token per decode tail.

    The prefill's rows come first, then the tails; the running batch's draft input is dropped, and
    the mixed batch is the last prefill batch afterwards. ``redundant`` as for a step.
    """

    op: ClassVar[str] = "mixed"
    redundant: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return "mixed"

    def line(self) -> str:
        return f"{super(Mixed, self).line()} with the running batch{_redundant(self.redundant)}"


@dataclass(frozen=True, slots=True)
class Seed(Operation):
    """Requests arrive prefilled, from a prefill server: their rows are written at schedule time.

    ``rows`` as for a prefill; nothing runs. The batch is the last prefill batch afterwards.
    """

    op: ClassVar[str] = "seed"
    rows: tuple[tuple[int, int, int], ...]

    def line(self) -> str:
        rows = ", ".join(f"r{request}@{slot} len {length}" for request, slot, length in self.rows)
        return f"seed {rows}"


@dataclass(frozen=True, slots=True)
class Adopt(Operation):
    """The last prefill batch loses finished rows and the chunk, then becomes the running batch."""

    op: ClassVar[str] = "adopt"


@dataclass(frozen=True, slots=True)
class Merge(Operation):
    """The last prefill batch loses finished rows and the chunk, then joins the running batch."""

    op: ClassVar[str] = "merge"


@dataclass(frozen=True, slots=True)
class Step(Operation):
    """Decode of the running batch; ``accepted[i]`` drafts are accepted for row i (0 <= k < block).

    ``redundant`` names requests whose end is already in flight: they are decoded once more and
    their result is dropped.
    """

    op: ClassVar[str] = "step"
    accepted: tuple[int, ...]
    redundant: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return "redundant" if self.redundant else "step"

    def line(self) -> str:
        return f"{self.name} accepted {list(self.accepted)}{_redundant(self.redundant)}"


@dataclass(frozen=True, slots=True)
class Sync(Operation):
    """The host processes the result in flight now, so what is launched next overlaps nothing."""

    op: ClassVar[str] = "sync"


@dataclass(frozen=True, slots=True)
class Finish(Operation):
    """The host learns that a request ended; its rows leave at the next filter."""

    op: ClassVar[str] = "finish"
    request: int

    def line(self) -> str:
        return f"finish r{self.request}"


@dataclass(frozen=True, slots=True)
class Filter(Operation):
    """Requests that have ended leave the running batch.

    So do those of ``leaving``, whose last token is in flight: they keep their slots until then.
    """

    op: ClassVar[str] = "filter"
    leaving: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return "leave" if self.leaving else "filter"

    def line(self) -> str:
        early = "".join(f", r{request} finishing in flight" for request in self.leaving)
        return f"filter{early}"


@dataclass(frozen=True, slots=True)
class Retract(Operation):
    """Out of memory: ``keep`` (requests, in the order the scheduler sorted them) stay."""

    op: ClassVar[str] = "retract"
    keep: tuple[int, ...]

    def line(self) -> str:
        return "retract all but " + ", ".join(f"r{request}" for request in self.keep)


@dataclass(frozen=True, slots=True)
class Preempt(Operation):
    """``gone`` lose their slots to requests of a higher priority; the others keep their order."""

    op: ClassVar[str] = "preempt"
    gone: tuple[int, ...]

    def line(self) -> str:
        return "preempt " + ", ".join(f"r{request}" for request in self.gone)


@dataclass(frozen=True, slots=True)
class Idle(Operation):
    """A fresh batch of zero rows without draft input runs (``during`` prefill or decode)."""

    op: ClassVar[str] = "idle"
    during: str = "decode"

    def line(self) -> str:
        return f"idle during {self.during}"


@dataclass(frozen=True, slots=True)
class Law(Operation):
    """An algebraic law of the draft input, on fresh ones made from the running rows' values.

    ``law`` is one of :data:`LAWS`; ``keep`` and ``then`` are row selections where the law filters,
    ``cut`` splits the rows where it merges; ``form`` is ``relayed`` (rows live in the relay) or
    ``stored`` (rows live in the five tensors); ``mirrors`` puts host mirrors on every operand;
    ``channel`` (``tokens`` or ``lengths``) consumes only that one twice, where one failed assertion
    ends the process.
    """

    op: ClassVar[str] = "law"
    law: str
    form: str = "relayed"
    mirrors: bool = False
    keep: tuple[int, ...] = ()
    then: tuple[int, ...] = ()
    cut: int = 0
    channel: str = ""

    @property
    def name(self) -> str:
        return f"law-{self.law}"

    def line(self) -> str:
        if self.law in KV_LAWS:
            return f"law {self.law}"
        parts = [f"law {self.law} ({self.form}{', mirrors' if self.mirrors else ''})"]
        if self.keep:
            parts.append(f"keep {list(self.keep)}")
        if self.then:
            parts.append(f"then {list(self.then)}")
        if self.cut:
            parts.append(f"cut {self.cut}")
        if self.channel:
            parts.append(self.channel)
        return " ".join(parts)


DRAFT_LAWS = (
    "filter",
    "permute",
    "compose",
    "keep-all",
    "merge",
    "associate",
    "distribute",
    "neutral",
    "idle",
    "lookup",
    "consume-twice",
    "resolve-nothing",
)
"""Laws of the draft input and of the relay, on copies; without a KV pool."""

KV_LAWS = ("bookkeeping", "penalties")
"""Laws of what a decode is prepared with, for which there must be a KV pool."""

LAWS = DRAFT_LAWS + KV_LAWS


@dataclass(frozen=True, slots=True)
class Wild(Operation):
    """A use that the API accepts and no scheduler path issues, on copies; see :data:`WILD_USES`."""

    op: ClassVar[str] = "wild"
    wild: ClassVar[bool] = True
    use: str

    @property
    def name(self) -> str:
        return f"wild-{self.use}"

    def line(self) -> str:
        return f"wild {self.use}"


@dataclass(frozen=True, slots=True)
class WildUse:
    """One wild use.

    Attributes:
        what: what is done, as a noun phrase.
        instead: what a caller has to do where the tree has a contract gap here.
        rows: how many rows must run.
        asserts: ``always`` or ``debug`` (with debug assertions on) where it may fail an assertion
            on the device, which not every device survives; or "".
    """

    what: str
    instead: str
    rows: int = 1
    asserts: str = ""


_GIVE_INDICES = "Set future_indices to the batch's empty req_pool_indices before the merge."
_ALL_MIRRORS = "Give both sides the host mirror, or neither."
_ONE_FORM = "Merge a relayed draft input with relayed ones only, a stored one with stored ones."
_DISTINCT = "Give every slot once."

WILD_USES: dict[str, WildUse] = {
    "merge-raw-idle-right": WildUse(
        "a relayed draft input merged with what create_idle_input returns", _GIVE_INDICES
    ),
    "merge-raw-idle-left": WildUse(
        "what create_idle_input returns merged with a relayed draft input", _GIVE_INDICES
    ),
    "resolve-without-indices": WildUse(
        "a draft input resolved whose future_indices are None",
        "Resolve only what has future_indices; a stored draft input needs no resolve.",
    ),
    "mirror-left-only": WildUse(
        "a draft input with a host mirror merged with one that has none", _ALL_MIRRORS
    ),
    "mirror-right-only": WildUse(
        "a draft input without a host mirror merged with one that has it", _ALL_MIRRORS
    ),
    "relayed-with-stored": WildUse("a relayed draft input merged with a stored one", _ONE_FORM),
    "stored-with-relayed": WildUse("a stored draft input merged with a relayed one", _ONE_FORM),
    "filter-duplicates": WildUse(
        "a draft input filtered by indices that name a row twice", "Name every row once."
    ),
    "filter-out-of-range": WildUse(
        "a draft input filtered by an index that is its number of rows",
        "Keep indices below the number of rows.",
        asserts="always",
    ),
    "filter-nothing": WildUse(
        "a draft input filtered by no indices", "Drop a batch that keeps no row."
    ),
    "publish-duplicates": WildUse("one slot published twice at once, with two lengths", _DISTINCT),
    "stash-duplicates": WildUse("one slot stashed twice at once, with two tokens", _DISTINCT),
    "padding": WildUse(
        "the padding slot published and stashed several times beside real rows",
        "Leave padding rows out of publish and stash.",
    ),
    "permuted-indices": WildUse(
        "a batch resolved whose future_indices have another order than its req_pool_indices",
        "Keep future_indices and req_pool_indices in the order of the requests.",
        rows=2,
    ),
    "resolve-unwritten": WildUse(
        "a row resolved that nobody ever wrote",
        "Publish and stash a row before it is resolved.",
        asserts="debug",
    ),
    "prepare-twice": WildUse(
        "a draft input prepared for a decode twice with no forward between",
        "Run a forward between two prepares.",
    ),
}
"""What the API accepts and no scheduler path issues, by name."""

ALPHABET: dict[str, type[Operation]] = {
    kind.op: kind
    for kind in (
        *(Admit, Mixed, Seed, Adopt, Merge, Step, Sync, Finish, Filter, Retract, Preempt, Idle),
        *(Law, Wild),
    )
}


@dataclass(frozen=True, slots=True)
class Header:
    """The setting of a trace.

    Attributes:
        pool: rows of the relay, slot 0 (padding) included.
        block: draft block size in tokens.
        page: KV page size in tokens.
        overlap: relay (True) or the synchronous loop, in which nothing is relayed.
        seeded: whether requests arrive prefilled (a decode server) instead of being prefilled.
        needs_cpu_seq_lens: whether an attention backend wants host lengths.
        debug: whether the tree runs with its debug assertions (a property of the process).
        compiled: whether those assertions run compiled, as they do in production, or eagerly.
        token_bits: token ids are below ``2**token_bits``.
        seed: of the token values.
        kv_tokens: tokens of the KV pool; 0 where every request comes with a whole row allocated, so
            that no slots are needed and lengths can be anything.
        context: longest context of the model in tokens, where there is a KV pool.
        plan_stream: whether a decode is prepared on a stream of its own.
    """

    algorithm: str = "DFLASH"
    pool: int = 8
    block: int = 4
    page: int = 1
    overlap: bool = True
    seeded: bool = False
    needs_cpu_seq_lens: bool = True
    debug: bool = False
    compiled: bool = False
    token_bits: int = 31
    seed: int = 0
    kv_tokens: int = 0
    context: int = 0
    plan_stream: bool = False

    def line(self) -> str:
        return (
            f"{self.algorithm} pool {self.pool}, block {self.block}, page {self.page}, "
            f"overlap {'on' if self.overlap else 'off'}, "
            f"{'seeded, ' if self.seeded else ''}"
            f"host lengths {'on' if self.needs_cpu_seq_lens else 'off'}, "
            f"debug {'off' if not self.debug else 'compiled' if self.compiled else 'on'}, "
            f"{f'KV pool {self.kv_tokens} tokens, context {self.context}, ' * bool(self.context)}"
            f"{'plan stream, ' if self.plan_stream else ''}"
            f"seed {self.seed}"
        )


_INTEGERS = 1 << 31
"""Integers of a trace are below this; lengths are int32 on the host."""

_BOUNDS = {
    "pool": (2, 1 << 20),
    "block": (1, 1024),
    "page": (1, 1024),
    "token_bits": (20, 63),
    "kv_tokens": (0, 1 << 20),
    "context": (0, 1 << 14),
}


@dataclass(frozen=True)
class Trace:
    """A header and its operations."""

    header: Header
    operations: tuple[Operation, ...] = field(default=())

    def lines(self) -> list[str]:
        return [f"{i + 1:2}. {operation.line()}" for i, operation in enumerate(self.operations)]

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "header": dataclasses.asdict(self.header),
            "operations": [operation.as_json() for operation in self.operations],
        }

    @classmethod
    def from_json(cls, data: Any) -> Trace:
        """Read a trace; raises :class:`TraceError` with one line on anything malformed."""
        if not isinstance(data, dict) or "operations" not in data or "header" not in data:
            raise TraceError(
                "not a trace: a JSON object with 'header' and 'operations' is expected"
            )
        if data.get("schema") != SCHEMA:
            raise TraceError(
                f"trace schema {data.get('schema')!r} is not the supported {SCHEMA}; "
                "use the version of dflash-conformance that wrote it"
            )
        header = read_record(Header, data["header"], "header")
        if header.algorithm != "DFLASH":
            raise TraceError(
                f"header: algorithm {header.algorithm!r} is not supported, only DFLASH"
            )
        for name, (low, high) in _BOUNDS.items():
            if not low <= getattr(header, name) <= high:
                raise TraceError(f"header: '{name}' must be between {low} and {high}")
        if bool(header.kv_tokens) != bool(header.context):
            raise TraceError("header: 'kv_tokens' and 'context' go together")
        if not isinstance(data["operations"], list):
            raise TraceError("'operations' must be a list")
        operations = []
        for number, entry in enumerate(data["operations"], 1):
            if not isinstance(entry, dict) or entry.get("op") not in ALPHABET:
                given = entry.get("op") if isinstance(entry, dict) else entry
                raise TraceError(f"operation {number}: {given!r} is not in the alphabet")
            values = {k: v for k, v in entry.items() if k != "op"}
            operations.append(read_record(ALPHABET[entry["op"]], values, f"operation {number}"))
        return cls(header, tuple(operations))

    @classmethod
    def loads(cls, text: str) -> Trace:
        """Read a trace from JSON text: a bare trace, or a failure file that holds one."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"not JSON: {error}") from None
        if isinstance(data, dict) and isinstance(data.get("trace"), dict):
            data = data["trace"]
        return cls.from_json(data)


def read_record(kind: Any, data: Any, where: str) -> Any:
    """Build a dataclass from JSON values, checking names and types; TraceError in one line."""
    if not isinstance(data, dict):
        raise TraceError(f"{where}: an object is expected")
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    unknown = sorted(set(data) - set(fields))
    if unknown:
        raise TraceError(f"{where}: unknown field '{unknown[0]}'")
    values = {}
    for name, spec in fields.items():
        if name in data:
            values[name] = _coerce(hints[name], data[name], f"{where}: '{name}'")
        elif spec.default is dataclasses.MISSING:
            raise TraceError(f"{where}: field '{name}' is missing")
    return kind(**values)


def _coerce(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if origin is tuple and isinstance(value, list | tuple):
        inner = typing.get_args(hint)
        if inner[-1] is Ellipsis:
            return tuple(_coerce(inner[0], item, where) for item in value)
        if len(value) == len(inner):
            return tuple(_coerce(h, item, where) for h, item in zip(inner, value, strict=True))
    elif origin is types.UnionType:
        if value is None:
            return None
        return _coerce(typing.get_args(hint)[0], value, where)
    elif isinstance(hint, type) and type(value) is hint:
        if isinstance(value, int) and not 0 <= value < _INTEGERS:
            raise TraceError(f"{where} must be between 0 and {_INTEGERS - 1}")
        return value
    raise TraceError(f"{where} has the wrong type")
