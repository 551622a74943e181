"""The census: what everything is that a real step leaves behind (clause F7).

One record per attribute of a draft input, of the relay and of what it is handed, and per batch
field that has one value per row; over all trees, of which each has a subset. What a tree has and no
record names is reported under F7 with the record to add, and nothing else is asked of it, until it
is declared: here, or by the user (``--declare FILE`` with ``[[field]]`` tables of ``owner``,
``name``, ``kind`` and, for a mirror, ``sums``).
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
    "carried": "handed to the relay for the channel of its name",
    "other": "another algorithm's",
}


OWNERS = {
    "draft": "a draft input",
    "relay": "the relay",
    "payload": "what the relay is handed at a stash",
    "batch": "a batch, where it has one value per row",
}


@dataclass(frozen=True)
class Field:
    """One attribute.

    Attributes:
        owner: one of :data:`OWNERS`.
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

_PAYLOAD = (
    Field("payload", "bonus_tokens", "carried"),
    Field("payload", "topk_p", "other"),
    Field("payload", "topk_index", "other"),
    Field("payload", "hidden_states", "other"),
    Field("payload", "draft_probs", "other"),
    Field("payload", "dsa_topk_indices", "other"),
    Field("payload", "accept_tokens", "other"),
    Field("payload", "accept_lens", "other"),
)

_BATCH = (
    Field("batch", "reqs", "row"),
    Field("batch", "req_pool_indices", "row"),
    Field("batch", "req_pool_indices_cpu", "row"),
    Field("batch", "seq_lens", "row"),
    Field("batch", "seq_lens_cpu", "mirror"),
    Field("batch", "orig_seq_lens", "row"),
    Field("batch", "multimodal_inputs", "row"),
    # Of a prefill or a mixed batch; left behind when it decodes.
    Field("batch", "out_cache_loc", "scratch"),
    Field("batch", "mix_running_indices", "scratch"),
    Field("batch", "mix_running_indices_cpu", "scratch"),
    Field("batch", "decoding_reqs", "scratch"),
    Field("batch", "prefix_lens", "scratch"),
    Field("batch", "extend_lens", "scratch"),
    Field("batch", "extend_logprob_start_lens", "scratch"),
)

FIELDS: tuple[Field, ...] = _DRAFT + _RELAY + _PAYLOAD + _BATCH


def guess(name: str, value: object, rows: int) -> str:
    """The likeliest kind of an undeclared attribute, for the record that a report proposes."""
    shape = getattr(value, "shape", None)
    if shape is not None and len(shape) and shape[0] == rows:
        return "mirror" if name.endswith("_cpu") else "row"
    if isinstance(value, list | tuple) and len(value) == rows:
        return "row"
    return "scratch" if shape is not None else "constant"
