"""The census: what every attribute of a draft input and of the relay is (clause F7).

One record per attribute, over all trees; a tree has a subset. An attribute that a tree has and no
record names is reported under F7, and nothing else is asked of it, until it is declared: here, or
by the user (``--declare FILE`` with ``[[field]]`` tables of ``owner``, ``name``, ``kind`` and, for
a mirror, ``sums``).
"""

from __future__ import annotations

from dataclasses import dataclass

KINDS = {
    "row": "one row per request, in request order (stored form)",
    "index": "the request slots of the relayed form",
    "mirror": "host copy of a per-row length",
    "sum": "sum of a host mirror",
    "recomputed": "recomputed in prepare_for_decode",
    "handshake": "order or carry flag between steps",
    "scratch": "buffer reused between prepares",
    "constant": "set once",
    "channel": "relay rows, one per slot",
    "other": "another algorithm's",
}


@dataclass(frozen=True)
class Field:
    """One attribute.

    Attributes:
        owner: ``draft`` or ``relay``.
        name: attribute name in the tree.
        kind: one of :data:`KINDS`.
        sums: for a mirror, the attribute that holds its sum.
    """

    owner: str
    name: str
    kind: str
    sums: str | None = None


_DRAFT = (
    Field("draft", "topk_p", "row"),
    Field("draft", "topk_index", "row"),
    Field("draft", "bonus_tokens", "row"),
    Field("draft", "verified_id", "row"),
    Field("draft", "new_seq_lens", "row"),
    Field("draft", "hidden_states", "row"),
    Field("draft", "future_indices", "index"),
    Field("draft", "cur_allocated_seq_lens_cpu", "mirror"),
    Field("draft", "planning_seq_lens_cpu", "mirror", "planning_seq_lens_sum"),
    Field("draft", "planning_seq_lens_sum", "sum"),
    Field("draft", "reserved_seq_lens_cpu", "mirror", "reserved_seq_lens_sum"),
    Field("draft", "reserved_seq_lens_sum", "sum"),
    Field("draft", "nxt_kv_lens_cpu", "mirror", "nxt_kv_lens_sum"),
    Field("draft", "nxt_kv_lens_sum", "sum"),
    Field("draft", "max_top_k", "recomputed"),
    Field("draft", "uniform_top_k_value", "recomputed"),
    Field("draft", "verify_token_budget", "recomputed"),
    Field("draft", "verify_done", "handshake"),
    Field("draft", "direct_carry_valid", "handshake"),
    Field("draft", "spec_input_type", "constant"),
    Field("draft", "num_tokens_per_req", "constant"),
    Field("draft", "num_tokens_for_logprob_per_req", "constant"),
    Field("draft", "_prepare_committed_kv_lens_cpu_buf", "scratch"),
    Field("draft", "_prepare_planning_kv_lens_cpu_buf", "scratch"),
    Field("draft", "_prepare_batch_seq_lens_cpu_buf", "scratch"),
    Field("draft", "_prepare_cur_kv_lens_cpu_buf", "scratch"),
    Field("draft", "_prepare_nxt_kv_lens_cpu_buf", "scratch"),
    Field("draft", "_prepare_cur_kv_lens_gpu_buf", "scratch"),
    Field("draft", "_prepare_nxt_kv_lens_gpu_buf", "scratch"),
    Field("draft", "dsa_topk_indices", "other"),
    Field("draft", "future_dsa_topk_indices_available", "other"),
    Field("draft", "draft_probs", "other"),
)

_RELAY = (
    Field("relay", "output_tokens_buf", "channel"),
    Field("relay", "verified_id_buf", "channel"),
    Field("relay", "new_seq_lens_buf", "channel"),
    Field("relay", "device", "constant"),
    Field("relay", "spec_algo", "constant"),
    Field("relay", "needs_cpu_seq_lens", "constant"),
    Field("relay", "needs_confidence_relay", "constant"),
    Field("relay", "req_pool_size", "constant"),
    Field("relay", "req_to_token", "constant"),
    Field("relay", "pool", "constant"),
    Field("relay", "need_verified_id", "constant"),
    Field("relay", "need_bonus_tokens", "constant"),
    Field("relay", "need_topk", "constant"),
    Field("relay", "need_hidden_states", "constant"),
    Field("relay", "_forward_buf_initialized", "constant"),
    Field("relay", "publish_ready", "handshake"),
    Field("relay", "_publish_fresh", "handshake"),
    Field("relay", "new_seq_lens_cpu_pinned", "scratch"),
    Field("relay", "fwd_prepare_d2h_stream", "constant"),
    Field("relay", "confidence_relay", "other"),
    Field("relay", "confidence_buf", "other"),
    Field("relay", "_relay", "other"),
    Field("relay", "topk_p_buf", "other"),
    Field("relay", "topk_index_buf", "other"),
    Field("relay", "hidden_states_buf", "other"),
    Field("relay", "draft_probs_buf", "other"),
    Field("relay", "dsa_topk_indices_buf", "other"),
    Field("relay", "accept_tokens_buf", "other"),
    Field("relay", "accept_lens_buf", "other"),
)

FIELDS: tuple[Field, ...] = _DRAFT + _RELAY
