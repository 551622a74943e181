"""Does SGLang's DFlash record whole pages for what it reserves for a decode?

    python reserve-not-whole-pages.py FOLDER

FOLDER holds ``sglang/`` (a site-packages, an unpacked wheel, or ``python/`` of a checkout). Needs
torch; no GPU, no other package, no network.

Only ``sglang/srt/speculative/dflash_info_v2.py`` and, where the tree has it,
``sglang/srt/mem_cache/allocation_sizing.py`` are loaded, as they are; every other module of SGLang
is a placeholder, so nothing is allocated. What is tried is ``prepare_for_decode`` alone: the length
to which it has a request's slots allocated, which becomes the request's allocated length. The
paged allocator hands out whole pages for it.

Exit status: 0 it does, 1 it does not (the defect), 2 it could not be tried.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

BLOCK, PAGE = 4, 16
COMMITTED = (1, 8, 17, 24)

DRAFT = "sglang.srt.speculative.dflash_info_v2"
REAL = {DRAFT, "sglang.srt.mem_cache.allocation_sizing"}
"""The modules that are the tree's own, where it has them."""


class Anything(type):
    """The type of the placeholder: whatever is asked of it is the placeholder; it is false."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing

    def __call__(cls, *given: Any, **named: Any) -> Any:
        return cls if cls is Nothing else super().__call__(*given, **named)

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


def settings() -> SimpleNamespace:
    """The server arguments."""
    return SimpleNamespace(speculative_num_draft_tokens=BLOCK)


ANSWERS: dict[str, Any] = {
    "is_pin_memory_available": lambda *_: False,
    **dict.fromkeys(("get_spec", "get_server_args", "get_global_server_args"), settings),
}
"""What the modules of REAL ask of the others."""


def reserved(draft_input: Any, committed: int) -> int:
    """The length reserved for a decode of one request with so many tokens."""
    request = SimpleNamespace(
        kv_committed_len=committed,
        kv_allocated_len=committed,
        decode_batch_idx=0,
        sampling_params=SimpleNamespace(top_k=1),
    )
    request.kv = request  # newer trees keep lengths in a record of their own
    batch = SimpleNamespace(
        device="cpu",
        reqs=[request],
        batch_size=lambda: 1,
        maybe_evict_swa=lambda: None,
        req_pool_indices=torch.tensor([1]),
        req_to_token_pool=Nothing,
        token_to_kv_pool_allocator=SimpleNamespace(page_size=PAGE),
        tree_cache=Nothing,
    )
    draft = draft_input.create_idle_input("cpu")
    draft.prepare_for_decode(batch)
    names = ("nxt_kv_lens_cpu", "reserved_seq_lens_cpu")
    return int(next(getattr(draft, name) for name in names if hasattr(draft, name)))


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    sys.meta_path.insert(0, Finder(Path(sys.argv[1])))
    try:
        draft_input = importlib.import_module(DRAFT).DFlashDraftInputV2
        if draft_input is Nothing:
            raise LookupError(f"this tree has no {DRAFT}")
        seen = {committed: reserved(draft_input, committed) for committed in COMMITTED}
    except Exception as error:
        print(f"could not be tried: {type(error).__name__}: {error}")
        return 2
    print(f"torch {torch.__version__}; block {BLOCK}, page {PAGE}")
    wrong = 0
    for committed, length in seen.items():
        expected = -(-(committed + 2 * BLOCK) // PAGE) * PAGE
        wrong += length != expected
        print(f"{committed:>2} tokens: expected {expected} reserved, seen {length}")
    print(f"DEFECT: {wrong} of {len(seen)} are not whole pages" if wrong else "conforms")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
