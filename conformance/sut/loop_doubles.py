"""What a tree's whole loop asks of the rest of SGLang, beyond what a step asks.

One server, one device, nothing optional switched on: no LoRA, no grammar, no sliding window, no
state-space layers, no metrics. Like :mod:`conformance.sut.doubles`, which this adds to.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from conformance.sut.doubles import UTILITIES, Settings, false, nothing
from conformance.sut.isolation import Excerpt

_SRT = "sglang.srt"


@dataclass(frozen=True)
class Ranks:
    """A process that is alone."""

    pp_rank: int = 0
    pp_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    moe_ep_rank: int = 0
    moe_ep_size: int = 1
    moe_dp_rank: int = 0
    attn_tp_rank: int = 0
    attn_tp_size: int = 1
    attn_dp_rank: int = 0
    attn_dp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    attn_dcp_rank: int = 0
    attn_dcp_size: int = 1
    dcp_rank: int = 0
    dcp_size: int = 1


GROUP = SimpleNamespace(world_size=1)
"""A process group of one."""


class Quiet:
    """Somebody who is told things and does nothing with them."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return nothing


class _Nobodys:
    """A class that no object is of."""


class _Statistics:
    """Statistics of a prefill that nobody reads."""

    @classmethod
    def from_adder(cls, *_: Any, **__: Any) -> None:
        return None


class _NoMask:
    """No sampling mask is captured."""

    @staticmethod
    def from_logits(*_: Any, **__: Any) -> None:
        return None


def _same(value: Any) -> Any:
    return value


def _context(*_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


_NOBODYS = (
    "BaseSWAKVPool",
    "DeepSeekV4HiSparseTokenToKVPoolAllocator",
    "DeepSeekV4TokenToKVPool",
    "ModelRunner",
    "PureSWATokenToKVPoolAllocator",
    "SWATokenToKVPoolAllocator",
    "UnifiedMambaSWATokenToKVPoolAllocator",
    "UnifiedMambaTokenToKVPoolAllocator",
    "UnifiedRadixCache",
    "UnifiedSWAAllocatorBase",
    "UnifiedSWATokenToKVPoolAllocator",
)
"""Classes of pools, caches and runners that are asked for and are not used here."""

_TOLD = (
    "check_simulate_acc_token_mode",
    "flush_trace_batch",
    "fused_draft_host_allocator",
    "get_global_experts_capturer",
    "get_global_indexer_capturer",
    "maybe_detect_kernel_facing_loc",
    "maybe_detect_nan",
    "maybe_detect_oob",
    "model_draft_parallel_spec",
    "resolve_draft_parallel_layout",
    "set_global_server_args_for_scheduler",
    "set_schedule_time_batch",
)
"""Functions that trace, probe or set what nobody reads here; they answer None."""

_OFF = (
    "can_use_store_cache",
    "get_is_capture_mode",
    "is_dsa_prefill_cp_in_seq_split",
    "is_gfx95_supported",
    "is_prefill_context_parallel_enabled",
    "is_swa_req_ring",
    "should_apply_lm_head_quant_method",
    "world_dp_gather_enabled",
)
"""Questions whose answer is no."""

_CONTEXTS = ("draft_model_build_scope", "empty_context")
"""Contexts that change nothing for a process that is alone."""

_OWN = {
    f"{_SRT}.speculative.spec_utils.draft_pp_context": _context,
    f"{_SRT}.speculative.spec_utils.draft_tp_context": _context,
    f"{_SRT}.model_executor.forward_batch_info._dp_tp_moe_masks_pad_rows": false,
}
"""Functions of real modules that ask for process groups."""

SETTINGS: dict[str, Any] = {
    "disable_chunked_prefix_cache": False,
    "disaggregation_decode_enable_offload_kvcache": False,
    "elastic_ep_backend": None,
    "mm_feature_transport": None,
    "prefill_max_requests": None,
    "radix_eviction_policy": "lru",
    "retraction_policy": "length",
    "schedule_policy": "fcfs",
    "return_hidden_states_mode": None,
    "speculative_domino_candidate_pool_size": 0,
    "speculative_draft_attention_backend": None,
    "speculative_draft_load_format": None,
    "speculative_draft_model_path": None,
    "speculative_draft_window_size": None,
    "speculative_use_block_verification": False,
    "weight_version": None,
    "tp_group": GROUP,
    **dict.fromkeys(
        (
            "attn_dp_enabled",
            "enable_dp_attention",
            "enable_flexkv",
            "enable_hisparse",
            "enable_lora",
            "enable_metrics",
            "enable_pd_role_switch",
            "enable_return_hidden_states",
            "enable_unified_memory",
            "is_cuda",
            "is_hip",
            "is_npu",
            "is_pin_memory_available",
            "is_xpu",
        ),
        False,
    ),
    **vars(Ranks()),
}
"""Server arguments, as far as the loop asks for them."""

_DOING = ("override", "set_server_args")
"""Methods of the settings that tell them something new; they stay as they are."""


def settings(given: Settings, answers: frozenset[str]) -> None:
    """Add what the loop asks for to the server arguments.

    Args:
        answers: the platform questions that the device answers with yes.
    """
    given.set(
        **{**SETTINGS, **dict.fromkeys(answers, True)},
        **dict.fromkeys(_DOING, nothing),
        preserve_config=contextlib.nullcontext,
        is_config_namespace_published=false,
        get_attention_backends=lambda: ("triton", "triton"),
    )
    given.features.set(return_hidden_states_mode=None, enable_return_hidden_states=False)


def doubles(given: Settings) -> dict[str, Any]:
    """Every double by ``module.attribute`` or ``*.attribute``.

    Args:
        given: the server arguments; ``draft_worker`` among them is the worker of the draft.
    """
    a2a = SimpleNamespace(is_customized=false)
    found: dict[str, Any] = dict(_OWN)
    for names, double in (
        (_NOBODYS, _Nobodys),
        (_TOLD, nothing),
        (_OFF, false),
        (_CONTEXTS, _context),
        (("get_dp_tp_group", "get_tp_group"), lambda: GROUP),
        (("resolving_view", "unwrap_lora_layer", "normalize_watermark_request"), _same),
    ):
        found |= {f"*.{name}": double for name in names}
    found |= {
        "*.async_d2h": Excerpt(UTILITIES, "async_d2h"),
        "*.DRAFT_ATTENTION_BACKEND_CHOICES": ["triton"],
        "*.HEALTH_CHECK_RID_PREFIX": "HEALTH_CHECK",
        "*.PrefillStats": _Statistics,
        "*.SpeculativeSamplingMaskCapture": _NoMask,
        "*.TpModelWorker": lambda **_: given.draft_worker,
        "*.get_moe_a2a_backend": lambda: a2a,
    }
    for name in ("get_context", "get_mm", "get_platform"):
        found[f"{_SRT}.runtime_context.{name}"] = lambda: given
    return found
