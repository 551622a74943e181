"""Does a stop token end an output that reaches its length limit in the same step?

    python stop-behind-limit.py FOLDER

FOLDER holds ``sglang/`` (a site-packages, an unpacked wheel, or ``python/`` of a checkout). Needs
torch; no GPU, no other package, no network.

Only ``managers/schedule_batch.py`` is loaded, as it is; every other module of SGLang is a
placeholder. Its own ``Req.update_finish_state`` is told of a step that accepted four tokens: the
second is a stop token, and with the third the request has put out all that it may.

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

BATCH = "sglang.srt.managers.schedule_batch"
REAL = {BATCH}
"""The module that is the tree's own."""

ANSWERS: dict[str, Any] = {}
"""What it asks of the others."""

LIMIT, STOP = 4, 9
OUTPUT = [5, 6, STOP, 7, 8]
"""What the request has put out after the step; the first token came before it."""


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


def output_of(folder: str) -> tuple[list[int], str]:
    """The output that the tree makes of the step, and the reason it gives."""
    sys.meta_path.insert(0, Finder(Path(folder)))
    request_class = importlib.import_module(BATCH).Req
    if not inspect.isclass(request_class) or request_class is Nothing:
        raise LookupError(f"this tree has no {BATCH}.Req")
    request = object.__new__(request_class)
    vars(request).update(
        output_ids=list(OUTPUT),
        finished_reason=None,
        finished_len=None,
        to_finish=None,
        grammar=None,
        tokenizer=None,
        eos_token_ids=None,
        vocab_size=64,
        multi_item_delimiter_indices=None,
        sampling_params=SimpleNamespace(
            max_new_tokens=LIMIT,
            ignore_eos=False,
            stop_token_ids={STOP},
            stop_strs=[],
            stop_regex_strs=[],
        ),
    )
    request.update_finish_state(len(OUTPUT) - 1)
    return OUTPUT[: request.finished_len], type(request.finished_reason).__name__


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    try:
        seen, reason = output_of(sys.argv[1])
    except Exception as error:
        print(f"could not be tried: {type(error).__name__}: {error}")
        return 2
    expected = OUTPUT[: OUTPUT.index(STOP) + 1]
    print(f"torch {torch.__version__}; a step accepts {OUTPUT[1:]}, {STOP} is a stop token")
    print(f"limit {LIMIT}: expected {expected}, seen {seen} ({reason})")
    wrong = seen != expected
    print("DEFECT: the output goes on after its stop token" if wrong else "conforms")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
