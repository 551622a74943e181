"""The harness's answers to what a tree asks of the rest of SGLang, listed in every report.

What decides values under test is never answered here: it is the tree's own, loaded as a module or
as an :class:`~conformance.sut.isolation.Excerpt` of one.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch

from conformance.sut.isolation import Excerpt, StandInUsed

_SRT = "sglang.srt"


class Settings:
    """The harness's answer to "what are the server arguments?"; unknown ones are refused."""

    def __init__(self, **values: Any) -> None:
        self.set(**values)

    def set(self, **values: Any) -> None:
        """Change answers."""
        self.__dict__.update(values)

    def __deepcopy__(self, memo: Any) -> Settings:
        return copy.copy(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise StandInUsed(f"the code under test reads the setting {name!r}, which is not declared")


class SamplingInfo:
    """Sampling parameters of a batch: greedy; the double only knows whose row is whose."""

    penalizer_orchestrator: Any = Settings(is_required=False)
    is_all_greedy = True
    has_custom_logit_processor = has_watermark_candidates = False
    acc_additive_penalties = acc_linear_penalties = acc_scaling_penalties = None
    grammars = logit_bias = vocab_mask = None

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    @classmethod
    def from_schedule_batch(cls, batch: Any, *_: Any) -> SamplingInfo:
        return cls([request.rid for request in batch.reqs])

    def __len__(self) -> int:
        return len(self.rows)

    def filter_batch(self, keep_indices: list[int], *_: Any) -> None:
        self.rows = [self.rows[i] for i in keep_indices]

    def merge_batch(self, other: SamplingInfo) -> None:
        self.rows = self.rows + other.rows

    def copy_for_forward(self) -> SamplingInfo:
        return SamplingInfo(self.rows)


class _MemorySaver:
    """Releases no memory of pools to anybody."""

    @staticmethod
    def create(*_: Any, **__: Any) -> _MemorySaver:
        return _MemorySaver()

    @contextlib.contextmanager
    def region(self, *_: Any, **__: Any) -> Iterator[None]:
        yield


class _Quiet:
    """Statistics of a request that nobody reads: whatever is reported to it is dropped."""

    def __init__(self, **_: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return nothing


class _Handle:
    """A name for a request in a prefix cache."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


def false(*_: Any, **__: Any) -> bool:
    """No."""
    return False


def _true(*_: Any, **__: Any) -> bool:
    return True


def nothing(*_: Any, **__: Any) -> None:
    """Done, without having done anything."""
    return None


_PLATFORM_QUESTIONS = (
    "is_cuda",
    "is_hip",
    "is_npu",
    "is_xpu",
    "is_cpu",
    "is_mps",
    "is_musa",
    "is_pin_memory_available",
)
"""Functions by which a tree asks where it runs; the device answers."""

_SETTINGS = (
    "get_spec",
    "get_exec",
    "get_disagg",
    "get_schedule",
    "get_parallel",
    "get_memory",
    "get_serving",
    "get_observability",
    "get_flags",
    "get_server_args",
    "get_global_server_args",
)
"""Functions by which a tree asks for its server arguments."""

UTILITIES = f"{_SRT}.utils.common"
"""The module that excerpts are taken from."""

_EXCERPTS = (
    "Range",
    "ceil_align",
    "flatten_arrays_to_pinned_cpu",
    "get_bool_env_var",
    "get_num_new_pages",
    "next_power_of_2",
    "support_triton",
)
"""Definitions that are taken from the tree's own, very large, module of utilities."""


def settings() -> Settings:
    """Server arguments, as far as the code under test asks for them."""
    return Settings(
        speculative_algorithm="DFLASH",
        speculative_num_draft_tokens=4,
        speculative_num_steps=1,  # what the argument checks make of DFlash's
        speculative_eagle_topk=1,
        max_speculative_num_draft_tokens=4,
        page_size=1,
        attention_backend="triton",
        enable_multi_layer_eagle=False,
        strip_thinking_cache=False,
        mamba=Settings(enable_mamba_extra_buffer=False, enable_mamba_extra_buffer_lazy=False),
        enable_mamba_extra_buffer=false,
        enable_mamba_extra_buffer_lazy=false,
        kernel=Settings(attention_backend="triton"),
        attn=Settings(backend="triton"),
        features=Settings(enable_encoder_swa_bounded_replay=False),
        disaggregation_mode="null",
        disaggregation_decode_enable_radix_cache=False,
        disaggregation_decode_host_receive_threshold=1,
        disaggregation_decode_retraction_backup="none",
        attn_dcp_size=1,
        dcp_size=1,
        dcp_enabled=False,
    )


def doubles(answers: frozenset[str], given: Settings) -> dict[str, Any]:
    """Every double by ``module.attribute`` or ``*.attribute``.

    Args:
        answers: the platform questions that the device answers with yes.
        given: the server arguments.
    """

    def answer(*_: Any, **__: Any) -> Settings:
        return given

    def block(*_: Any, **__: Any) -> int:
        return int(given.max_speculative_num_draft_tokens)

    found: dict[str, Any] = {
        f"*.{name}": _true if name in answers else false for name in _PLATFORM_QUESTIONS
    }
    found |= {f"*.{name}": Excerpt(UTILITIES, name) for name in _EXCERPTS}
    # What a decode server asks of its prefix cache and clock when a prefilled request arrives.
    for name in ("checkpoint_kv_cache", "maybe_cache_unfinished_req"):
        found[f"{_SRT}.disaggregation.decode_schedule_batch_mixin.{name}"] = nothing
    found["*.set_time_batch"] = nothing
    found["*.async_h2d"] = torch.tensor
    found["*.SamplingBatchInfo"] = SamplingInfo
    found["*.TorchMemorySaverAdapter"] = _MemorySaver
    found["*.SchedulerReqTimeStats"] = _Quiet
    found["*.CacheRequestHandle"] = _Handle
    found["*.current_platform"] = Settings(
        capabilities=Settings(supports_triton=True),
        is_cuda_alike=_true if "is_cuda" in answers else false,
        is_out_of_tree=false,
        **{name: _true if name in answers else false for name in _PLATFORM_QUESTIONS},
    )
    for module in ("runtime_context", "server_args"):
        for name in _SETTINGS:
            found[f"{_SRT}.{module}.{name}"] = answer
    for name in ("mamba_extra_buffer_enabled", "mamba_extra_buffer_lazy_enabled"):
        found[f"{_SRT}.runtime_context.{name}"] = false
    found[f"{_SRT}.runtime_context.max_speculative_num_draft_tokens"] = block
    found[f"{_SRT}.runtime_context.attention_backends"] = lambda: ("triton", "triton")
    return found
