"""Threads that a test itself starts, told from those of tests before it, which may end in between."""

import threading


class NewThreads:
    """Tells of the threads that have begun since it was made, and live."""

    def __init__(self):
        self._before = set(threading.enumerate())

    def names(self):
        return [thread.name for thread in threading.enumerate() if thread not in self._before]
