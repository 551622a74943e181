"""Does SGLang's debug assertion refuse a relay row that is consumed twice?

    python consume-once-assertion-compiled-away.py FOLDER

FOLDER holds ``sglang/`` (a site-packages, an unpacked wheel, or ``python/`` of a checkout). Needs
torch and a C++ compiler, which torch.compile asks for; no GPU, no other package, no network.

Only ``sglang/srt/managers/overlap_utils.py`` is loaded, as it is. The modules that it imports are
PLACEHOLDERS made here: they answer "debug assertions are on" and "this is no accelerator", and give
names to what is not used. One request is resolved twice, with one write before: in the releases
concerned the second time must raise.

Exit status: 0 it raises, 1 it does not (the defect), 2 it could not be tried.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

TOKEN, SLOT = 4711, 3


def no(*_: Any) -> bool:
    return False


def yes(*_: Any) -> bool:
    return True


def placeholder(name: str, **contents: Any) -> None:
    """Put a module in the place of one that is not wanted, and its packages above it."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        package = sys.modules.setdefault(".".join(parts[:end]), types.ModuleType(parts[end - 1]))
        package.__path__ = []
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__dict__.update(contents)


def load(folder: Path) -> Any:
    """The tree's relay module, with debug assertions on."""
    on = SimpleNamespace(get=yes)
    placeholder("sglang.srt.environ", envs=SimpleNamespace(SGLANG_IS_IN_CI=on))
    placeholder("sglang.srt.utils", is_cuda=no, is_hip=no, is_npu=no)
    placeholder("sglang.srt.runtime_context", get_exec=None, get_spec=None)
    placeholder("sglang.srt.speculative.spec_info", SpeculativeAlgorithm=None)
    placeholder("sglang.srt.speculative.spec_utils", spec_need_hidden_states=no)
    for package in ("sglang.srt.speculative.triton_ops", "sglang.kernels.ops.speculative"):
        placeholder(f"{package}.gather_spec_extras", gather_spec_extras=None)
    if importlib.util.find_spec("msgspec") is None:
        placeholder("msgspec", Struct=SimpleNamespace)
    # A tensor on a CPU belongs to no stream; older releases ask all the same.
    torch.Tensor.record_stream = no  # type: ignore[assignment, method-assign]
    path = folder / "sglang" / "srt" / "managers" / "overlap_utils.py"
    spec = importlib.util.spec_from_file_location("sglang.srt.managers.overlap_utils", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def consume_twice(relay: Any) -> tuple[int, int | str]:
    """What two resolves of the same row give, after one stash: tokens, or why it was refused."""
    dflash = SimpleNamespace(
        is_none=no, is_some=yes, is_dflash=yes, is_eagle=no, is_ngram=no, need_topk=no
    )
    pool = SimpleNamespace(req_to_token=torch.zeros((8, 16), dtype=torch.int32))
    future_map = relay.FutureMap(torch.device("cpu"), dflash, pool)
    slots, token = torch.tensor([SLOT]), torch.tensor([TOKEN])
    if hasattr(relay, "RelayPayload"):
        field, payload = "bonus_tokens", relay.RelayPayload(bonus_tokens=token)
    else:
        field, payload = "verified_id", SimpleNamespace(verified_id=token.to(torch.int32))
    future_map.stash(slots, payload)

    def resolve() -> int:
        draft = SimpleNamespace(future_indices=slots, future_dsa_topk_indices_available=False)
        batch = SimpleNamespace(
            prefill_input_ids_cpu=None,
            input_ids=None,
            enable_overlap=True,
            spec_algorithm=dflash,
            spec_info=draft,
        )
        relay.resolve_forward_inputs(batch, future_map)
        return int(getattr(draft, field)[0])

    first = resolve()
    try:
        return first, resolve()
    except RuntimeError as error:
        return first, f"RuntimeError: {str(error).splitlines()[0]}"


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    try:
        relay = load(Path(sys.argv[1]))
        with torch.compiler.set_stance("force_eager"):
            eager = consume_twice(relay)
        compiled = consume_twice(relay)
    except Exception as error:
        print(f"could not be tried: {type(error).__name__}: {error}")
        return 2
    print(f"torch {torch.__version__}; slot {SLOT} holds token {TOKEN}, written once")
    print(f"expected: first {TOKEN}, second RuntimeError (the row was not written again)")
    for mode, (first, second) in {"eagerly ": eager, "compiled": compiled}.items():
        print(f"{mode}: first {first}, second {second}")
    refused = isinstance(compiled[1], str)
    print("conforms" if refused else "DEFECT: the second resolve hands out a token nobody wrote")
    return 0 if refused else 1


if __name__ == "__main__":
    sys.exit(main())
