"""Does what SGLang's DFlash reserves for a decode end beyond the request's row of req_to_token?

    python reserve-beyond-row.py FOLDER

FOLDER holds ``sglang/`` (a site-packages, an unpacked wheel, or ``python/`` of a checkout). Needs
torch, numpy and triton; no GPU, no other package, no network: kernels run on the CPU in Triton's
interpreter, which this script asks for with TRITON_INTERPRET=1.

The tree's own, as it is: the length of a row, ``prepare_for_decode``, the pools, the allocators,
the cache that shares no prefixes, the requests, and ``release_kv_cache`` (the modules of
:data:`REAL`). Everything else of SGLang is a placeholder; what those modules ask of it is in
:data:`ANSWERS`. The script itself gives requests the slots of their first tokens, as a prefill
would, and puts memory below the table, so that a write beyond its last row does no harm here.

First a request 4 tokens before the context length is prepared with several blocks and pages, then
two requests in neighbouring rows are prepared, and released.

Exit status: 0 it does not, 1 it does (the defect), 2 it could not be tried.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import itertools
import os
import sys
import types
from array import array
from collections import Counter
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch

CONTEXT, POOL = 64, 1024
"""The model's context length, and the tokens that the KV cache holds."""

BLOCKS = (4, 8, 9, 16, 32)

KV = "sglang.srt.mem_cache."
BATCH = "sglang.srt.managers.schedule_batch"
DRAFT = "sglang.srt.speculative.dflash_info_v2"
WRITER = "sglang.srt.speculative.triton_ops.cache_locs"
REAL = {
    *(BATCH, DRAFT, WRITER, "sglang.srt.speculative.spec_info", "sglang.srt.dllm.mixin.req"),
    *("sglang.kernels.ops.memory.allocator", "sglang.kernels.ops.memory.common"),
    *(KV + name for name in ("allocation", "allocation_sizing", "allocator", "allocator.base")),
    *(KV + name for name in ("allocator.page_interleave", "allocator.paged", "allocator.token")),
    *(KV + name for name in ("base_prefix_cache", "cache_init_params", "chunk_cache", "common")),
    *(KV + name for name in ("events", "memory_pool", "radix_cache", "session_radix_cache")),
    *(KV + name for name in ("triton_ops.allocator", "triton_ops.common", "utils")),
    KV + "unified_cache.component_type",
}
"""The modules that are the tree's own, where it has them."""

SETTINGS = SimpleNamespace(
    speculative_algorithm="DFLASH",
    speculative_num_steps=1,
    speculative_eagle_topk=1,
    attention_backend="triton",
    attn_dcp_size=1,
    strip_thinking_cache=False,
)
"""The server arguments; :class:`Server` adds block and page."""


class Anything(type):
    """The type of the placeholder: whatever is asked of it is the placeholder; it is false."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing

    def __call__(cls, *given: Any, **named: Any) -> Any:
        if cls is not Nothing:
            return super().__call__(*given, **named)  # a class of the tree that inherits from it
        return given[0] if given and inspect.isroutine(given[0]) else cls  # as a decorator

    def __bool__(cls) -> bool:
        return cls is not Nothing

    def __or__(cls, _: Any) -> Any:
        return cls

    __ror__ = __mul__ = __rmul__ = __or__


class Nothing(metaclass=Anything):
    """What stands for everything of SGLang that is not wanted."""

    def __class_getitem__(cls, _: Any) -> Any:
        return cls


class Placeholder(types.ModuleType):
    """A module of SGLang that is not loaded: it has the answers, and else the placeholder."""

    __path__: list[str] = []  # noqa: RUF012 (that is how a package says it is one)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return ANSWERS.get(name, Nothing)


class Finder:
    """Answers every import of SGLang."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name.partition(".")[0] != "sglang":
            return None
        base = self.folder / name.replace(".", "/")
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if name in REAL and path.is_file():
                inside = [str(base)] if path.parent == base else None
                return importlib.util.spec_from_file_location(
                    name, path, submodule_search_locations=inside
                )
        return ModuleSpec(name, self)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return Placeholder(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


def pages(tokens: Any, page: int) -> Any:
    """Pages that hold so many tokens."""
    return -(-tokens // page)


def new_pages(seq_lens: Any, page_size: int, prefix_lens: Any, **_: Any) -> int:
    """Pages to add to requests of `prefix_lens` tokens."""
    return int((pages(seq_lens, page_size) - pages(prefix_lens, page_size)).sum())


def settings(*_: Any) -> SimpleNamespace:
    """The server arguments, whichever of them are asked for."""
    return SETTINGS


def write(*given: Any) -> None:
    """The tree's own writer of the table, where a module that is not loaded passes it on."""
    own(WRITER, "assign_req_to_token_pool_func")(*given)


ANSWERS: dict[str, Any] = {
    "assign_req_to_token_pool_func": write,
    "attention_backends": lambda: ("triton", "triton"),
    "ceil_align": lambda tokens, page: pages(tokens, page) * page,
    "current_platform": SimpleNamespace(capabilities=SimpleNamespace(supports_triton=True)),
    "get_num_new_pages": new_pages,
    "is_pin_memory_available": lambda *_: False,
    "max_speculative_num_draft_tokens": lambda: SETTINGS.speculative_num_draft_tokens,
    "next_power_of_2": lambda number: 1 << (number - 1).bit_length(),
    "support_triton": lambda *_: True,
    "TorchMemorySaverAdapter": SimpleNamespace(
        create=lambda **_: SimpleNamespace(region=lambda *_: contextlib.nullcontext())
    ),
    **dict.fromkeys(("get_spec", "get_schedule", "get_parallel", "get_serving"), settings),
    **dict.fromkeys(("get_server_args", "get_global_server_args"), settings),
}
"""What the modules of REAL ask of the others."""


def own(module: str, name: str) -> Any:
    """Something of the tree's."""
    return getattr(importlib.import_module(module), name)


def required(function: Any) -> list[str]:
    """Arguments that must be given."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is inspect.Parameter.empty]


def holder(request: Any, name: str) -> Any:
    """What carries a length of a request: newer trees give it a record of its own."""
    kv = getattr(request, "kv", None)
    return kv if hasattr(kv, name) else request


def has(module: str) -> bool:
    """Whether the tree has a module of REAL."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.has_location


class Server:
    """The tree's pools, with requests that have been prefilled.

    Args:
        block, page: tokens of a block and of a page.
        lengths: of the requests, which get neighbouring rows.
    """

    def __init__(self, block: int, page: int, lengths: list[int]) -> None:
        SETTINGS.speculative_num_draft_tokens = block
        SETTINGS.max_speculative_num_draft_tokens = block
        SETTINGS.page_size = self.page = page
        sizing = KV + ("allocation_sizing" if has(KV + "allocation_sizing") else "common")
        beyond = own(sizing, "get_req_to_token_extra_context_len")
        self.width = CONTEXT + beyond(*[SETTINGS] * len(required(beyond)))
        pool = own(KV + "memory_pool", "ReqToTokenPool")
        self.pool = pool(len(lengths), self.width, "cpu", False)
        rows = self.pool.req_to_token.shape[0]
        self.pool.req_to_token = torch.zeros((rows + 1, self.width), dtype=torch.int32)[:rows]
        kind = "PagedTokenToKVPoolAllocator" if page > 1 else "TokenToKVPoolAllocator"
        paged = {"page_size": page} if page > 1 else {}
        self.allocator = own(KV + "allocator", kind)(
            POOL, **paged, dtype=torch.int64, device="cpu", kvcache=None, need_sort=False
        )
        chunk = ("chunk_cache", "ChunkCache")
        module, name = chunk if has(KV + chunk[0]) else ("radix_cache", "RadixCache")
        self.cache = own(KV + module, name)(
            own(KV + "cache_init_params", "CacheInitParams")(
                disable=True,
                req_to_token_pool=self.pool,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page,
            )
        )
        sampling = SimpleNamespace(
            top_k=1, max_new_tokens=1, custom_params=None, stop_strs=[], stop_regex_strs=[]
        )
        make = own(BATCH, "Req")
        self.requests = [make("", "", array("q", range(length)), sampling) for length in lengths]
        self.rows = self.pool.alloc(self.requests)
        for request, row, length in zip(self.requests, self.rows, lengths, strict=True):
            slots = self.allocator.alloc(pages(length, page) * page)
            self.pool.req_to_token[row, :length] = slots[:length]
            if getattr(request, "kv", request) is None:
                request.kv = own(BATCH, "ReqKvInfo")(kv_allocated_len=0, swa_evicted_seqlen=0)
            for name in ("kv_committed_len", "kv_allocated_len"):
                setattr(holder(request, name), name, length)

    def prepare(self) -> None:
        """Prepare a decode, as DFlash does."""
        batch = SimpleNamespace(
            device="cpu",
            reqs=self.requests,
            batch_size=lambda: len(self.requests),
            req_to_token_pool=self.pool,
            req_pool_indices=torch.tensor(self.rows),
            token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.cache,
            maybe_evict_swa=lambda: None,
            hisparse_coordinator=None,
        )
        own(DRAFT, "DFlashDraftInputV2").create_idle_input("cpu").prepare_for_decode(batch)

    def reserved(self, number: int) -> int:
        """What is reserved for a request, in tokens."""
        return int(holder(self.requests[number], "kv_allocated_len").kv_allocated_len)

    def row(self, number: int) -> list[int]:
        """The first 12 slots of a request."""
        return [int(slot) for slot in self.pool.req_to_token[self.rows[number], :12]]

    def release(self) -> Counter[int]:
        """Release all requests, in their order; returns how often every page is free then."""
        release = own(KV + "common", "release_kv_cache")
        insert = "checkpoint" if "checkpoint" in required(release) else "is_insert"
        for request in self.requests:
            request.finished_reason = "length"
            release(request, self.cache, **{insert: True})
        whole = getattr(self.allocator, "get_all_free_pages", None)
        lists = [self.allocator.free_pages, self.allocator.release_pages]
        return Counter((torch.cat(lists) if whole is None else whole()).tolist())


def neighbours(page: int) -> bool:
    """Prepare and release two requests; returns whether all went well."""
    server = Server(16, page, [CONTEXT - 4, 12])
    before = server.row(1)
    server.prepare()
    after = server.row(1)
    reserved = f"reserved {server.reserved(0)} and {server.reserved(1)}"
    print(f"block 16, page {page}, two requests: rows of {server.width}, {reserved}")
    print(f"  second's first slots: expected {before}")
    print(f"                        seen     {after}")
    free = server.release()
    every = range(1, POOL // page + 1)
    lost, twice = sum(not free[n] for n in every), sum(free[n] > 1 for n in every)
    unit = "pages" if page > 1 else "slots"
    print(f"  both released: expected 0 {unit} lost, 0 free twice, seen {lost} and {twice}")
    return after == before and not lost and not twice


def main(pages: Sequence[int] = (1, 16, 64), pairs: Sequence[int] = (1, 16)) -> int:
    """Try each of `pages` alone, and each of `pairs` with two requests in neighbouring rows."""
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    sys.meta_path.insert(0, Finder(Path(sys.argv[1])))
    beyond = {}
    try:
        if not has(DRAFT):
            raise LookupError(f"this tree has no {DRAFT}")
        for page, block in itertools.product(pages, BLOCKS):
            server = Server(block, page, [CONTEXT - 4])
            server.prepare()
            beyond[page, block] = max(0, server.reserved(0) - server.width)
    except Exception as error:
        print(f"could not be tried: {type(error).__name__}: {error}")
        return 2
    print(
        f"torch {torch.__version__}; tokens reserved beyond the row at {CONTEXT - 4} of {CONTEXT}"
    )
    print("         " + "".join(f"{f'block {block}':>10}" for block in BLOCKS))
    for page in pages:
        print(f"page {page:<4}" + "".join(f"{beyond[page, block]:>10}" for block in BLOCKS))
    well = [neighbours(page) for page in pairs]
    wrong = sum(map(bool, beyond.values()))
    print(
        "conforms" if not wrong and all(well) else f"DEFECT: {wrong} of {len(beyond)} leave the row"
    )
    return int(bool(wrong) or not all(well))


if __name__ == "__main__":
    sys.exit(main())
