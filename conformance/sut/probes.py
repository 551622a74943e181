"""Capabilities that only show when the tree is driven for a moment."""

from __future__ import annotations

from conformance.sut.driver import Driver, HarnessGap
from conformance.sut.isolation import StandInUsed
from conformance.sut.surface import Surface
from generators.operations import Admit, Adopt, Header
from generators.protocol import State


def consumes_publish_once(surface: Surface) -> bool:
    """Whether, under debug, a second resolve without a publish between is refused.

    The rows are written again by hand, so that nothing but the missing publish can be refused.
    """
    header = Header(pool=2, block=1, debug=True)
    driver, state = Driver(surface, header, lambda observed: None), State(header)
    try:
        for operation in (Admit(((0, 1, 1),)), Adopt()):
            driver.perform(operation, state.apply(operation))
        driver.relay.resolve_seq_lens_cpu(driver.running)
        for channel in driver.channels().values():
            channel.fill_(1)
        driver.relay.resolve_seq_lens_cpu(driver.running)
    except (StandInUsed, HarnessGap):
        raise
    except AssertionError:
        return True
    except Exception:
        return False  # whatever else it raises, the first trace will report
    return False
