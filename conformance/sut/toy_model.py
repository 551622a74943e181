"""A toy target and a toy draft on the device: what the worker calls in place of two networks.

Both are the functions of :class:`reference.decoding.Model`, computed over what really lies in the
KV caches: a token's key and value are written at the slot that the forward was given, and read back
through the request's row of ``req_to_token``, up to the length that the forward was given and no
further than the host planned for. So a wrong slot, length, position, token or plan changes the
output, and what the worker failed to write for the draft costs accept length.

A cell holds a token and its position, ``position * WIDTH + token + 1``; 0 was never written.
Nothing here waits for the device.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from reference.decoding import BASE, MASK, MODULUS, VOCABULARY, WIDTH, Model


class Attention:
    """A toy's view of a KV cache: states of the histories that it holds.

    Args:
        model: the functions.
        longest: tokens of the longest history.
    """

    def __init__(self, model: Model, longest: int, device: torch.device) -> None:
        self.model = model
        powers = [1]
        for _ in range(longest):
            powers.append(powers[-1] * BASE % MODULUS)
        self._powers = torch.tensor(powers, dtype=torch.int64, device=device)
        self._places = torch.arange(longest, dtype=torch.int64, device=device)

    def states(self, cells: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
        """State of each history.

        Args:
            cells: (slots,) int64.
            rows: (n, width) slots of each request, by position.
            lengths: (n,) tokens of each history.

        Returns:
            (n,) int64.
        """
        places = self._places[: rows.shape[1]]
        lengths = lengths.to(torch.int64).unsqueeze(1)
        there = places < lengths
        ahead = (lengths - 1 - places).clamp(min=0, max=len(self._powers) - 1)
        terms = cells[rows.to(torch.int64)] * self._powers[ahead]
        start = (self.model.seed + 1) * self._powers[lengths.clamp(min=0, max=len(places))]
        return (torch.where(there, terms, 0).sum(1, keepdim=True) + start).squeeze(1) % MODULUS

    def after(self, states: Tensor, cells: Tensor) -> Tensor:
        """States one token later."""
        return (states * BASE + cells) % MODULUS

    def tokens(self, states: Tensor) -> Tensor:
        """The target's next tokens."""
        return (states >> 7) % VOCABULARY

    def accepts(self, states: Tensor, block: int) -> Tensor:
        """Drafts that are right, see :meth:`reference.decoding.Model.accepts`."""
        dice = states.unsqueeze(1) * (2 * self._places[: block - 1] + 1) % MODULUS >> 11
        right = dice % 8 < self.model.agreement
        return right.to(torch.int64).cumprod(1).sum(1)


def cells(tokens: Tensor, positions: Tensor) -> Tensor:
    """What a KV cache holds of tokens at their positions."""
    return positions.to(torch.int64) * WIDTH + tokens.to(torch.int64) + 1


def logits(tokens: Tensor) -> Tensor:
    """Scores of which the greatest is at `tokens`."""
    return torch.nn.functional.one_hot(tokens, WIDTH).to(torch.float32)


class Record:
    """Attributes, and None for all others: an output's many optional parts."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class Target:
    """The target's forward: prefill and verify.

    Args:
        table: ``req_to_token``.
        slots: slots of the KV cache, the padding slot included.
    """

    def __init__(self, attention: Attention, table: Tensor, slots: int) -> None:
        self.attention, self.table = attention, table
        self.cells = torch.zeros(slots, dtype=torch.int64, device=table.device)

    def forward(self, batch: Any) -> Record:
        """A forward of the tree's own ForwardBatch.

        Returns:
            ``next_token_logits``, of every token in a verify, else of each request's last one;
            ``hidden_states`` of every token.
        """
        self.cells[batch.out_cache_loc.to(torch.int64)] = cells(batch.input_ids, batch.positions)
        rows = self.table[batch.req_pool_indices.to(torch.int64)]
        states = self.attention.states(self.cells, rows, planned(batch))
        if batch.forward_mode.is_target_verify():
            states = self._verify(batch, states, rows)
        hidden = batch.input_ids.to(torch.float32).unsqueeze(1)
        return Record(next_token_logits=logits(self.attention.tokens(states)), hidden_states=hidden)

    def _verify(self, batch: Any, states: Tensor, rows: Tensor) -> Tensor:
        """States after each token of the blocks, which are read back from the cache."""
        block = batch.spec_info.draft_token_num
        places = batch.seq_lens.to(torch.int64).unsqueeze(1) + torch.arange(
            block, device=rows.device
        )
        found = self.cells[rows.gather(1, places.clamp(max=rows.shape[1] - 1)).to(torch.int64)]
        found = torch.where(places < rows.shape[1], found, 0)
        steps = []
        for column in found.unbind(1):
            states = self.attention.after(states, column)
            steps.append(states)
        return torch.stack(steps, 1).reshape(-1)


class Draft:
    """The draft's forward, over a KV pool of the tree's that the worker fills.

    Args:
        table: ``req_to_token``.
        pool: the tree's ``MHATokenToKVPool`` with one layer, one head, one dimension.
    """

    def __init__(self, attention: Attention, table: Tensor, pool: Any) -> None:
        self.attention, self.table, self.pool = attention, table, pool
        self._columns = torch.arange(table.shape[1], device=table.device)

    def forward(self, batch: Any) -> Record:
        """Propose a block behind each request's bonus token.

        Returns:
            ``logits_output.hidden_states`` (tokens, WIDTH), the proposals' logits; the first of
            each block is nobody's.
        """
        block = batch.input_embeds.shape[0] // len(batch.req_pool_indices)
        keys, values = self.pool.k_buffer[0].view(-1), self.pool.v_buffer[0].view(-1)
        asked = batch.input_embeds.view(-1).to(torch.int64)
        own = cells(asked, batch.positions)
        # The block's own keys and values, as a network's attention would write them.
        slots = batch.out_cache_loc.to(torch.int64)
        keys[slots], values[slots] = own.to(keys.dtype), (asked + 1).to(values.dtype)
        found, known = keys.to(torch.int64), values.to(torch.int64)
        # A key and a value that are not of one token are no token's.
        found = torch.where((found - 1) % WIDTH + 1 == known, found, 0)
        rows = self.table[batch.req_pool_indices.to(torch.int64)]
        states = self.attention.states(found, rows, planned(batch))
        states = self.attention.after(states, own.view(-1, block)[:, 0])
        # It was trained on mask tokens behind the first, at the slots that the row has for them.
        places = batch.seq_lens.to(torch.int64).unsqueeze(1) + self._columns[:block]
        mine = rows.gather(1, places.clamp(max=rows.shape[1] - 1)).to(torch.int64)
        asks = (asked.view(-1, block)[:, 1:] == MASK).all(1)
        there = ((slots.view(-1, block) == mine) | (places >= rows.shape[1])).all(1)
        right = self.attention.accepts(states, block) * (asks & there)
        positions = batch.positions.view(-1, block)
        proposals = [torch.zeros_like(positions[:, 0])]
        for place in range(1, block):
            token = self.attention.tokens(states)
            wrong = (token + 1) % VOCABULARY
            proposals.append(torch.where(right >= place, token, wrong))
            states = self.attention.after(states, cells(token, positions[:, place]))
        hidden = logits(torch.stack(proposals, 1).view(-1))
        return Record(logits_output=Record(hidden_states=hidden), can_run_graph=False)


def planned(batch: Any) -> Tensor:
    """Lengths of a forward's histories, cut where the host did not plan for more.

    Attention's plans are made from host lengths and their sum; those may be too large, never too
    small. A prefill's prefix and new tokens must come to its length.
    """
    lengths: Tensor = batch.seq_lens.to(torch.int64)
    seen = lengths
    if batch.seq_lens_cpu is not None:
        bound = batch.seq_lens_cpu.to(device=lengths.device, dtype=torch.int64, non_blocking=True)
        seen = torch.minimum(seen, bound)
    if batch.seq_lens_sum is not None:
        seen = torch.where(lengths.sum() <= batch.seq_lens_sum, seen, 0)
    if batch.extend_seq_lens is not None and batch.extend_prefix_lens is not None:
        extended = (batch.extend_prefix_lens + batch.extend_seq_lens).to(torch.int64)
        seen = torch.where(extended == lengths, seen, 0)
    return seen


class DraftAttention:
    """One layer of the draft, as far as the worker writes its keys and values itself."""

    num_kv_heads = head_dim = 1
    k_norm = q_norm = None
    v_scale = None
    attn = Record(layer_id=0)

    def kv_proj_only(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden + 1, hidden + 1

    def apply_k_norm(self, keys: Tensor) -> Tensor:
        return keys

    def apply_k_rope(self, positions: Tensor, keys: Tensor) -> Tensor:
        return keys + positions.to(keys.dtype).unsqueeze(1) * WIDTH


class DraftModel:
    """The draft model beside its forward."""

    candidate_selector = lilicorr = None
    is_nemotron_35_draft = False
    layers = (Record(self_attn=DraftAttention()),)

    def __init__(self, block: int) -> None:
        self.block_size = block

    def set_block_size(self, block: int) -> None:
        self.block_size = block

    def project_target_hidden(self, hidden: Tensor) -> Tensor:
        return hidden

    def prepare_context_hidden_for_kv(self, layer: Any, hidden: Tensor) -> Tensor:
        return hidden


class TargetModel:
    """What the draft borrows of the target: its embedding and its head."""

    def __init__(self, device: torch.device) -> None:
        weight = torch.eye(WIDTH, dtype=torch.float32, device=device)
        self.lm_head = SimpleNamespace(weight=weight)

    def get_input_embeddings(self) -> Any:
        return self._embed

    def modules(self) -> list[Any]:
        return []

    def _embed(self, tokens: Tensor) -> Tensor:
        return tokens.to(torch.float32).unsqueeze(-1)


DRAFT_CONFIG = {"mask_token_id": MASK}
"""The draft's configuration, as far as it says something."""
