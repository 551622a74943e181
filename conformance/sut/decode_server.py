"""Requests that arrive prefilled: the part of a decode server that seeds their rows.

The batch is formed and its rows are written by the tree's own
``SchedulerDisaggregationDecodeMixin.get_new_prebuilt_batch``, on a bare scheduler whose streams
only note what was waited for. No KV is transferred: a request's prompt counts as a prefix that the
pool already holds.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from conformance.sut.doubles import Settings
from conformance.sut.host_request import HarnessGap

if TYPE_CHECKING:
    from conformance.sut.driver import Driver


class _Stream:
    """A stream that notes, in the order of what happens, that another one waited for it."""

    def __init__(self, order: list[str]) -> None:
        self._order = order

    def wait_stream(self, other: Any) -> None:
        self._order.append("drain")

    wait_event = wait_stream

    def record_event(self, event: Any = None) -> Any:
        return self if event is None else event

    def synchronize(self, *_: Any) -> None:
        self._order.append("drain")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise HarnessGap(f"the tree asks for a stream's {name}, which the harness does not have")


class DecodeServer:
    """A bare scheduler of a decode server, for one trace.

    Attributes:
        order: what happened while the last batch was seeded: ``drain`` where the schedule stream
            waited for the forward stream, ``publish`` where lengths were published.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.order: list[str] = []
        scheduler: Any = object.__new__(_bare(driver.surface.scheduler))
        scheduler.grammar_manager = Settings(has_waiting_grammars=lambda: False)
        scheduler.enable_priority_scheduling = False
        scheduler.req_to_token_pool = driver.pool
        scheduler.max_running_requests = driver.header.pool
        scheduler.token_to_kv_pool_allocator = driver.allocator
        scheduler.tree_cache = driver.tree
        scheduler.model_config = driver.model_config
        scheduler.enable_overlap = driver.header.overlap
        scheduler.spec_algorithm = driver.surface.algorithm
        scheduler.chunked_req = None
        scheduler.kv_checksum_computer = None
        scheduler.ngram_embedding_manager = Settings(prepare_for_forward=_unchanged)
        scheduler.schedule_stream = _Stream(self.order)
        scheduler.forward_stream = _Stream(self.order)
        scheduler.future_map = driver.relay
        self._scheduler = scheduler

    def seed(self, requests: list[Any], running: Any) -> Any:
        """The batch of `requests`, their rows written to the relay.

        Args:
            requests: host requests that already hold their slots.
            running: the running batch, or None.
        """
        driver, relay = self.driver, self.driver.relay
        self.order.clear()
        self._scheduler.waiting_queue = list(requests)
        publish = relay.publish

        def noted(*arguments: Any, **keywords: Any) -> Any:
            self.order.append("publish")
            return publish(*arguments, **keywords)

        relay.publish = noted  # on this instance, while the batch is seeded
        try:
            with self._noting_device():
                batch = self._scheduler.get_new_prebuilt_batch(
                    running if running is not None else driver.surface.schedule_batch(reqs=[])
                )
        finally:
            del relay.publish
        if batch is None:
            raise LookupError("no waiting request was seeded")
        return batch

    @contextlib.contextmanager
    def _noting_device(self) -> Iterator[None]:
        """On a CPU, where streams are inert, also note waits that go through the device module."""
        module = torch.get_device_module(self.driver.device)
        if self.driver.device.type != "cpu":
            yield
            return
        stream = _Stream(self.order)
        with (
            mock.patch.object(module, "current_stream", return_value=stream),
            mock.patch.object(module, "synchronize", side_effect=stream.synchronize),
        ):
            yield


@functools.cache
def _bare(scheduler: type) -> type:
    """The scheduler's class, refusing what the harness did not give it."""

    def refuse(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise HarnessGap(f"the tree reads Scheduler.{name}, which the harness does not have")

    return type("BareScheduler", (scheduler,), {"__getattr__": refuse})


def _unchanged(batch: Any, **_: Any) -> Any:
    return batch
