"""A tree's own event loop on one schedule, with toy networks.

Everything between a request's arrival and its last token is the tree's, unmodified: the scheduler's
event loop (overlapped or not) with its admission, chunking, mixing, retraction, ``run_batch`` and
result processing; batches, requests, draft input, relay; ``DFlashWorkerV2`` from its own
constructor; pools, allocators, Triton kernels. The networks are toys (:mod:`toy_model`), and what a
scheduler is connected to (sockets, metrics, grammars) answers that there is nothing. How a tree's
pieces are put together is found by their signatures and attributes.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import sys
import textwrap
import traceback
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import torch

from conformance.sut import toy_model
from conformance.sut.doubles import Settings
from conformance.sut.host_request import HarnessGap
from conformance.sut.isolation import StandInUsed
from conformance.sut.kv_cache import KvCache, holder, set_plan_stream
from conformance.sut.loop_doubles import GROUP, Quiet, Ranks
from conformance.sut.surface import (
    BATCH,
    KV,
    MODES,
    POLICY,
    PROCESSOR,
    RESULTS,
    SAMPLING,
    SCHEDULER,
    TRANSLATOR,
    Surface,
    make_relay,
)
from conformance.sut.toy_model import (
    DRAFT_CONFIG,
    Attention,
    Draft,
    DraftModel,
    Target,
    TargetModel,
)
from generators.operations import Header
from generators.schedules import Arrival, Schedule
from reference.decoding import WIDTH
from reference.kv_ledger import View


@dataclass(frozen=True)
class Row:
    """What processing a result did to one request.

    Attributes:
        number: the request.
        before: output tokens that the host knew before.
        tokens: output tokens that it learned.
        commits: tokens that the step says it committed; None for a prefill's row.
        finished: whether the request had finished before.
        retracted: whether it was retracted while the step was in flight.
    """

    number: int
    before: int
    tokens: tuple[int, ...]
    commits: int | None
    finished: bool
    retracted: bool = False


@dataclass(frozen=True)
class Result:
    """One launched batch, at the time its result was processed.

    Attributes:
        launch: number of the launch, from 1.
        kind: ``prefill``, ``mixed``, ``decode`` or ``idle``.
        rows: one per request of the batch.
    """

    launch: int
    kind: str
    rows: tuple[Row, ...]


@dataclass
class Service:
    """What a loop made of a schedule.

    Attributes:
        results: in the order they were processed.
        outputs: by request, what its client was last told that it has put out.
        reasons: by request, name of the reason it finished for, as its client was told; "" where
            it was not.
        matched: by request, the token that its reason names, or None.
        retracted, starved: how often requests were retracted, and how often for want of memory.
        slots: by request, the rows of the request pool that it was given.
        house: the KV cache when all was over, None where the loop raised.
        error: what the tree raised, in one line with its place, or None.
    """

    results: list[Result] = field(default_factory=list)
    outputs: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    matched: dict[int, int | None] = field(default_factory=dict)
    retracted: int = 0
    starved: int = 0
    slots: dict[int, list[int]] = field(default_factory=dict)
    house: View | None = None
    error: str | None = None

    @property
    def decodes(self) -> int:
        """Decode steps."""
        return sum(result.kind in ("decode", "mixed") for result in self.results)


class _Over(BaseException):
    """Ends the event loop: upstream's has no end."""


class Loop:
    """One schedule on one tree; :meth:`run` it once.

    Args:
        surface: the loaded tree.
        schedule: legal.
    """

    def __init__(self, surface: Surface, schedule: Schedule) -> None:
        self.surface, self.schedule = surface, schedule
        server = schedule.header
        self.service = Service()
        self.requests: dict[int, Any] = {}
        self._arriving = sorted(schedule.requests, key=lambda request: request.at)
        self._turn = self._launches = 0
        self._kinds: dict[int, tuple[Any, int, str]] = {}
        set_plan_stream(server.plan_stream)
        surface.settings.set(
            speculative_num_draft_tokens=server.block,
            max_speculative_num_draft_tokens=server.block,
            pp_max_micro_batch_size=server.rows,
        )
        self.kv = KvCache(
            surface,
            Header(
                pool=server.rows + 1,
                block=server.block,
                page=server.page,
                kv_tokens=server.kv_tokens,
                context=server.context,
            ),
        )
        self.relay = make_relay(surface, self.kv.pool, needs_cpu_seq_lens=server.needs_cpu_seq_lens)
        self._connect_networks()
        self.worker = self._worker()
        self.scheduler = self._scheduler()

    # -- networks -------------------------------------------------------------------------------

    def _connect_networks(self) -> None:
        """The target's and the draft's runner, over the tree's own KV pool."""
        surface, server = self.surface, self.schedule.header
        device = surface.device.device
        table = self.kv.pool.req_to_token
        attention = Attention(server.model, self.kv.width, device)
        self.target = Target(attention, table, server.kv_tokens + server.page)
        with surface.loader.unsealed():
            memory = importlib.import_module(KV + "memory_pool").MHATokenToKVPool(
                size=server.kv_tokens,
                page_size=server.page,
                dtype=torch.float32,
                head_num=1,
                head_dim=1,
                layer_num=1,
                device=str(device),
                enable_memory_saver=False,
                enable_alt_stream=False,
            )
        draft = Draft(attention, table, memory)
        self.config = Settings(
            is_encoder_decoder=False,
            vocab_size=WIDTH,
            hidden_size=1,
            context_len=server.context,
            num_hidden_layers=1,
            hf_config=SimpleNamespace(),
            think_end_id=None,
            think_end_ids=None,
            self_opened_think_start_ids=None,
            **dict.fromkeys(_PLAIN_MODEL, False),
        )
        common = {
            "device": device,
            "req_to_token_pool": self.kv.pool,
            "token_to_kv_pool": memory,
            "tp_group": GROUP,
            **dict.fromkeys(_READ_DONE),
        }
        self.runner = Settings(
            **common,
            model=TargetModel(device),
            model_config=self.config,
            token_to_kv_pool_allocator=self.kv.allocator,
            server_args=surface.settings,
            spec_aux_config=Settings(draft_model_config=None),
            spec_algorithm=surface.algorithm,
            attn_backend=SimpleNamespace(init_forward_metadata=lambda batch: None),
            prefill_attention_backend_str="triton",
            kv_index_translator=self._translator(memory, draft=False),
            page_size=server.page,
            ps=Ranks(),
            ngram_embedding_manager=SimpleNamespace(enabled=False),
            **dict.fromkeys(_PLAIN_RUNNER, False),
            **dict.fromkeys(_RUNNER_LACKS),
            **vars(Ranks()),
        )
        runner = Settings(
            **common,
            model=DraftModel(server.block),
            model_config=Settings(hf_config={"dflash_config": DRAFT_CONFIG}, vocab_size=WIDTH),
            forward=draft.forward,
            kv_index_translator=self._translator(memory, draft=True),
        )
        surface.settings.set(draft_worker=SimpleNamespace(model_runner=runner))

    def _translator(self, memory: Any, *, draft: bool) -> Any:
        """The tree's names for KV slots, where it has names beside their numbers."""
        if self.surface.loader.source_of(TRANSLATOR) is None:
            return None
        with self.surface.loader.unsealed():
            make = importlib.import_module(TRANSLATOR).KVIndexTranslator
        return _made(
            make,
            req_to_token=self.kv.pool.req_to_token,
            req_to_token_pool=self.kv.pool,
            token_to_kv_pool_allocator=self.kv.allocator,
            token_to_kv_pool=memory,
            page_size=self.schedule.header.page,
            device=str(self.surface.device.device),
            is_draft_worker=draft,
        )

    def forward_batch_generation(
        self,
        batch: Any = None,
        forward_batch: Any = None,
        is_verify: bool = False,
        return_kv_loc_plan: bool = False,
        capture_hidden_mode: Any = None,
        **_: Any,
    ) -> Any:
        """The target worker's forward, of the tree's own ForwardBatch.

        Returns:
            the tree's ``GenerationBatchResult``.
        """
        if forward_batch is None:
            make = self.surface.function(MODES, "ForwardBatch").init_new
            given = {
                "capture_hidden_mode": capture_hidden_mode,
                "return_hidden_states_before_norm": False,
            }
            known = inspect.signature(make).parameters
            given = {name: value for name, value in given.items() if name in known}
            forward_batch = make(batch, self.runner, **given)
        output = self.target.forward(forward_batch)
        tokens = None if is_verify else torch.argmax(output.next_token_logits, -1)
        result = self.surface.function(RESULTS, "GenerationBatchResult")(
            logits_output=output, next_token_ids=tokens, can_run_cuda_graph=False
        )
        if return_kv_loc_plan:
            result.kv_loc_plan = forward_batch.kv_loc_plan
        return result

    @property
    def device(self) -> Any:
        """Where the target worker's tensors are."""
        return self.surface.device.device

    @property
    def model_runner(self) -> Any:
        """The target worker's runner."""
        return self.runner

    def _worker(self) -> Any:
        """The tree's DFlash worker, by its own constructor."""
        given = {"server_args": self.surface.settings, "target_worker": self, "ps": Ranks()}
        names = list(inspect.signature(self.surface.worker.__init__).parameters)[1:]
        worker = self.surface.worker(**{name: given.get(name, 0) for name in names})
        # Both are switched on where there is a GPU; the interpreter runs the kernels here.
        for name in _KERNEL_SWITCHES:
            if not hasattr(worker, name):
                raise HarnessGap(f"the worker has no {name} any more")
            setattr(worker, name, True)
        # A kernel that projects and writes keys and values of a real network at once.
        worker._use_fused_kv_materialize, worker._fused_kv_helper = False, None
        return worker

    # -- the scheduler --------------------------------------------------------------------------

    def _scheduler(self) -> Any:
        surface, server, kv = self.surface, self.schedule.header, self.kv
        if surface.scheduler is None:
            raise HarnessGap("the tree's scheduler does not load")
        scheduler = object.__new__(_alone(surface.scheduler))
        streams = surface.device.streams()
        ratio = server.ratio / 100
        tracker = surface.function(_TRACKER, "NewTokenRatioTracker")
        beams = SimpleNamespace(
            pending_member_rows=lambda batch: 0, maybe_select_and_relay=lambda *_, **__: None
        )
        quiet = Quiet(**dict.fromkeys(_COUNTERS, 0), enable_metrics=False)
        shared = {
            "beam_coordinator": beams,
            "disaggregation_mode": surface.function(_DISAGGREGATION, "DisaggregationMode").NULL,
            "draft_worker": self.worker,
            "enable_overlap": server.overlap,
            "is_generation": True,
            "metrics_collector": quiet,
            "metrics_reporter": quiet,
            "model_config": self.config,
            "model_worker": self.worker,
            "output_streamer": Quiet(stream_output=self._stream_output),
            "req_to_token_pool": kv.pool,
            "server_args": surface.settings,
            "token_to_kv_pool_allocator": kv.allocator,
            "tree_cache": kv.tree,
        }
        vars(scheduler).update(
            shared,
            **dict.fromkeys(_SCHEDULER_LACKS),
            **dict.fromkeys(_SCHEDULER_OFF, False),
            **dict.fromkeys(_SCHEDULER_ZERO, 0),
            **dict.fromkeys(_SCHEDULER_TELLS, quiet),
            _deferred_input_requests=[],
            batch_record_buf=[None, None],
            chunked_prefill_size=server.chunk,
            max_prefill_tokens=server.chunk,
            copy_stream=streams.copy,
            copy_stream_ctx=streams.using(streams.copy),
            device=str(surface.device.device),
            device_module=streams.module,
            dp_attn_adapter=self,
            forward_stream=streams.forward,
            forward_stream_ctx=streams.using(streams.forward),
            future_map=self.relay,
            grammar_manager=SimpleNamespace(has_waiting_grammars=lambda: False),
            is_mixed_chunk=server.mixed,
            load_inquirer=Quiet(_get_num_pending_tokens=lambda *_, **__: 0),
            max_running_requests=server.rows,
            new_token_ratio_tracker=tracker(
                init=ratio, min=ratio / 4, decay=ratio / 32, current=ratio
            ),
            ngram_embedding_manager=SimpleNamespace(
                prepare_for_forward=lambda batch, chunked_req: batch
            ),
            page_size=server.page,
            policy=surface.function(POLICY, "SchedulePolicy")("fcfs", kv.tree, False, False, False),
            pp_group=SimpleNamespace(is_first_rank=True, is_last_rank=True),
            ps=Ranks(),
            request_receiver=self,
            return_health_check_ipcs=[],
            running_batch=surface.schedule_batch(reqs=[], batch_is_full=False),
            schedule_stream=streams.schedule,
            spec_algorithm=surface.algorithm,
            tp_worker=self,
            waiting_queue=[],
        )
        scheduler.batch_result_processor = _made(
            surface.function(PROCESSOR, "SchedulerBatchResultProcessor"),
            **shared,
            enable_overlap_mlx=False,
            hisparse_coordinator=None,
            decode_offload_manager=None,
            logprob_result_processor=quiet,
            abort_request=None,
        )
        scheduler._war_barrier_enabled = _initial(scheduler, "_war_barrier_enabled")
        # The scheduler's own test of retraction, read from the environment at import.
        module: Any = sys.modules[SCHEDULER]
        module.TEST_RETRACT = server.retract_every > 0
        module.TEST_RETRACT_INTERVAL = max(1, server.retract_every)
        return scheduler

    # -- what the scheduler is connected to -----------------------------------------------------

    def recv_requests(self, **_: Any) -> list[Any]:
        """A turn of the loop begins: requests arrive, or the loop is over."""
        self._turn += 1
        scheduler = self.scheduler
        while self._arriving and self._arriving[0].at <= self._turn:
            request = self._arriving.pop(0)
            scheduler.waiting_queue.append(self._request(request))
        ended = all(request.finished() for request in self.requests.values())
        if not self._arriving and ended and scheduler.last_batch is None:
            raise _Over
        if self._turn > self._most_turns():
            waiting = [f"r{n}" for n, request in self.requests.items() if not request.finished()]
            self.service.error = (
                f"after {self._turn} turns the loop still has {', '.join(waiting) or 'a batch'}"
            )
            raise _Over
        return []

    def _most_turns(self) -> int:
        """Turns in which any schedule is over: every token in a step of its own, three times."""
        last = max(request.at for request in self.schedule.requests)
        return last + 60 + 3 * sum(r.prompt + r.limit for r in self.schedule.requests)

    def _request(self, arrival: Arrival) -> Any:
        """The tree's own request."""
        parameters = self.surface.function(SAMPLING, "SamplingParams")(
            max_new_tokens=arrival.limit,
            temperature=0.0,
            stop_token_ids=list(arrival.stops) or None,
            ignore_eos=False,
        )
        parameters.normalize(None)
        request = self.surface.function(BATCH, "Req")(
            str(arrival.number), "", array("q", self.schedule.prompt(arrival)), parameters
        )
        request.vocab_size, request.tokenizer, request.eos_token_ids = WIDTH, None, None
        self.requests[arrival.number] = request
        return request

    def _stream_output(self, requests: list[Any], *_: Any, **__: Any) -> None:
        """Clients are told what their requests have put out."""
        for request in requests:
            number, reason = int(request.rid), request.finished_reason
            self.service.outputs[number] = list(request.output_ids_through_stop)
            self.service.reasons[number] = "" if reason is None else type(reason).__name__
            self.service.matched[number] = getattr(reason, "matched", None)

    def maybe_prepare_mlp_sync_batch(self, batch: Any, need_sync: bool | None = None) -> Any:
        """Data parallelism asks a server without work for an idle batch."""
        server = self.schedule.header
        if batch is not None or not server.idle or need_sync is None or self._turn % 3:
            return batch
        made = self.surface.schedule_batch.init_new(
            [],
            self.kv.pool,
            self.kv.allocator,
            self.kv.tree,
            self.config,
            server.overlap,
            self.surface.algorithm,
        )
        made.prepare_for_idle()
        return made

    def maybe_convert_decode_to_extend(self, batch: Any) -> Any:
        """No decode is run as a prefill."""
        return batch

    # -- running --------------------------------------------------------------------------------

    def run(self) -> Service:
        """Run the loop until every request has finished.

        Raises:
            StandInUsed, HarnessGap: the tree asks for what the harness does not have.
        """
        self._watch()
        server, scheduler = self.schedule.header, self.scheduler
        loop = scheduler.event_loop_overlap if server.overlap else scheduler.event_loop_normal
        try:
            loop()
        except _Over:
            self.surface.device.settle()
            self.service.house = self.kv.view()
        except (StandInUsed, HarnessGap):
            if not self._gave_up():
                raise
        except Exception as error:
            lacking = getattr(error, "obj", None)
            if isinstance(error, AttributeError) and type(lacking).__module__ in _DOUBLES:
                raise HarnessGap(f"the loop: {error}") from error
            self.service.error = _told(error)
            if self.service.error is None:
                raise
        for number in self.requests:
            self.service.outputs.setdefault(number, [])
            self.service.reasons.setdefault(number, "")
        if self._kinds and self.service.error is None:
            self.service.error = f"{len(self._kinds)} launches whose result was never processed"
        if self._gave_up():
            self.service.error = "the worker gave up a Triton kernel and went on without it"
        return self.service

    def _gave_up(self) -> bool:
        """Whether the worker runs a kernel no more, which it does after an exception."""
        return not all(getattr(self.worker, name) for name in _KERNEL_SWITCHES)

    def _watch(self) -> None:
        """Look at every launch, result and retraction; what is called stays the tree's."""
        scheduler = self.scheduler
        run_batch, process = scheduler.run_batch, scheduler.process_batch_result
        add = scheduler._add_request_to_queue

        def launch(batch: Any, *arguments: Any, **named: Any) -> Any:
            self._launches += 1
            kind = _kind(batch)
            for request in batch.reqs:
                slots = self.service.slots.setdefault(int(request.rid), [])
                slot = holder(request, "req_pool_idx").req_pool_idx
                if kind in ("prefill", "mixed") and slot is not None and slot not in slots[-1:]:
                    slots.append(slot)
            result = run_batch(batch, *arguments, **named)
            self._kinds[id(result)] = (result, self._launches, kind)
            return result

        def processed(batch: Any, result: Any, *arguments: Any, **named: Any) -> Any:
            if id(result) not in self._kinds:
                self.service.error = "a result was processed twice"
                raise _Over
            _, launch_number, kind = self._kinds.pop(id(result))
            requests = list(batch.reqs)
            before = [
                (len(r.output_ids), r.finished(), bool(getattr(r, "is_retracted", False)))
                for r in requests
            ]
            done = process(batch, result, *arguments, **named)
            commits: list[int | None] = [None] * len(requests)
            if kind == "decode" and result.accept_lens is not None:
                commits[:] = [int(length) for length in _listed(result.accept_lens)]
            rows = tuple(
                Row(
                    int(request.rid),
                    known,
                    tuple(list(request.output_ids)[known:]),
                    commits[row] if row < len(commits) else None,
                    finished,
                    retracted,
                )
                for row, (request, (known, finished, retracted)) in enumerate(
                    zip(requests, before, strict=True)
                )
            )
            self.service.results.append(Result(launch_number, kind, rows))
            return done

        def retracted(request: Any, *arguments: Any, **named: Any) -> Any:
            self.service.retracted += 1
            self.service.starved += not self.schedule.header.retract_every
            return add(request, *arguments, **named)

        scheduler.run_batch = launch
        scheduler.process_batch_result = processed
        scheduler._add_request_to_queue = retracted


_TRACKER = "sglang.srt.managers.scheduler_components.new_token_ratio_tracker"
_DISAGGREGATION = "sglang.srt.disaggregation.utils"

_KERNEL_SWITCHES = ("_use_triton_prepare_block", "_use_triton_accept_bonus")
"""Attributes with which the worker gives a kernel up after an exception."""

_PLAIN_MODEL = (
    "is_multimodal",
    "is_matryoshka",
    "model_is_mrope",
    "requires_mm_token_modalities",
    "use_ngram_embedding",
)
"""Of a model's configuration: it is none of these."""

_READ_DONE = ("shared_read_done_event", "war_fastpath_read_done_event")
"""Events of a runner that says when it has read what is shared; these say nothing, so that the
scheduler waits for the whole forward."""

_PLAIN_RUNNER = (
    "attn_tp_sequence_sharded",
    "is_draft_worker",
    "model_is_mrope",
    "prefill_aware_swa",
    "use_ngram_embedding",
)
"""Of the target's runner: it is none of these."""

_RUNNER_LACKS = (
    "decode_cuda_graph_runner",
    "graph_runner",
    "lora_manager",
    "mambaish_config",
    "watermark_state",
)

_COUNTERS = (
    "forward_ct_decode",
    "last_gen_throughput",
    "num_generated_tokens",
    "num_retracted_reqs",
    "spec_total_num_accept_tokens",
)
"""What statistics count."""

_SCHEDULER_LACKS = (
    "_confidence_budget_prepare",
    "_pending_chunked_abort_req",
    "async_d2h_worker",
    "chunked_req",
    "cur_batch",
    "decode_offload_manager",
    "dllm_config",
    "dynamic_chunk_sizer",
    "external_corpus_manager",
    "forward_sleep_time",
    "hisparse_coordinator",
    "last_batch",
    "load_snapshot_writer",
    "lora_drainer",
    "max_queued_requests",
    "min_free_slots_delayer",
    "prefill_bs_tracker",
    "prefill_delayer",
    "rust_server",
    "scripted_scheduler_hook",
    "truncation_align_size",
)
"""Attributes of a scheduler that are None on a plain server."""

_SCHEDULER_OFF = (
    "_engine_paused",
    "_event_loop_should_restart",
    "_sched_idled",
    "attn_dp_enabled",
    "gracefully_exit",
    "is_hybrid_swa",
    "require_mlp_sync",
    "use_ngram_embedding",
)
"""Attributes that are False."""

_SCHEDULER_ZERO = (
    "_prefill_decode_interval_remaining",
    "batch_record_ct",
    "dflash_prefill_refill_target",
    "forward_ct",
    "max_prefill_bs",
    "prefill_decode_interval",
    "prefill_decode_interval_min_bs",
    "priority_scheduling_preemption_threshold",
    "processed_tokens_counter",
)
"""Attributes that are 0."""

_SCHEDULER_TELLS = (
    "flush_wrapper",
    "ipc_channels",
    "load_publisher",
    "profiler_manager",
    "session_controller",
)
"""What a scheduler tells things that nobody listens to here."""


_DOUBLES = frozenset(
    {"types", *(f"conformance.sut.{name}" for name in ("loop", "loop_doubles", "toy_model"))}
)
"""Modules of classes that the harness gives the tree; what they lack is the harness's doing."""

_HARNESS = Path(__file__).parents[1]


def _alone(scheduler: Any) -> Any:
    """A class of schedulers with nothing optional switched on and nobody who watches."""

    class Alone(scheduler):  # type: ignore[misc]
        def __getattr__(self, name: str) -> Any:
            if name.startswith("enable_"):
                return False
            if name.startswith("__"):
                raise AttributeError(name)
            raise HarnessGap(f"the tree reads Scheduler.{name}, which the harness does not have")

        def _record_step_counters(self, *_: Any, **__: Any) -> None:
            """Statistics."""

        def on_idle(self) -> None:
            """Self-checks and statistics between requests."""

        def publish_load_snapshot(self, *_: Any, **__: Any) -> None:
            """Statistics."""

    return Alone


def _initial(scheduler: Any, attribute: str) -> Any:
    """What the tree's scheduler sets an attribute to, by its own expression; else False."""
    code = _expression(type(scheduler).__base__, attribute)
    if code is None:
        return False
    return eval(code, vars(sys.modules[SCHEDULER]), {"self": scheduler})


@functools.cache
def _expression(owner: Any, attribute: str) -> CodeType | None:
    """The expression that a class's source assigns to an attribute of an instance."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == f"self.{attribute}":
            return compile(ast.Expression(node.value), SCHEDULER, "eval")
    return None


def _made(make: Callable[..., Any], **given: Any) -> Any:
    """Call with what the callable takes of `given`."""
    names = inspect.signature(make).parameters
    return make(**{name: value for name, value in given.items() if name in names})


def _kind(batch: Any) -> str:
    if not batch.reqs:
        return "idle"
    if batch.forward_mode.is_mixed():
        return "mixed"
    return "prefill" if batch.forward_mode.is_extend() else "decode"


def _listed(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, torch.Tensor) else list(values)


def _told(error: Exception) -> str | None:
    """An exception in one line: its kind, its message, and the tree's function that raised it.

    None where the harness raised it: then it says nothing about the tree. The networks are asked
    by the tree, and what they cannot compute is its doing.
    """
    frame = traceback.extract_tb(error.__traceback__)[-1]
    path = Path(frame.filename)
    if path.is_relative_to(_HARNESS) and path.stem != toy_model.__name__.rpartition(".")[2]:
        return None
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__} in {frame.name}: {text}"
