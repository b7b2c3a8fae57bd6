"""How plain Python code waits on an event loop without a thread of its own.

A program's function runs in a greenlet of the loop's thread. When it needs a value it hands an awaitable to its
driver, a coroutine, which awaits it and switches back with the result or the exception:

    loop -> driver coroutine --switch--> user's function
                 ^   awaits it             | wait_for(awaitable)
                 +-------------------------+

So a thousand waiting programs are a thousand small stacks in one thread. Source of the idea: SQLAlchemy's asyncio
extension (greenlet_spawn / await_only).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from greenlet import getcurrent, greenlet

T = TypeVar("T")

_worker: ContextVar[Any] = ContextVar("worker", default=None)


async def run_in_greenlet(function: Callable[[], T]) -> T:
    """Run a plain function that may use `wait_for`, and give its result.

    Changes: the function runs in a copy of the current context.
    """
    worker = greenlet(function)
    context = contextvars.copy_context()
    context.run(_worker.set, worker)
    worker.gr_context = context
    result = worker.switch()
    while not worker.dead:
        try:
            value = await result
        except BaseException as error:  # noqa: BLE001 - handed to the function, which unwinds; cancellation too
            result = worker.throw(error)
        else:
            result = worker.switch(value)
    worker.gr_context = None  # which holds the worker: without it both are free at once
    return result  # type: ignore[no-any-return]


def can_wait() -> bool:
    """Tell whether the caller is a plain function inside `run_in_greenlet`, so that it may use `wait_for`."""
    return (
        _worker.get() is getcurrent()
    )  # a task started by the function inherits the variable, not the greenlet


def wait_for(awaitable: Awaitable[T]) -> T:
    """Give the result of an awaitable while the event loop goes on; only where `can_wait()`."""
    return getcurrent().parent.switch(awaitable)  # type: ignore[no-any-return]


def block_on(start: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to its end from plain code, wherever that code runs.

    Inside a program it waits on the program's loop. Without a running loop it uses one of its own in this thread,
    so that Ctrl-C works and nothing is left behind. Inside someone else's running loop (a notebook) it uses a
    short-lived thread.
    """
    if can_wait():
        return wait_for(start())
    if _has_running_loop():
        return _run_in_thread(start)
    return asyncio.run(start())


def _has_running_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _run_in_thread(start: Callable[[], Coroutine[Any, Any, T]]) -> T:
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = []
    is_interrupted = False

    async def main() -> T:
        task = asyncio.ensure_future(start())
        running.append((asyncio.get_running_loop(), task))
        if is_interrupted:  # before it was listed
            task.cancel()
        return await task

    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="program")
    future = pool.submit(contextvars.copy_context().run, lambda: asyncio.run(main()))
    try:
        return future.result()
    except BaseException:  # Ctrl-C in this thread ends the program in that one
        is_interrupted = True
        for loop, task in running:
            with contextlib.suppress(RuntimeError):  # its loop is closed: it has ended already
                loop.call_soon_threadsafe(task.cancel)
        raise
    finally:
        pool.shutdown()


MOST_WORKERS = 32  # functions that an event loop waits for in threads, at a time
_seats: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


async def in_thread(function: Callable[[], T]) -> T:
    """Run a plain function in a thread of its own, at most MOST_WORKERS at a time, and give its result.

    Who is cancelled meanwhile leaves the thread alone: Python cannot end it, and neither the loop's nor the process's
    end waits for it, as they would for a thread of the loop's executor.
    Raises:
        RuntimeError: the function raised StopIteration, which no coroutine can. Else what it raises.
    """
    loop = asyncio.get_running_loop()
    async with _seats.setdefault(loop, asyncio.Semaphore(MOST_WORKERS)):
        # Holds (value, error): a future that got a StopIteration as its exception would never be done.
        outcome: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()

        def settle(value: T | None, error: BaseException | None) -> None:
            if not outcome.done():
                outcome.set_result((value, error))

        def work() -> None:
            value, failure = None, None
            try:
                value = function()
            except BaseException as error:  # noqa: BLE001 - raised below, where it is waited for
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle, value, failure)

        threading.Thread(
            target=contextvars.copy_context().run, args=(work,), name="program-tool", daemon=True
        ).start()
        value, error = await outcome
    if isinstance(error, StopIteration):
        raise RuntimeError("a function raised StopIteration") from error
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


async def until_done(future: asyncio.Future[Any]) -> None:
    """Wait until a future is done, without raising what it holds; being cancelled leaves it alone."""
    if future.done():
        return
    waiter: asyncio.Future[None] = future.get_loop().create_future()

    def wake(_: object) -> None:
        if not waiter.done():
            waiter.set_result(None)

    future.add_done_callback(wake)
    try:
        await waiter
    finally:
        future.remove_done_callback(wake)


async def all_or_first_error(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines side by side; give their results in order, or cancel the others and raise the first error."""
    if not work:
        return []
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task in done:
                task.result()
        return [task.result() for task in tasks]
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel the tasks that still run and wait until all have ended; their errors stay with them.

    Being cancelled meanwhile cancels them once more, and is told only when nothing of them runs.
    """
    for task in tasks:
        task.cancel()
    told: asyncio.CancelledError | None = None
    while running := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError as error:
            told = error
            for task in running:
                task.cancel()
    for task in tasks:
        if not task.cancelled():
            task.exception()  # else asyncio says that nobody looked at it
    if told is not None:
        raise told
