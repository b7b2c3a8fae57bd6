"""Deadlines that pass at a named step instead of after a time that a busy machine may need for something else."""

from contextlib import contextmanager

LONG_S = 600  # a test's timeout_s: longer than all that comes before the steps
STEPS = 4


@contextmanager
def deadlines_pass(engine):
    """Have the deadline of each request that runs alone pass after its fourth step; the other times stay as they are."""
    scheduler, num_steps = engine._loop._scheduler, 0

    def expire(now_s):
        nonlocal num_steps
        num_steps += 1
        found = type(scheduler).expire(scheduler, now_s + 2 * LONG_S * (num_steps > STEPS))
        if found:
            num_steps = 0
        return found

    engine._loop.ask(lambda: setattr(scheduler, "expire", expire))
    try:
        yield
    finally:
        engine._loop.ask(lambda: delattr(scheduler, "expire"))
