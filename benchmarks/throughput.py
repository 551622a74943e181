"""Calls per second on one core, debug off: bare relay, replay with model, end to end.

    python benchmarks/throughput.py [--sglang 0.5.23] [--repeat 5]

``bare``        publish, stash and both resolves of the tree, two rows, nothing around them;
``tree only``   the driver on the tree, without model and comparison;
``replay``      driver, model and comparison, on traces made beforehand;
``end to end``  the same with generation by Hypothesis;
``KV pool``     replay of traces on the tree's own KV pools, its kernels in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from conformance.engine import check
from conformance.replay import Player
from conformance.sut.device import PlainDevice
from conformance.sut.doubles import Settings
from conformance.sut.driver import Driver, table_width
from conformance.sut.source import NEWEST, locate
from conformance.sut.surface import (
    Surface,
    make_draft_input,
    make_pool,
    make_relay,
    open_tree,
)
from generators.operations import Trace
from generators.protocol import State, apply
from generators.strategies import Enough, generate, traces


def bare(surface: Surface) -> int:
    """Calls made: 2,000 steps of a two-row batch through the relay alone."""
    relay = make_relay(surface, make_pool(surface, 9), needs_cpu_seq_lens=True)
    slots = torch.tensor([3, 5])
    tokens, lengths = torch.tensor([7, 8]), torch.tensor([10, 20])
    batch = Settings(
        spec_info=make_draft_input(surface, tokens, lengths),
        req_pool_indices_cpu=slots,
        req_pool_indices=slots,
        prefill_input_ids_cpu=None,
        input_ids=None,
        enable_overlap=True,
        spec_algorithm=surface.algorithm,
        device="cpu",
    )
    batch.spec_info.future_indices = slots
    payload = surface.payload(batch.spec_info)
    for _ in range(2000):
        relay.publish(slots, lengths)
        relay.stash(slots, payload)
        relay.resolve_seq_lens_cpu(batch)
        surface.resolve_forward_inputs(batch, relay)
    return 8000


def drive(surface: Surface, sample: list[Trace]) -> int:
    """Calls made by the driver with nobody watching."""
    calls = 0
    for trace in sample:
        driver = Driver(surface, trace.header, lambda observation: None, width=table_width(trace))
        state = State(trace.header)
        for operation in trace.operations:
            driver.perform(operation, apply(state, operation))
        calls += driver.calls
    return calls


def replay(surface: Surface, sample: list[Trace]) -> int:
    player = Player(surface)
    return sum(player.replay(trace).calls for trace in sample)


def end_to_end(surface: Surface, operations: int) -> int:
    return check(surface, operations=operations, seed=1).calls


def sample_of(surface: Surface, count: int, *, kv_pool: bool = False) -> list[Trace]:
    sample: list[Trace] = []

    def consume(trace: Trace) -> None:
        sample.append(trace)
        if len(sample) == count:
            raise Enough

    generate(traces(surface.capabilities, kv_pool=kv_pool), 1, consume)
    return sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sglang", default=NEWEST)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    device = PlainDevice()
    device.prepare(compiled=False)
    surface = open_tree(locate(options.sglang).root, device, debug=False)
    sample, pooled = sample_of(surface, 200), sample_of(surface, 8, kv_pool=True)
    cases: dict[str, Callable[[], int]] = {
        "bare": lambda: bare(surface),
        "tree only": lambda: drive(surface, sample),
        "replay": lambda: replay(surface, sample),
        "end to end": lambda: end_to_end(surface, 10_000),
        "KV pool": lambda: replay(surface, pooled),
    }
    rates: dict[str, float] = {}
    for name, case in cases.items():
        case()
        measured = []
        for _ in range(options.repeat):
            start = time.perf_counter()
            calls = case()
            measured.append(calls / (time.perf_counter() - start))
        rates[name] = statistics.median(measured)
        share = rates[name] / rates["bare"]
        print(f"{name:<11} {rates[name]:>8,.0f} calls/s  {share:5.2f} of bare", flush=True)
    print(f"sglang {options.sglang}, torch {torch.__version__}, median of {options.repeat}")
    sys.stdout.flush()
    os._exit(0)  # no teardown: native modules would print what they leak


if __name__ == "__main__":
    main()
