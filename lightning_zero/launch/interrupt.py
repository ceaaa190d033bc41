"""Ctrl-C and SIGTERM that cannot be lost.

Python tells its main thread of a signal between two steps of its interpreter, by an exception. That is lost where the
exception falls into code that nobody can raise from (a destructor, a callback from C++), into an ``except`` that
catches all, and it is late while C++ code waits. So the signal takes a second way as well: C code of Python's writes
its number into a pipe at once (``signal.set_wakeup_fd``), which the :mod:`~lightning_zero.launch.supervisor` reads and
tells to a thread of this process, :meth:`Presses.on_signal`.

    starting    from the start of the ranks to the first step, where a run has nothing to lose: if the first press has
                not ended it after a moment it is repeated, and after :data:`FORCE_SECONDS` the process is ended
    running     the first Ctrl-C is raised, and raised again before the next batch if it was lost; the second is forced
"""

from __future__ import annotations

import _thread
import atexit
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

REPEAT_SECONDS = (0.7, 1.6)
FORCE_SECONDS = 3.5
"""After a press: when the process is ended from outside of its main thread."""


class Presses:
    """Answers SIGINT and SIGTERM in this process, rank 0 of its machine, while it has ranks.

    Args:
        end_ranks: Ends the other ranks at once, from any thread.

    Attributes:
        pipe: Number of the open file that the supervisor reads; ``None`` where there is no such way (not in the main
            thread).
        starting: No step was made since the run began.
        is_ending: A press has been heard, and the run is on its way out.
    """

    def __init__(self, end_ranks: Callable[[], None]) -> None:
        self._end_ranks = end_ranks
        self.starting = True
        self.is_ending = False
        self.pipe: int | None = None
        self._count = 0
        self._write = self._before = -1
        if threading.current_thread() is threading.main_thread():
            self.pipe, self._write = os.pipe()
            os.set_blocking(self.pipe, False)
            os.set_blocking(self._write, False)
            self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            _forget_in_forks()

    def on_signal(self, number: int) -> None:
        """The supervisor has read ``number``; called in a thread of its own."""
        self._count += number == signal.SIGINT  # several SIGTERM are usual, and a checkpoint may be under way
        if self.starting or self._count > 1:
            threading.Thread(target=self._insist, args=(number,), daemon=True, name="lightning-zero-insists").start()

    def _insist(self, number: int) -> None:
        began = time.monotonic()
        for seconds in REPEAT_SECONDS:
            time.sleep(max(0.0, began + seconds - time.monotonic()))
            if self.is_ending:
                break
            _thread.interrupt_main(signal.Signals(number))
        time.sleep(max(0.0, began + FORCE_SECONDS - time.monotonic()))
        self.force(number)

    def force(self, number: int) -> None:
        """Ends this process whatever its main thread does; what it has started ends with it."""
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        with suppress(Exception):
            self._end_ranks()
            for child in multiprocessing.active_children():
                child.kill()
            sys.stdout.flush()
            os.write(2, f"lightning_zero: {name}: the run is ended.\n".encode())
        os._exit(1 if number == signal.SIGINT else 128 + number)

    def close(self) -> None:
        """The ranks are gone: signals take their usual way alone."""
        if self._write < 0:
            return
        with suppress(ValueError):  # not in the main thread
            found = signal.set_wakeup_fd(self._before)
            if found not in (self._write, -1):
                signal.set_wakeup_fd(found)  # someone else's by now
            os.close(self._write)
            self._write = -1
            assert self.pipe is not None
            os.close(self.pipe)  # until now, so that no signal finds a pipe without a reader


def leave_at_once() -> None:
    """At exit: everything registered for it still runs, but the interpreter is not taken apart, which takes seconds."""
    atexit.register(_leave)


def _leave() -> None:
    atexit.unregister(_leave)
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(1)  # as Lightning ends a process after Ctrl-C


_current: Presses | None = None


def watch(presses: Presses | None) -> None:
    """``presses`` are those of the run that begins; ``None`` when its ranks are gone."""
    global _current
    _current = presses


def set_starting(starting: bool) -> None:
    """Whether this process waits for a first step: there a press must end it within seconds."""
    if _current is not None:
        _current.starting = starting


_registered = False


def _forget_in_forks() -> None:
    """Signals of a forked process (a worker of a data loader is ended by SIGTERM) are not this one's."""
    global _registered
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    if _current is not None:
        with suppress(ValueError):
            signal.set_wakeup_fd(-1)
            if _forks_outlast_interrupts:
                signal.signal(signal.SIGINT, signal.SIG_IGN)


_forks_outlast_interrupts = False


def keep_forks(keep: bool) -> None:
    """Whether processes that are forked from now on (workers of data loaders) live on at Ctrl-C, which a terminal sends
    to them as well: this one needs them until the step is complete after which it saves."""
    global _forks_outlast_interrupts
    _forks_outlast_interrupts = keep
