"""Reports ranks that wait long for others: which rank waits for which, and in which line of user code.

A thread of each rank inspects the rank's main thread every few seconds, which costs a step nothing. If the main thread
has been inside one collective for :data:`WAIT_SECONDS`, the rank asks all ranks through the process group's store where
they are. Each answers from its thread, and rank 0 prints the answers once per wait. No rank is ended: the collective
raises after ``timeout_seconds``. If all ranks wait for their devices, inside a kernel of NCCL, nothing is reported.
"""

from __future__ import annotations

import linecache
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from lightning_zero.launch.tracebacks import is_python, is_users

WAIT_SECONDS = 30.0
POLL_SECONDS = 4.0
_BUSY = 0.0005
"""Fraction of a core. A rank that uses more makes progress, even if it always appears to be in the same call."""
_ASKED = "lightning_zero/waits"
_COLLECTIVES = (str(Path(dist.__file__).parent), str(Path(__file__).parents[1] / "comm"))


class Watch:
    """Watches the thread that creates it, until :meth:`close`. Needs the default process group."""

    def __init__(self) -> None:
        world: Any = dist.group.WORLD
        self._rank, self._size = world.rank(), world.size()
        self._store = world.get_group_store().clone()  # a separate connection: the other may be blocked by a wait
        self._store.set_timeout(timedelta(seconds=POLL_SECONDS))
        self._asked, self._watched = self._question(), threading.get_ident()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="lightning_zero waits")
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join(2 * POLL_SECONDS)

    def _run(self) -> None:
        try:
            clock = time.pthread_getcpuclockid(self._watched)
            self._look(lambda: time.clock_gettime(clock))
        except (AttributeError, OSError, RuntimeError):
            return  # this system has no such clock, or the store has ended with the run

    def _look(self, cpu_seconds: Any) -> None:
        seen, since, used, said = (), 0.0, 0.0, False
        while not self._ended.wait(POLL_SECONDS):
            if (asked := self._question()) != self._asked:
                self._asked, said = asked, True
                self._answer()
            call, now = self._call(), time.monotonic()
            if call != seen or cpu_seconds() - used > _BUSY * (now - since):
                seen, since, used, said = call, now, cpu_seconds(), False
            elif call and not said and now - since >= WAIT_SECONDS:  # only the first rank's request counts
                self._store.compare_set(_ASKED, self._asked, f"{self._rank} {now - since:.0f} {now}")

    def _question(self) -> str:
        return self._store.get(_ASKED).decode() if self._store.check([_ASKED]) else ""

    def _answer(self) -> None:
        keys = [f"{_ASKED}/{self._asked}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], self._where())
        if self._rank or self._ended.wait(2 * POLL_SECONDS + 1):
            return
        answers: dict[str, list[int]] = {}
        for rank, key in enumerate(keys):
            here = self._store.check([key])
            answers.setdefault(self._store.get(key).decode() if here else _SILENT, []).append(rank)
            self._store.delete_key(key)
        lines = [f"\n  rank {', '.join(map(str, ranks))} {answer}" for answer, ranks in answers.items()]
        first, seconds, _ = self._asked.split()
        text = f"lightning_zero: rank {first} has waited {seconds} s for others:{''.join(lines)}"
        print(text, file=sys.stderr, flush=True)

    # -- the watched thread --------------------------------------------------------------------------------------

    def _frames(self) -> Iterator[FrameType]:
        """Yields the frames of the watched thread, innermost first, without those of Python's standard library."""
        frame = sys._current_frames().get(self._watched)
        while frame is not None:
            if not is_python(frame.f_code.co_filename):
                yield frame
            frame = frame.f_back

    def _collective(self) -> list[FrameType]:
        return list(takewhile(lambda frame: frame.f_code.co_filename.startswith(_COLLECTIVES), self._frames()))

    def _call(self) -> tuple[Any, ...]:
        """Returns an identifier of the collective call under way; empty if there is none."""
        return tuple((id(frame), frame.f_code) for frame in self._collective()[-1:])

    def _where(self) -> str:
        inside = [name for frame in self._collective() if (name := frame.f_code.co_name) != "wrapper"]  # torch's logger
        doing = f"waits in {inside[-1]}, called" if inside else "is"
        for frame in self._frames():
            name, line = frame.f_code.co_filename, frame.f_lineno
            if is_users(name):
                return f"{doing} at {name}:{line} in {frame.f_code.co_name}: {linecache.getline(name, line).strip()}"
        return f"{doing} outside of your code"


_SILENT = "does not respond: it is stopped, or has ended"
