"""What a tree offers: its entry points, and its capabilities found by looking, not by version.

:func:`open_tree` loads one tree into this process (once; a process serves one tree) and returns a
:class:`Surface`. A missing black-box entry point raises :class:`~conformance.errors.NoEntryPoint`;
everything else a tree lacks only costs the clauses that need it.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from conformance.errors import NoEntryPoint
from conformance.kernels.sources import MODULES, narrow_buffer
from conformance.sut import doubles, loop_doubles
from conformance.sut.device import Device
from conformance.sut.doubles import Settings
from conformance.sut.fields import FIELDS, OWNERS, Field
from conformance.sut.isolation import Edit, Isolation, StandInUsed
from generators.protocol import Capabilities

_SRT = "sglang.srt"
RELAY = f"{_SRT}.managers.overlap_utils"
DRAFT = f"{_SRT}.speculative.dflash_info_v2"
ALGORITHM = f"{_SRT}.speculative.spec_info"
WORKER = f"{_SRT}.speculative.dflash_worker_v2"
BATCH = f"{_SRT}.managers.schedule_batch"
MODES = f"{_SRT}.model_executor.forward_batch_info"
SCHEDULER = f"{_SRT}.managers.scheduler"
ARGUMENTS = f"{_SRT}.arg_groups.speculative_hook"
PREBUILT = f"{_SRT}.disaggregation.decode"
KV = f"{_SRT}.mem_cache."
SIZING = f"{KV}allocation_sizing"
EAGLE = f"{_SRT}.speculative.eagle_utils"
EAGLE_DRAFT = f"{_SRT}.speculative.eagle_info_v2"
POLICY = f"{_SRT}.managers.schedule_policy"
PROCESSOR = f"{_SRT}.managers.scheduler_components.batch_result_processor"
RESULTS = f"{_SRT}.managers.utils"
SAMPLING = f"{_SRT}.sampling.sampling_params"
TRANSLATOR = f"{KV}kv_index_translator"

REAL = (
    RELAY,
    DRAFT,
    ALGORITHM,
    WORKER,
    BATCH,
    MODES,
    SCHEDULER,
    f"{_SRT}.environ",
    f"{_SRT}.speculative.draft_worker_common",
    f"{_SRT}.speculative.spec_utils",
    f"{_SRT}.speculative.triton_ops.gather_spec_extras",
    "sglang.kernels.ops.speculative.gather_spec_extras",
    *(
        KV + name
        for name in (
            "allocation",
            "allocation_sizing",
            "allocator",
            "allocator.base",
            "allocator.page_interleave",
            "allocator.paged",
            "allocator.token",
            "base_prefix_cache",
            "cache_init_params",
            "chunk_cache",
            "common",
            "events",
            "evict_policy",
            "kv_index_translator",
            "kv_loc_plan",
            "memory_pool",
            "prefill_budget",
            "radix_cache",
            "session_radix_cache",
            "triton_ops.allocator",
            "triton_ops.cache_move",
            "triton_ops.common",
            "unified_cache.component_type",
            "utils",
        )
    ),
    "sglang.kernels.ops.memory.allocator",
    "sglang.kernels.ops.memory.common",
    EAGLE,
    EAGLE_DRAFT,
    f"{_SRT}.speculative.triton_ops.cache_locs",
    f"{_SRT}.dllm.mixin.req",
    f"{_SRT}.beam_search.batch_tail",
    f"{_SRT}.disaggregation.decode_schedule_batch_mixin",
    f"{_SRT}.speculative.dflash_disaggregation",
    PREBUILT,
    # What only the whole loop runs.
    POLICY,
    PROCESSOR,
    RESULTS,
    SAMPLING,
    f"{_SRT}.disaggregation.utils",
    f"{_SRT}.managers.scheduler_components.new_token_ratio_tracker",
    f"{_SRT}.model_executor.triton_ops.position",
    f"{_SRT}.speculative.base_spec_worker",
    f"{_SRT}.speculative.dflash_info",
    f"{_SRT}.speculative.dflash_utils",
    f"{_SRT}.speculative.spec_tp_sync",
    "sglang.kernels.ops.attention.position",
    "sglang.kernels.ops.kvcache.cache_move",
    "sglang.kernels.ops.speculative.cache_locs",
    *MODULES,
)
"""Modules loaded from the tree where it has them: the code under test and what it runs."""


SLOTS_APART = 3
"""Distance of two rows' KV slots for the same position in :func:`make_pool`."""

MEASURED = (RELAY, DRAFT)
"""Modules whose never executed lines a report lists."""


@dataclass
class Surface:
    """One loaded tree.

    Attributes:
        future_map, draft_input, schedule_batch, forward_mode, worker: the tree's classes.
        builder: a bare worker: its methods resolve, it has no state.
        no_capture: its mode of a request that wants no hidden states.
        resolve_forward_inputs: the tree's function.
        payload: makes what ``stash`` takes from a draft input.
        algorithm: ``SpeculativeAlgorithm.DFLASH``.
        scheduler: the tree's ``Scheduler``, or None where it does not load.
        isolation_of: the scheduler's ``_forward_isolation``, or None.
        settings: the answers that traces change (block size).
        token_field: the draft input's field for the bonus token.
        token_argument: the builders' parameter for it.
        capabilities: what the protocol's rules depend on.
        features: names of optional capabilities (see :data:`conformance.words.FEATURES`).
        census: declared fields of this tree, by owner.
        fields: attributes of a draft input and of the relay, by owner.
        functions: public functions of the surface and how they are called.
        notes: what was not recognised, one line each.
        kv_slots: numbers of KV slots, for the tables of :func:`make_pool`.
    """

    root: Path
    device: Device
    loader: Isolation
    debug: bool
    settings: Settings
    future_map: Any = None
    draft_input: Any = None
    schedule_batch: Any = None
    forward_mode: Any = None
    no_capture: Any = None
    worker: Any = None
    builder: Any = None
    resolve_forward_inputs: Any = None
    payload: Any = None
    algorithm: Any = None
    scheduler: Any = None
    isolation_of: Any = None
    token_field: str = ""
    token_argument: str = ""
    prefill_arguments: frozenset[str] = frozenset()
    decode_arguments: frozenset[str] = frozenset()
    filter_arguments: frozenset[str] = frozenset()
    token_channel: str | None = None
    length_channel: str | None = None
    token_dtype: torch.dtype = torch.int64
    poison_tokens: bool = False
    poison_lengths: bool = False
    capabilities: Capabilities = field(default_factory=Capabilities)
    features: frozenset[str] = frozenset()
    census: dict[str, dict[str, Field]] = field(default_factory=dict)
    fields: dict[str, list[str]] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    kv_slots: torch.Tensor | None = None

    def draft_fields(self, kind: str) -> list[Field]:
        """Census records of one kind whose attribute this tree's draft input has."""
        present = vars(self.draft_input)["__dataclass_fields__"]
        return [f for f in self.census["draft"].values() if f.kind == kind and f.name in present]

    def function(self, module: str, name: str) -> Any:
        """A function of one of the tree's real modules."""
        return getattr(importlib.import_module(module), name)

    def as_json(self) -> dict[str, Any]:
        """The tree as a report shows it."""
        loader = self.loader
        return {
            "torch": torch.__version__,
            "triton": getattr(sys.modules.get("triton"), "__version__", None),
            "device": _device_name(self.device.device),
            "digest": loader.digest(),
            "features": sorted(self.features),
            "roles": {
                "draft.tokens": self.token_field,
                "relay.tokens": self.token_channel,
                "relay.lengths": self.length_channel,
            },
            "token_dtype": str(self.token_dtype).removeprefix("torch."),
            "token_bits": self.capabilities.token_bits,
            "capabilities": asdict(self.capabilities),
            "fields": self.fields,
            "functions": self.functions,
            "real": sorted(loader.loaded),
            "doubles": sorted(loader.used_doubles) + self.device.doubles,
            "inert": sorted(loader.inert),
            "missing_packages": sorted(loader.missing),
            "notes": self.notes,
        }


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def open_tree(
    root: Path,
    device: Device,
    *,
    debug: bool,
    edits: Mapping[str, Edit] | None = None,
    relocated: Mapping[str, str] | None = None,
    declared: Sequence[Field] = (),
) -> Surface:
    """Load the tree below `root` and probe it.

    Args:
        root: folder that holds ``sglang/``.
        device: prepared by the caller.
        debug: whether the tree's own debug assertions bind (they do so at import).
        edits: module name to syntax-tree edit (seeded faults).
        relocated: module name to path below `root` (``--map``).
        declared: further census records (``--declare``).

    Raises:
        NoEntryPoint: the tree has no relay, draft input, batch or builder any more.
    """
    os.environ["SGLANG_IS_IN_CI"] = "1" if debug else "0"
    settings = doubles.settings()
    loop_doubles.settings(settings, device.answers)
    found = doubles.doubles(device.answers, settings) | loop_doubles.doubles(settings)
    loader = Isolation(
        *(root, REAL, found),
        relocated=relocated or {},
        edits=edits or {},
        accelerated=bool(device.answers),
    )
    loader.install()
    surface = Surface(root, device, loader, debug, settings)
    _find_entry_points(surface)
    loader.seal()
    try:
        _probe(surface, declared)
        _drive(surface)
    except (NoEntryPoint, StandInUsed):
        raise
    except Exception as error:
        kind = type(error).__name__
        raise NoEntryPoint(f"the relay cannot be driven: {kind}: {_one_line(error)}") from error
    return surface


def _load(surface: Surface, module: str, *names: str) -> list[Any]:
    """Attributes of a module of the tree; NoEntryPoint if the module or one of them is missing."""
    if surface.loader.source_of(module) is None:
        raise NoEntryPoint(
            f"the tree has no {module}; if the file moved, say where with --map {module}=PATH"
        )
    try:
        loaded = importlib.import_module(module)
    except Exception as error:
        raise NoEntryPoint(
            f"{module} does not load: {type(error).__name__}: {_one_line(error)}"
        ) from error
    missing = [name for name in names if not hasattr(loaded, name)]
    if missing:
        raise NoEntryPoint(f"{module} has no {missing[0]} any more")
    return [getattr(loaded, name) for name in names]


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _find_entry_points(surface: Surface) -> None:
    surface.future_map, surface.resolve_forward_inputs = _load(
        surface, RELAY, "FutureMap", "resolve_forward_inputs"
    )
    (surface.draft_input,) = _load(surface, DRAFT, "DFlashDraftInputV2")
    (algorithms,) = _load(surface, ALGORITHM, "SpeculativeAlgorithm")
    (surface.schedule_batch,) = _load(surface, BATCH, "ScheduleBatch")
    surface.forward_mode, capture = _load(surface, MODES, "ForwardMode", "CaptureHiddenMode")
    surface.no_capture = capture.NULL
    (surface.worker,) = _load(surface, WORKER, "DFlashWorkerV2")
    surface.builder = object.__new__(surface.worker)
    if not hasattr(algorithms, "DFLASH"):
        raise NoEntryPoint("SpeculativeAlgorithm has no DFLASH")
    surface.algorithm = algorithms.DFLASH
    for owner, name in (
        (surface.future_map, "publish"),
        (surface.future_map, "stash"),
        (surface.future_map, "resolve_seq_lens_cpu"),
        (surface.draft_input, "filter_batch"),
        (surface.draft_input, "merge_batch"),
        (surface.draft_input, "create_idle_input"),
        (surface.draft_input, "prepare_for_decode"),
        (surface.schedule_batch, "filter_batch"),
        (surface.schedule_batch, "merge_batch"),
        (surface.worker, "_make_next_draft_input_prefill"),
        (surface.worker, "_make_next_draft_input_decode"),
    ):
        if not hasattr(owner, name):
            raise NoEntryPoint(f"{owner.__name__} has no {name} any more")
    payload = getattr(sys.modules[RELAY], "RelayPayload", None)
    if payload is None:
        # Before the payload class existed, stash took the draft input itself.
        surface.payload = lambda draft: draft
    elif hasattr(payload, "from_draft_input"):
        surface.payload = payload.from_draft_input
    else:
        raise NoEntryPoint("RelayPayload has no from_draft_input any more")
    try:
        (surface.scheduler,) = _load(surface, SCHEDULER, "Scheduler")
        surface.isolation_of = vars(surface.scheduler).get("_forward_isolation")
    except NoEntryPoint as error:
        surface.notes.append(f"R11 is not checked: {error}")


def _probe(surface: Surface, declared: Sequence[Field]) -> None:
    fields = {f.name for f in vars(surface.draft_input)["__dataclass_fields__"].values()}
    prefill = _keywords(surface.worker._make_next_draft_input_prefill)
    decode = _keywords(surface.worker._make_next_draft_input_decode)
    tokens = [name for name, required in decode.items() if required and name != "new_seq_lens"]
    if len(tokens) != 1 or "new_seq_lens" not in decode:
        raise NoEntryPoint("the worker's builder of a draft input has arguments not seen before")
    surface.token_argument = tokens[0]
    surface.prefill_arguments = frozenset(prefill)
    surface.decode_arguments = frozenset(decode)
    surface.filter_arguments = frozenset(_keywords(surface.draft_input.filter_batch))
    surface.token_field = _token_field(surface)

    census: dict[str, dict[str, Field]] = {owner: {} for owner in OWNERS}
    # Whatever the tree calls the bonus token's field: it was recognised, so it needs no record.
    for record in (*FIELDS, Field("draft", surface.token_field, "row"), *declared):
        census[record.owner][record.name] = record
    surface.census = census

    relay = make_relay(surface, make_pool(surface, 4), needs_cpu_seq_lens=True)
    draft = _probe_channels(surface, relay)
    for channel in filter(None, (surface.token_channel, surface.length_channel)):
        census["relay"].setdefault(channel, Field("relay", channel, "channel"))
    surface.fields = {
        "draft": sorted(vars(draft)),
        "relay": sorted(vars(relay)),
        "batch": sorted(f.name for f in dataclasses.fields(surface.schedule_batch)),
    }
    surface.functions = dict(_functions(surface))
    surface.poison_tokens = _poisoned(surface, relay, surface.token_channel)
    surface.poison_lengths = _poisoned(surface, relay, surface.length_channel)
    idle, reason = idle_is_legal(surface.root)
    if reason:
        surface.notes.append(reason)
    scheduler = {} if surface.scheduler is None else vars(surface.scheduler)
    surface.capabilities = Capabilities(
        idle=idle,
        defers_prefill="_should_defer_prefill" in scheduler,
        filters_first=_filters_first(scheduler),
        skips_finishing="_reqs_finishing_inflight" in scheduler,
        mixed=_mixes(surface),
        seed=False,  # only shows when the tree is driven
        token_bits=_token_bits(surface),
        reserves_two_blocks=_reserves_two_blocks(surface),
        survives_assertion=surface.device.survives_assertion,
    )
    features = {
        "idle": idle,
        "mixed": surface.capabilities.mixed,
        "filters_first": surface.capabilities.filters_first,
        "skips_finishing": surface.capabilities.skips_finishing,
        "debug": surface.debug,
        "host_index_filter": "new_indices_cpu" in surface.filter_arguments,
        "host_lengths_lag": "planning_seq_lens_cpu" in fields,
        "direct_carry": "direct_carry_valid" in fields,
        "isolation": surface.isolation_of is not None,
        "poison_lengths": surface.poison_lengths,
        "poison_tokens": surface.poison_tokens,
        "channels": bool(surface.token_channel and surface.length_channel),
    }
    surface.features = frozenset(name for name, present in features.items() if present)


def _drive(surface: Surface) -> None:
    """Add what only shows when the tree is driven."""
    from conformance.sut import probes  # it drives what this module finds

    if surface.debug and probes.consumes_publish_once(surface):
        surface.features |= {"freshness"}
    seeds, reason = probes.seeds(surface)
    if reason:
        surface.notes.append(reason)
    if seeds:
        # Where it cannot be driven, a run says that it was never reached.
        surface.features |= {"seed"}
        driven = reason is None
        surface.capabilities = dataclasses.replace(surface.capabilities, seed=driven)


def _reserves_two_blocks(surface: Surface) -> bool:
    """Whether the tree's memory check counts on two blocks ahead for a decode."""
    found = sizing(surface, "get_alloc_reserve_per_decode")
    block = int(surface.settings.speculative_num_draft_tokens)
    return found is not None and bool(found() == 2 * block)


def sizing(surface: Surface, name: str) -> Any:
    """A function by which the tree sizes what it allocates, wherever it has it, or None."""
    modules = (m for m in (SIZING, KV + "common") if surface.loader.source_of(m) is not None)
    found = (getattr(importlib.import_module(module), name, None) for module in modules)
    return next(filter(None, found), None)


def _mixes(surface: Surface) -> bool:
    """Whether the argument checks leave mixed chunked prefill on for DFlash."""
    supports = getattr(surface.algorithm, "supports_mixed_chunk", None)
    mixes = hasattr(surface.schedule_batch, "mix_with_running")
    return mixes and supports is not None and bool(supports())


def _filters_first(scheduler: Mapping[str, Any]) -> bool:
    """Whether the scheduler filters the running batch before it forms any prefill batch.

    That is: ``get_next_batch_to_run`` calls ``running_batch.filter_batch`` under no condition.
    """
    function = scheduler.get("get_next_batch_to_run")
    if function is None:
        return False
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.FunctionDef)
    calls = (statement.value for statement in definition.body if isinstance(statement, ast.Expr))
    names = (ast.unparse(call.func) for call in calls if isinstance(call, ast.Call))
    return any(name.endswith("running_batch.filter_batch") for name in names)


def _token_field(surface: Surface) -> str:
    """The draft input's attribute that holds the bonus tokens, found by building one."""
    token, device = 77_001, surface.device.device
    draft: object = make_draft_input(
        surface, torch.tensor([token], device=device), torch.tensor([1], device=device)
    )
    for name, value in vars(draft).items():
        if isinstance(value, torch.Tensor) and value.numel() == 1 and int(value) == token:
            return name
    raise NoEntryPoint("the worker's builder makes a draft input without its bonus tokens")


def _poisoned(surface: Surface, relay: Any, channel: str | None) -> bool:
    """Whether rows are born poisoned: under debug each must be written before it is resolved."""
    return bool(surface.debug and channel and (getattr(relay, channel) == -1).sum() >= 3)


def _keywords(function: Any) -> dict[str, bool]:
    """Parameter names of `function` (self aside) and whether each is required."""
    return {
        name: parameter.default is inspect.Parameter.empty
        for name, parameter in inspect.signature(function).parameters.items()
        if name != "self"
    }


def make_pool(surface: Surface, rows: int, width: int = 1) -> Settings:
    """The request pool, as far as the relay and the batch ask for it.

    ``req_to_token`` (rows, width) int32 holds a KV slot for every row and position: those of row r
    are r * :data:`SLOTS_APART` + position. Nobody writes it, so the rows overlap in memory.
    """
    device = surface.device.device
    size = width + (rows - 1) * SLOTS_APART
    if surface.kv_slots is None or len(surface.kv_slots) < size:
        surface.kv_slots = torch.arange(size, dtype=torch.int32, device=device)
    slots = surface.kv_slots[:size]
    return Settings(
        req_to_token=slots.as_strided((rows, width), (SLOTS_APART, 1)),
        req_generation=torch.zeros((rows,), dtype=torch.int64),
        size=rows - 1,
        device=str(device),
    )


def make_relay(surface: Surface, pool: Settings, *, needs_cpu_seq_lens: bool) -> Any:
    """A fresh ``FutureMap`` of the tree with one row per row of `pool`."""
    return surface.future_map(surface.device.device, surface.algorithm, pool, needs_cpu_seq_lens)


def make_draft_input(
    surface: Surface,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    *,
    prefill: bool = False,
    **mirrors: Any,
) -> Any:
    """A live draft input from the worker's own builder; `mirrors` if the builder takes them."""
    accepted = surface.prefill_arguments if prefill else surface.decode_arguments
    extra = mirrors if mirrors.keys() <= accepted else {}
    extra[surface.token_argument] = tokens
    if prefill:
        extra["seq_lens"] = lengths
        return surface.worker._make_next_draft_input_prefill(surface.builder, **extra)
    extra["new_seq_lens"] = lengths
    return surface.worker._make_next_draft_input_decode(surface.builder, **extra)


def _functions(surface: Surface) -> Iterator[tuple[str, str]]:
    """Public functions of the surface by qualified name, with their parameters.

    An optional parameter is written ``name=default``; parameters after ``*`` go by name only.
    """
    module = sys.modules[RELAY]
    for name, function in vars(module).items():
        if inspect.isfunction(function) and function.__module__ == RELAY and name[0] != "_":
            yield name, _parameters(function)
    owners: list[tuple[Any, Sequence[str]]] = [
        (owner, [name for name in vars(owner) if name[0] != "_"])
        for owner in (
            surface.future_map,
            surface.draft_input,
            getattr(module, "RelayPayload", None),
        )
        if owner is not None
    ]
    owners.append((surface.schedule_batch, ("filter_batch", "merge_batch")))
    builders = ("_make_next_draft_input_prefill", "_make_next_draft_input_decode")
    owners.append((surface.worker, builders))
    for owner, names in owners:
        for name in names:
            function = inspect.unwrap(getattr(owner, name))
            if inspect.isroutine(function):
                yield f"{owner.__name__}.{name}", _parameters(function)


_PLAIN = (bool, int, float, str, type(None))
"""Types of defaults that say what they are."""


def _parameters(function: Any) -> str:
    words: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        default = parameter.default
        if default is parameter.empty:
            words.append(name)
        else:
            words.append(f"{name}={default if isinstance(default, _PLAIN) else '...'}")
    return f"({', '.join(words)})"


def _probe_channels(surface: Surface, relay: Any) -> Any:
    """Find the two channels by writing a row through the public calls and looking for it.

    Returns:
        The draft input that was written.
    """
    device = surface.device.device
    slots = torch.tensor([2], device=device)
    token, length = 77_001, 88_003
    draft = make_draft_input(
        surface,
        torch.tensor([token], device=device),
        torch.tensor([length], device=device),
    )
    surface.token_dtype = getattr(draft, surface.token_field).dtype
    try:
        relay.publish(slots, torch.tensor([length], device=device))
        relay.stash(slots, surface.payload(draft))
    except StandInUsed:
        raise
    except Exception as error:  # the first trace will report it
        surface.notes.append(f"probing the relay raised {type(error).__name__}")
    for name, value in vars(relay).items():
        if isinstance(value, torch.Tensor) and value.dim() == 1 and value.shape[0] == 4:
            if bool((value == token).any()):  # in whatever row: which one is P1's business
                surface.token_channel = name
            elif bool((value == length).any()):
                surface.length_channel = name
    for what, channel in (("token", surface.token_channel), ("length", surface.length_channel)):
        if channel is None:
            surface.notes.append(
                f"the relay's {what} buffer was not recognised: white-box clauses are not checked"
            )
    return draft


def _token_bits(surface: Surface) -> int:
    """Bits that a token id may have on the whole path: the channel, and the worker's own buffer."""
    if surface.token_dtype != torch.int64:
        return 31
    narrow = narrow_buffer(surface.loader.source_of(WORKER))
    if narrow is not None:
        return 31 if narrow else 63
    surface.notes.append("the worker's token buffer was not recognised: ids stay below 2**31")
    return 31


class _Lenient:
    """Stands for the server arguments of a DP-attention launch while a check is evaluated."""

    _ANSWERS: ClassVar[dict[str, Any]] = {
        "enable_dp_attention": True,
        "enable_dp_lm_head": True,
        "device": "cuda",
        "attn_cp_size": 1,
        "dp_size": 2,
        "pp_size": 1,
    }

    def __getattr__(self, name: str) -> Any:
        return self._ANSWERS.get(name, _Lenient())

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __bool__(self) -> bool:
        return False


class _Namespace(dict[str, Any]):
    """Names of an argument check: helpers that ask for DP attention say yes, others are lenient."""

    def __missing__(self, name: str) -> Any:
        if "dp" in name and name.startswith("attn"):
            return lambda *_: True
        return _Lenient()


def idle_is_legal(root: Path) -> tuple[bool, str | None]:
    """Whether the tree's own argument check admits DP attention with DFlash on CUDA.

    Idle batches come from DP attention alone. Every ``raise`` of ``_handle_dflash`` whose message
    names DP attention is read, with the conditions around it evaluated for a CUDA launch with DP
    attention on and its other requirements met.

    Returns:
        (legal, None), or (False, why it could not be told).
    """
    path = root.joinpath(*ARGUMENTS.split(".")).with_suffix(".py")
    if not path.is_file():
        return False, "idle is treated as wild: the tree's argument checks were not found"
    for function in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(function, ast.FunctionDef) and function.name == "_handle_dflash":
            try:
                return not _raises_about_dp(function.body), None
            except Exception as error:  # a check of a shape not seen before
                return False, f"idle is treated as wild: its argument check reads {error}"
    return False, "idle is treated as wild: the tree has no argument check for DFlash"


def _names_dp(statement: ast.stmt) -> bool:
    raises = (ast.unparse(n).lower() for n in ast.walk(statement) if isinstance(n, ast.Raise))
    return any("dp attention" in text or "dp_attention" in text for text in raises)


def _raises_about_dp(body: Sequence[ast.stmt]) -> bool:
    for statement in filter(_names_dp, body):
        if isinstance(statement, ast.Raise):
            return True
        if isinstance(statement, ast.If):
            code = compile(ast.Expression(statement.test), "<argument check>", "eval")
            branch = statement.body if eval(code, {}, _Namespace()) else statement.orelse
            if _raises_about_dp(branch):
                return True
    return False
