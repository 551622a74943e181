"""Capabilities that only show when the tree is driven for a moment."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from conformance.sut.driver import Driver
from conformance.sut.host_request import HarnessGap
from conformance.sut.isolation import StandInUsed
from conformance.sut.loop import Loop
from conformance.sut.surface import Surface
from generators.operations import Admit, Adopt, Filter, Finish, Header, Seed, Step, Sync
from generators.protocol import State, apply
from generators.schedules import Arrival, Schedule, Server


def seeds(surface: Surface) -> tuple[bool, str | None]:
    """Whether a DFlash request that was prefilled elsewhere can join this tree.

    Returns:
        (whether it can, None), or (whether it can, why the harness cannot do it).
    """
    build = getattr(surface.algorithm, "build_disagg_draft_input", None)
    if build is None:
        return False, None
    header = Header(pool=2, block=1, seeded=True)
    driver, state = Driver(surface, header, lambda observed: None), State(header)
    operation = Seed(((0, 1, 1),))
    effect = apply(state, operation)
    batch = driver.new_batch(effect.requests, effect.slots, effect.lengths)
    given = {
        "batch": batch,
        "server_args": surface.settings,
        "last_tokens_tensor": driver.tensor(effect.tokens),
        "future_map": driver.relay,
    }
    draft: object = True
    try:
        draft = build(**{name: given[name] for name in inspect.signature(build).parameters})
        if draft is None:
            return False, None
        driver.perform(operation, effect)
    except (StandInUsed, HarnessGap) as error:
        return draft is not None, f"requests prefilled elsewhere are not checked: {error}"
    except Exception:
        return True, None  # the first trace will report what it raises
    return True, None


def kv_pool(surface: Surface) -> str | None:
    """Why the tree's own KV pools cannot be driven, or None.

    What the tree does with them is for the traces; here a request lives once, at two page sizes.
    """
    life = (Admit(((0, 1, 5),)), Adopt(), Step((1,)), Sync(), Finish(0), Filter())
    for page in (1, 16):
        header = Header(pool=2, block=2, page=page, kv_tokens=96, context=24)
        try:
            driver, state = Driver(surface, header, lambda observed: None), State(header)
            for operation in life:
                driver.perform(operation, apply(state, operation))
        except (StandInUsed, HarnessGap) as error:
            return f"the KV clauses are not checked: {error}"
        except Exception as error:  # a pool or request that is made in a way not seen before
            text = " ".join(str(error).split())[:200]
            return f"the KV clauses are not checked: {type(error).__name__}: {text}"
    return None


def loop(surface: Surface, note: Callable[[Schedule], None] | None = None) -> str | None:
    """Why the tree's event loop cannot be driven, or None.

    Args:
        note: called with each schedule before it runs, for crash reports.

    What it makes of requests is for the schedules; here one is served by either loop. An exception
    with which code says that it is used in a way it was not made for speaks of the harness.
    """
    for overlap in (True, False):
        server = Server(rows=1, overlap=overlap, debug=surface.debug)
        schedule = Schedule(server, (Arrival(0, 1, 3, 4),))
        if note is not None:
            note(schedule)
        try:
            made = Loop(surface, schedule)
        except Exception as error:  # pieces that are put together in a way not seen before
            text = " ".join(str(error).split())[:200]
            return f"the loop clauses are not checked: {type(error).__name__}: {text}"
        try:
            error_text = made.run().error or ""
        except (StandInUsed, HarnessGap) as error:
            return f"the loop clauses are not checked: {error}"
        if error_text.startswith(("TypeError", "AttributeError", "NotImplementedError")):
            return f"the loop clauses are not checked: {error_text}"
    return None


def consumes_publish_once(surface: Surface) -> bool:
    """Whether, under debug, a second resolve without a publish between is refused.

    The rows are written again by hand, so that nothing but the missing publish can be refused.
    """
    header = Header(pool=2, block=1, debug=True)
    driver, state = Driver(surface, header, lambda observed: None), State(header)
    try:
        for operation in (Admit(((0, 1, 1),)), Adopt()):
            driver.perform(operation, apply(state, operation))
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
