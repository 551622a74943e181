"""Does SGLang's DFlash do what EAGLE does for the sliding window when it prepares a decode?

    python decode-bookkeeping.py FOLDER

FOLDER holds ``sglang/`` (a site-packages, an unpacked wheel, or ``python/`` of a checkout). Needs
torch; no GPU, no other package, no network.

Only the modules that prepare a decode, for DFlash and for EAGLE, are loaded (:data:`REAL`), as they
are; every other module of SGLang is a placeholder, so nothing is allocated. A batch of two requests
counts how often its eviction hook, ``maybe_evict_swa``, is called, and the requests have the
``decode_batch_idx`` that the hook asks for.

Exit status: 0 it does, 1 it does not (the defect), 2 it could not be tried.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

DRAFT = "sglang.srt.speculative.dflash_info_v2"
EAGLE = "sglang.srt.speculative.eagle_utils"
OLDER = "sglang.srt.speculative.eagle_info_v2"
REAL = {DRAFT, EAGLE, OLDER, "sglang.srt.mem_cache.allocation_sizing"}
"""The modules that are the tree's own, where it has them."""


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


class Nothing(metaclass=Anything):
    """What stands for everything of SGLang that is not wanted; classes may inherit from it."""

    def __init__(self, **_: Any) -> None:
        """There is nothing to keep."""


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
        path = self.folder / (name.replace(".", "/") + ".py")
        if name in REAL and path.is_file():
            return importlib.util.spec_from_file_location(name, path)
        return ModuleSpec(name, self)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return Placeholder(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


def settings(*_: Any) -> SimpleNamespace:
    """The server arguments, whichever of them are asked for."""
    return SimpleNamespace(
        speculative_algorithm="DFLASH",
        speculative_num_draft_tokens=4,
        speculative_num_steps=1,
        speculative_eagle_topk=1,
        max_speculative_num_draft_tokens=4,
        page_size=1,
        attn_dcp_size=1,
    )


ASKED = ("get_spec", "get_schedule", "get_parallel", "get_server_args", "get_global_server_args")
ANSWERS: dict[str, Any] = {
    "get_alloc_reserve_per_decode": lambda *_: 8,
    "is_pin_memory_available": lambda *_: False,
    "max_speculative_num_draft_tokens": lambda: 4,
    **dict.fromkeys(ASKED, settings),
}
"""What the modules of REAL ask of the others."""


def as_dflash(batch: Any) -> None:
    """Prepare a decode as DFlash does."""
    draft_input = importlib.import_module(DRAFT).DFlashDraftInputV2
    if draft_input is Nothing:
        raise LookupError(f"this tree has no {DRAFT}")
    draft_input.create_idle_input("cpu").prepare_for_decode(batch)


def as_eagle(batch: Any) -> None:
    """Prepare a decode as EAGLE does."""
    prepare = getattr(importlib.import_module(EAGLE), "eagle_prepare_for_decode", None)
    if prepare is None:
        draft_input = importlib.import_module(OLDER).EagleDraftInputV2Mixin
        prepare = draft_input().prepare_for_decode
    prepare(batch)


def watch(prepare: Any) -> str:
    """What a batch of two requests sees of a preparation."""
    calls: list[None] = []
    requests = []
    for length in (3, 7):
        request = SimpleNamespace(
            kv_committed_len=length,
            kv_allocated_len=length,
            decode_batch_idx=0,
            sampling_params=SimpleNamespace(top_k=1),
        )
        request.kv = request  # newer trees keep lengths in a record of their own
        requests.append(request)
    prepare(
        SimpleNamespace(
            device="cpu",
            reqs=requests,
            batch_size=lambda: len(requests),
            maybe_evict_swa=lambda: calls.append(None),
            req_pool_indices=torch.tensor([1, 2]),
            req_to_token_pool=Nothing,
            sampling_info=Nothing,
            seq_lens_cpu=torch.tensor([3, 7]),
            token_to_kv_pool_allocator=SimpleNamespace(page_size=1),
            tree_cache=Nothing,
        )
    )
    return f"hook {len(calls)}, decodes {[request.decode_batch_idx for request in requests]}"


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    sys.meta_path.insert(0, Finder(Path(sys.argv[1])))
    try:
        seen = {"DFLASH": watch(as_dflash), "EAGLE": watch(as_eagle)}
    except Exception as error:
        print(f"could not be tried: {type(error).__name__}: {error}")
        return 2
    print(f"torch {torch.__version__}; a decode of two requests is prepared")
    expected = "hook 1, decodes [1, 1]"
    for name in ("EAGLE", "DFLASH"):
        print(f"{name + ':':<8}expected {expected}, seen {seen[name]}")
    wrong = seen["DFLASH"] != expected
    print("DEFECT: nothing leaves the sliding window" if wrong else "conforms")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
