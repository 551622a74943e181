"""A tree's own KV cache: its pools, allocator, prefix cache and requests, for one trace.

Everything that decides who holds which slot is the tree's: ``ReqToTokenPool``, the token or paged
allocator, the prefix cache that it runs without prefix sharing, ``Req`` with its KV record,
``ScheduleBatch.prepare_for_extend``, ``prepare_for_decode``, ``check_decode_mem`` and
``release_req``, ``release_kv_cache``. The harness says which row a request is given, as traces do,
and lengthens outputs where the host commits results. A token's id is its position.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import os
from array import array
from typing import Any

import torch

from conformance.sut.doubles import Settings
from conformance.sut.host_request import HarnessGap, sampling
from conformance.sut.surface import BATCH, EAGLE, EAGLE_DRAFT, KV, Surface, sizing
from generators.operations import Header
from generators.protocol import Request
from generators.protocol.kv import UNFINISHED
from reference.kv_ledger import View

_ENDED = Settings(is_error=False)
"""A reason for which a request ended."""


class KvCache:
    """The KV cache of one trace.

    Args:
        surface: the loaded tree.
        header: the trace's setting; its ``kv_tokens`` is not 0.

    Attributes:
        pool: the tree's request pool. Its table lies in memory that goes on below it, so that what
            runs over the last row is seen too.
        allocator, tree: the tree's token allocator and prefix cache.
        width: positions of a row, by the tree's own sizing.
    """

    def __init__(self, surface: Surface, header: Header) -> None:
        self.surface, self.header = surface, header
        device = surface.device.device
        surface.settings.set(page_size=header.page)
        self.width = header.context + self._headroom()
        pool = self._load(KV + "memory_pool", "ReqToTokenPool")
        self.pool = pool(header.pool - 1, self.width, str(device), False)
        rows = self.pool.req_to_token.shape[0]
        if rows != header.pool:
            raise HarnessGap(f"a pool of {header.pool - 1} requests has {rows} rows")
        memory = torch.zeros((rows + 1, self.width), dtype=torch.int32, device=device)
        self._memory, self.pool.req_to_token = memory, memory[:rows]
        paged = header.page > 1
        kind = "PagedTokenToKVPoolAllocator" if paged else "TokenToKVPoolAllocator"
        self.allocator = self._load(KV + "allocator", kind)(
            size=header.kv_tokens,
            **({"page_size": header.page} if paged else {}),
            dtype=torch.int64,
            device=str(device),
            kvcache=None,
            need_sort=False,
        )
        self.tree = self._prefix_cache()
        self._release = self._load(KV + "common", "release_kv_cache")
        self._hosts: dict[int, Any] = {}
        self._generations: dict[int, int] = {}
        self._rows: dict[int, Any] = {}

    def _load(self, module: str, name: str) -> Any:
        with self.surface.loader.unsealed():
            return getattr(importlib.import_module(module), name)

    def _headroom(self) -> int:
        """Positions of a row beyond the context, as the tree gives them."""
        found = sizing(self.surface, _HEADROOM)
        if found is None:
            raise HarnessGap(f"the tree has no {_HEADROOM}")
        return int(found(*[self.surface.settings] * len(_required(found))))

    def _prefix_cache(self) -> Any:
        """What the tree caches prefixes with when it is told not to share them."""
        chunked = self.surface.loader.source_of(KV + "chunk_cache") is not None
        cache = self._load(*(KV + "chunk_cache", "ChunkCache") if chunked else _RADIX)
        parameters = self._load(KV + "cache_init_params", "CacheInitParams")
        return cache(
            parameters(
                disable=True,
                req_to_token_pool=self.pool,
                token_to_kv_pool_allocator=self.allocator,
                page_size=self.header.page,
            )
        )

    # -- requests -------------------------------------------------------------------------------

    def host(self, request: Request) -> Any:
        """The tree's own request; one that comes back after it was retracted is the same one."""
        found = self._hosts.get(request.number)
        if found is None:
            make = self.surface.function(BATCH, "Req")
            found = make(request.number, "", array("q"), sampling(request.number))
            self._hosts[request.number] = found
        return found

    def extend(
        self, batch: Any, requests: list[Request], lengths: list[int], chunk: int | None
    ) -> None:
        """Give the requests their slots and prompts, and prefill them to `lengths`.

        Args:
            chunk: number of the request whose prompt goes on behind its length.
        """
        fresh = []
        for request, length in zip(requests, lengths, strict=True):
            host = self.host(request)
            if self._rows.get(request.slot) is host:
                self._continue(host)
            else:
                fresh.append(request.slot)
                self._generations[request.number] = request.generation
                self._rows[request.slot] = host
            unfinished = request.number == chunk
            put_out = 0 if unfinished else min(len(host.output_ids), length - 1)
            prompt = length + UNFINISHED if unfinished else length - put_out
            host.origin_input_ids = array("q", range(prompt))
            host.output_ids = array("q", range(prompt, prompt + put_out))
            host.full_untruncated_fill_ids = array("q")
            if request.slot in fresh:
                host.init_next_round_input(self.tree)
            else:
                _refresh(host)
            _extend_to(host, length)
        others = self._keep_back(fresh)
        try:
            batch.prepare_for_extend()
        finally:
            self.pool.free_slots = [*self.pool.free_slots, *others]

    def _continue(self, host: Any) -> None:
        """What the scheduler does with an unfinished prompt between two chunks."""
        common = importlib.import_module(KV + "common")
        checkpoint = getattr(common, "checkpoint_kv_cache", None)
        if checkpoint is not None:
            checkpoint(host, self.tree)
        else:
            common.maybe_cache_unfinished_req(host, self.tree, chunked=True)

    def _keep_back(self, rows: list[int]) -> list[int]:
        """Leave the pool only the rows that the trace gives; returns the others."""
        free = self.pool.free_slots
        others = [row for row in free if row not in rows]
        if len(others) + len(rows) != len(free):
            raise HarnessGap(f"the pool's free rows are {sorted(free)}, not {rows}")
        self.pool.free_slots = list(rows)
        return others

    def learn(self, request: Request, length: int) -> None:
        """The host processes a result after which the request has `length` tokens."""
        host = self._hosts[request.number]
        running = any(host is other for other in self._rows.values())
        if not running or request.generation != self._generations[request.number]:
            return  # it has ended or was retracted: nobody wants the result
        self.commit(host, max(length, self.committed(host)))
        known = len(host.origin_input_ids) + len(host.output_ids)
        host.output_ids.extend(range(known, length + 1))

    def release(self, requests: list[Request]) -> None:
        """The requests have ended, maybe before their last tokens: what they hold is given back."""
        # Results are processed in a group of their own: frees are held until all are.
        self.allocator.free_group_begin()
        for request in requests:
            host = self._rows.pop(request.slot)
            host.finished_reason = _ENDED
            host.finished_len = max(0, len(host.output_ids) - request.past_stop)
            insert = "checkpoint" if "checkpoint" in _required(self._release) else "is_insert"
            self._release(host, self.tree, **{insert: bool(host.output_ids)})
        self.allocator.free_group_end()

    def retract(self, batch: Any, rows: list[int]) -> None:
        """Rows of a batch give back what they hold and come again later."""
        stay = len(batch.reqs) - len(rows)
        for left, row in enumerate(reversed(rows)):
            host = batch.reqs[row]
            slot = next(slot for slot, other in self._rows.items() if other is host)
            more = len(_required(batch.release_req)) - 2
            batch.release_req(row, stay + len(rows) - left - 1, *[self.surface.settings] * more)
            del self._rows[slot]

    # -- lengths --------------------------------------------------------------------------------

    @staticmethod
    def committed(host: Any) -> int:
        """Committed length of a request."""
        return int(holder(host, "kv_committed_len").kv_committed_len)

    @staticmethod
    def commit(host: Any, length: int) -> None:
        """Set it."""
        holder(host, "kv_committed_len").kv_committed_len = length

    @staticmethod
    def allocated(host: Any) -> int:
        """Allocated length of a request."""
        return int(holder(host, "kv_allocated_len").kv_allocated_len)

    def view(self) -> View:
        """The cache as it is now, copied."""
        whole = getattr(self.allocator, "get_all_free_pages", None)
        if whole is not None:
            free = whole()
        else:
            free = torch.cat((self.allocator.free_pages, self.allocator.release_pages))
        hosts = sorted(self._rows.items())
        return View(
            table=self._memory.to(torch.int64).cpu(),
            free=free.tolist(),
            free_rows=list(self.pool.free_slots),
            committed={row: self.committed(host) for row, host in hosts},
            allocated={row: self.allocated(host) for row, host in hosts},
        )

    # -- another algorithm ----------------------------------------------------------------------

    def copy(self, batch: Any) -> Any:
        """A copy of a batch with a cache and requests of its own."""
        cache = copy.copy(self)
        cache._memory = self._memory.clone()
        cache.pool = copy.copy(self.pool)
        cache.pool.req_to_token = cache._memory[: len(self.pool.req_to_token)]
        cache.allocator, cache.tree = copy.copy(self.allocator), copy.copy(self.tree)
        cache.tree.req_to_token_pool = cache.pool
        cache.tree.token_to_kv_pool_allocator = cache.allocator
        twin = copy.copy(batch)
        twin.reqs = [copy.copy(host) for host in batch.reqs]
        for host in twin.reqs:
            if holder(host, "kv_allocated_len") is not host:
                host.kv = copy.copy(host.kv)
        twin.req_to_token_pool, twin.token_to_kv_pool_allocator = cache.pool, cache.allocator
        twin.tree_cache = cache.tree
        return twin

    def eagle(self, batch: Any) -> None:
        """Prepare a batch for a decode as EAGLE does."""
        if self.surface.loader.source_of(EAGLE) is not None:
            prepare = getattr(importlib.import_module(EAGLE), "eagle_prepare_for_decode", None)
            if prepare is not None:
                prepare(batch)
                return
        mixin = self._load(EAGLE_DRAFT, _EAGLE_MIXIN)
        mixin.prepare_for_decode(object.__new__(mixin), batch)


_HEADROOM = "get_req_to_token_extra_context_len"
_RADIX = (KV + "radix_cache", "RadixCache")
_EAGLE_MIXIN = "EagleDraftInputV2Mixin"


def set_plan_stream(on: bool) -> None:
    """Whether a decode is prepared on a stream of its own; trees ask their environment."""
    os.environ["SGLANG_ENABLE_OVERLAP_PLAN_STREAM"] = "1" if on else "0"


def holder(host: Any, name: str) -> Any:
    """What carries a length of a request: newer trees give it a record of its own."""
    record = getattr(host, "kv", None)
    return record if hasattr(record, name) else host


def _required(function: Any) -> list[str]:
    """Parameters that must be given."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is inspect.Parameter.empty]


def _refresh(host: Any) -> None:
    """Put the ids of prompt and output together."""
    (getattr(host, "refresh_fill_ids", None) or host._refresh_fill_ids)()


def _extend_to(host: Any, length: int) -> None:
    """The next prefill of the request ends at `length`."""
    if hasattr(host, "set_extend_range"):
        start = host.prefix_len if hasattr(host, "prefix_len") else len(host.prefix_indices)
        host.set_extend_range(start, length)
    elif hasattr(host, "set_extend_input_len"):
        host.fill_len = length
        host.set_extend_input_len(length - len(host.prefix_indices))
    else:
        host.extend_end = length
