"""Do the penalizers learn of the tokens that SGLang's DFlash puts out?

    python penalizers-not-fed.py FOLDER

FOLDER holds ``sglang/`` (a site-packages, an unpacked wheel, or ``python/`` of a checkout). Needs
torch and numpy; no GPU, no other package, no network.

The modules that prepare a decode, for DFlash and for EAGLE, the penalizers, the sampling parameters
of a batch, and what DFlash's verification adds to logits are loaded (:data:`REAL`), as they are;
every other module of SGLang is a placeholder, so nothing is allocated. A request with a frequency
penalty and ``min_new_tokens`` puts out the same token twice; after each a decode is prepared. The
stand-in for the batch hands a request's last token to the penalizers, as the tree's does, when it
is asked to. Then the penalizers are fed by hand, and it is seen what verification makes of it.

Exit status: 0 they do, 1 they do not (the defect), 2 it could not be tried.
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

TOKEN, STOP, VOCABULARY = 1, 2, 4
PENALTY, LEAST = 0.5, 2
"""The frequency penalty, and ``min_new_tokens``."""

DRAFT = "sglang.srt.speculative.dflash_info_v2"
EAGLE = "sglang.srt.speculative.eagle_utils"
OLDER = "sglang.srt.speculative.eagle_info_v2"
VERIFY = "sglang.srt.speculative.dflash_utils"
SAMPLING = "sglang.srt.sampling.sampling_batch_info"
PENALTIES = "sglang.srt.sampling.penaltylib"
REAL = {
    *(DRAFT, EAGLE, OLDER, VERIFY, SAMPLING, "sglang.srt.mem_cache.allocation_sizing"),
    *(PENALTIES, f"{PENALTIES}.orchestrator", f"{PENALTIES}.frequency_penalty"),
    *(f"{PENALTIES}.{name}" for name in ("min_new_tokens", "presence_penalty")),
    f"{PENALTIES}.repetition_penalty",
}
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
        base = self.folder / name.replace(".", "/")
        for path in (base.with_suffix(".py"), base / "__init__.py"):
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


class Batch(SimpleNamespace):
    """A batch of one request, as far as a preparation asks for it."""

    def __init__(self) -> None:
        request = SimpleNamespace(
            kv_committed_len=3,
            kv_allocated_len=3,
            decode_batch_idx=0,
            eos_token_ids=None,
            tokenizer=SimpleNamespace(eos_token_id=STOP, additional_stop_token_ids=None),
            sampling_params=SimpleNamespace(
                top_k=1, frequency_penalty=PENALTY, min_new_tokens=LEAST, stop_token_ids=None
            ),
        )
        request.kv = request  # newer trees keep lengths in a record of their own
        super().__init__(
            device="cpu",
            reqs=[request],
            batch_size=lambda: 1,
            maybe_evict_swa=lambda: None,
            cumulate_penalty_output_tokens=self.feed,
            req_pool_indices=torch.tensor([1]),
            req_to_token_pool=Nothing,
            seq_lens_cpu=torch.tensor([3]),
            token_to_kv_pool_allocator=SimpleNamespace(page_size=1),
            tree_cache=Nothing,
        )
        library = importlib.import_module(PENALTIES)
        kinds = {library.BatchedFrequencyPenalizer, library.BatchedMinNewTokensPenalizer}
        self.penalizers = library.BatchedPenalizerOrchestrator(VOCABULARY, self, kinds)
        self.sampling_info = SimpleNamespace(penalizer_orchestrator=self.penalizers)

    def feed(self) -> None:
        """Hand the last token to the penalizers."""
        self.penalizers.cumulate_output_tokens(torch.tensor([TOKEN]))

    def held(self) -> list[float]:
        """What the penalizers add to the logits of the token and of the stop token."""
        logits = torch.zeros(1, VOCABULARY)
        self.penalizers.apply(logits)
        return logits[0, [TOKEN, STOP]].tolist()


def prepared(prepare: Any) -> list[list[float]]:
    """What the penalizers hold before the first token and after each."""
    batch = Batch()
    held = [batch.held()]
    for _ in range(2):
        prepare(batch)
        held.append(batch.held())
    return held


def verified() -> list[float]:
    """What a step's verification adds where the penalizers have been fed once.

    Every step runs with ``copy_for_forward`` of the batch's sampling parameters.
    """
    batch = Batch()
    batch.feed()
    kind = importlib.import_module(SAMPLING).SamplingBatchInfo
    needed = [p.name for p in inspect.signature(kind).parameters.values() if p.default is p.empty]
    values = dict.fromkeys(needed, torch.ones(1)) | {"vocab_size": VOCABULARY}
    info = kind(**values, penalizer_orchestrator=batch.penalizers)
    logits = torch.zeros(1, VOCABULARY)
    importlib.import_module(VERIFY).apply_dflash_verify_logits_adjustments(
        next_token_logits=logits, sampling_info=info.copy_for_forward(), draft_token_num=1
    )
    return logits[0, [TOKEN, STOP]].tolist()


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    sys.meta_path.insert(0, Finder(Path(sys.argv[1])))
    try:
        ours, theirs, applied = prepared(as_dflash), prepared(as_eagle), verified()
    except Exception as error:
        print(f"could not be tried: {type(error).__name__}: {error}")
        return 2
    print(
        f"torch {torch.__version__}; {PENALTY} off a token for each time, {LEAST} tokens at least"
    )
    expected = [[0.0, -torch.inf], [-PENALTY, -torch.inf], [-2 * PENALTY, 0.0]]
    print("added to [token, stop token] before the first output, and after each of two:")
    for name, seen in (("EAGLE", theirs), ("DFLASH", ours)):
        print(f"{name + ':':<8}expected {expected}")
        print(f"        seen     {seen}")
    print("fed by hand, after one output, added by DFlash's verification (not counted):")
    print(f"        expected {expected[1]}, seen {applied}")
    wrong = ours != expected
    print("DEFECT: the penalizers see no output" if wrong else "conforms")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
