"""What a trace must make visible, by the reference model: the driver's twin.

For every call the driver observes on the tree, the oracle says what the observation must be. It
holds reference relays and draft inputs (:mod:`reference`) and nothing of the tree but the facts
listed in :class:`Facts`. Steps of the loop, laws and wild uses have a module each.
"""

from conformance.oracle.facts import Facts
from conformance.oracle.steps import Oracle

__all__ = ["Facts", "Oracle"]
