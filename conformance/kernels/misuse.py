"""Ways to pass arguments that a wrapper may refuse: one record each; without torch.

A *layout* that the worker does not use is either refused or served like any other (B8). Arguments
of a wrong shape or type, or outside what the wrapper says it needs, are nobody's domain: a clear
error is the only right outcome (wild). Either way a refusal comes before anything is written.

:mod:`conformance.kernels.contracts` carries them out.
"""

from __future__ import annotations

from dataclasses import dataclass

CALL = "kernel-layout"
WILD_CALL = "kernel-misuse"


@dataclass(frozen=True)
class Misuse:
    """One way to pass arguments.

    Attributes:
        kernel: whose.
        argument: which argument or output is not as it should be.
        kind: how: a function of :mod:`conformance.kernels.contracts`.
        clause: that a wrong outcome breaks.
        refuses: whether only an error will do, which makes it a wild use.
    """

    kernel: str
    argument: str
    kind: str
    clause: str = "B8"
    refuses: bool = False

    @property
    def name(self) -> str:
        """Unique, for people and for :attr:`generators.kernel_inputs.Case.misuse`."""
        return f"{self.kernel} with {self.argument} {self.kind}"

    @property
    def call_name(self) -> str:
        """The call that its checks are counted under."""
        return WILD_CALL if self.refuses else CALL


def _wild(kernel: str, argument: str, kind: str, clause: str = "B7") -> Misuse:
    return Misuse(kernel, argument, kind, clause, refuses=True)


MISUSES = {
    misuse.name: misuse
    for misuse in (
        Misuse("prepare", "ids", "spaced"),
        Misuse("prepare", "positions", "spaced"),
        Misuse("prepare", "cache_locs", "spaced"),
        Misuse("prepare", "req_to_token", "transposed"),
        Misuse("accept", "accepts", "spaced"),
        Misuse("accept", "commits", "spaced"),
        Misuse("accept", "bonus", "spaced"),
        Misuse("accept", "new_lens", "spaced"),
        Misuse("accept", "tokens", "spaced"),
        Misuse("accept", "candidates", "spaced"),
        Misuse("accept", "targets", "spaced"),
        Misuse("accept", "prefix_lens", "as a column"),
        Misuse("correct", "candidates", "transposed"),
        Misuse("correct", "targets", "transposed"),
        # The gather's own comment says that its buffers are contiguous; nothing checks it.
        _wild("gather", "topk_p", "spaced", "B8"),
        _wild("gather", "hidden_states", "spaced", "B8"),
        _wild("gather", "indices", "past the pool"),
        _wild("prepare", "ids", "a row short"),
        _wild("prepare", "positions", "a column short"),
        _wild("prepare", "prefix_lens", "a row short"),
        _wild("prepare", "ids", "of type int32"),
        _wild("accept", "targets", "a column short"),
        _wild("accept", "tokens", "a column short"),
        _wild("accept", "accepts", "a row short"),
        _wild("correct", "targets", "a column short"),
        _wild("correct", "targets", "a row short"),
        _wild("selector", "uniforms", "a column short"),
    )
}
"""Every misuse by name."""
