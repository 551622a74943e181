"""A request as the tree sees it: what schedulers and batches ask of it, and nothing else."""

from __future__ import annotations

import copy
from typing import Any

from conformance.sut.doubles import Settings
from generators.protocol import Request
from generators.values import STRIDE

_TOP_KS = (1, 1, 20, 1 << 30)
"""What requests ask for, in turn: two agree, and of the others one asks for everything."""
_EARLIER = -7
"""A token that a request put out before it was retracted."""


def top_k(number: int) -> int:
    """How many candidates request `number` samples from."""
    return _TOP_KS[number % len(_TOP_KS)]


def sampling(number: int) -> Settings:
    """The sampling parameters of request `number`."""
    return _SAMPLING[number % len(_TOP_KS)]


_SAMPLING = [
    Settings(top_k=k, max_new_tokens=1 << 20, custom_params=None, stop_strs=[], stop_regex_strs=[])
    for k in _TOP_KS
]


class HarnessGap(AttributeError):
    """The tree reads something that the harness's request or pool does not have."""


class HostRequest:
    """A request as the tree sees it: lengths on the host, nothing to sample or to stream."""

    is_prefill_only = False
    multimodal_inputs = None
    swa_branching_seqlen = None
    beam_group = None
    retraction_backup = None
    retracted_stain = True  # its cached tokens were counted before
    extend_len = 0
    extend_range = Settings(length=0)

    def __init__(self, request: Request, no_capture: Any) -> None:
        self.rid = request.number
        self.kv = self  # newer trees keep lengths and slot on ``req.kv``
        self.req_pool_idx = request.slot
        self.kv_committed_len = length = request.committed
        # A prompt takes no memory: only its length is asked for. One that comes back after it was
        # retracted has put out tokens before, of which the last is the one to go on with.
        self.origin_input_ids = range(length - request.earlier)
        self.prefix_indices = range(length)
        self.prefix_len = self.extend_end = length
        self.output_ids = [_EARLIER] * request.earlier + [request.token]
        self.kv_allocated_len = (length // STRIDE + 1) * STRIDE + STRIDE
        self.sampling_params = sampling(request.number)
        self.decode_batch_idx = 0
        self.finished_flag = False
        self.return_logprob = False
        self.return_hidden_states = False
        self.return_hidden_states_mode = no_capture
        self.grammar = None

    def finished(self) -> bool:
        return self.finished_flag

    @property
    def seqlen(self) -> int:
        """Tokens that the host knows of, the bonus token included."""
        return self.kv_committed_len + 1

    def refresh_fill_ids(self) -> None:
        """The ids that are prefilled matter to nobody here."""

    _refresh_fill_ids = refresh_fill_ids

    def init_next_round_input(self, tree_cache: Any) -> None:
        """The prompt is in the pool already; there is no prefix to look for."""

    def set_extend_range(self, start: int, end: int) -> None:
        self.extend_end = end

    def copy(self, committed: int) -> HostRequest:
        """The same request with lengths of its own, of which the host knows `committed`."""
        other = copy.copy(self)
        other.kv = other
        other.kv_committed_len = committed
        return other

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise HarnessGap(f"the tree reads Req.{name}, which the harness does not have")
