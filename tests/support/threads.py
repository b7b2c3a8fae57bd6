"""Threads: waiting for what another one does, and those that a test itself starts."""

import threading
import time
from contextlib import contextmanager

HANG_S = 120  # a ceiling against hangs; nothing takes so long


def wait_until(condition):
    """Wait until something is so that another thread or process does."""
    deadline_s = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline_s, f"it was not so within {HANG_S} s"
        time.sleep(0.005)


def act_once(condition, act):
    """Start a thread that acts as soon as something is so; give it, to be joined."""

    def wait_and_act():
        wait_until(condition)
        time.sleep(0.02)  # whoever made it so is on its way to where it waits
        act()

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    return thread


def begin_together(engine, num_sequences):
    """Have an idle engine begin the next so many sequences in one step, however long it takes to submit them."""
    loop, take, is_idle = engine._loop, engine._loop._take_calls, threading.Event()

    def take_all():
        if is_idle.is_set():
            wait_until(lambda: loop._num_open >= num_sequences)
            del loop._take_calls
        return take()

    loop._take_calls = take_all
    loop.ask(is_idle.set)  # until then it waits in the old one, or ends its last step


@contextmanager
def held_up(engine):
    """Hold an engine's thread before it launches its third step from here on, until the block ends.

    What runs stays under way, some of it told already. Gives an event that tells when the thread is there.
    """
    runner, launch, num_steps = engine._runner, engine._runner.launch, 0
    is_there, goes_on = threading.Event(), threading.Event()

    def launch_later(plan):
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            is_there.set()
            assert goes_on.wait(HANG_S)
        return launch(plan)

    runner.launch = launch_later
    try:
        yield is_there
    finally:
        runner.launch = launch
        goes_on.set()


class NewThreads:
    """Tells of the threads that have begun since it was made, and live: those of tests before may end in between."""

    def __init__(self):
        self._before = set(threading.enumerate())

    def names(self):
        return [thread.name for thread in threading.enumerate() if thread not in self._before]
