"""The supervisor: a process that starts, watches and ends the other ranks of one machine, and decides how a run ends.

Rank 0 runs this file by its path, because importing the package takes seconds: import only the standard library here.
Rank 0 cannot do this work itself. It may be killed or stopped, or hang inside a collective, and then none of its Python
code runs.

:data:`TABLE` lists the states of a run and its transitions. In this file, rank 0 is the first rank of its machine.

Which rank failed first? A rank that raises writes its error and the time into a file at once, before other ranks can
notice (:func:`lightning_zero.launch.failure.write`). A rank that crashed leaves no file; it counts from
:data:`NOTICE_SECONDS` before the supervisor has noticed. A rank that was killed by SIGKILL comes first: no error of
another rank has that effect. The earliest counts (:meth:`Supervisor._first_failure`), once, at the end of the run.

    argument          the plan, as JSON: ``command``, ``cwd``, ``env`` (in addition to this process's), ``stdout`` (a
                      file descriptor for ranks without a log), ``folder`` (the session's, removed at the end),
                      ``rank0`` and ``pid`` (rank 0's numbers), ``logs`` (for each other rank the path, or "")
    rank 0 sends      at its end ``rank 0 done`` or ``rank 0 failed``
    supervisor sends  at the end the cause of a failure, in one line

The supervisor is in rank 0's process group, so it gets a terminal's Ctrl-C as well. It cannot rely on rank 0 for that:
Python raises an exception in rank 0's main thread, which may be caught and dropped, and which comes late while C++ code
waits. Each rank leads its own session, so that killing its process group also ends the processes that it has started.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

ERROR_FILE = "LIGHTNING_ZERO_ERROR_FILE"
"""Environment variable of the ranks that are started here: the file into which they write their error."""
RANK_LOG = "LIGHTNING_ZERO_RANK_LOG"
"""Environment variable of the ranks that are started here: the file of their output; empty for the terminal."""
PREEMPTED_EXIT_CODE = 143
"""128 + SIGTERM: the rank was asked to end, and did so after saving."""
POLL_SECONDS = 0.05
NOTICE_SECONDS = 0.5
ALONE_SECONDS = 5.0
"""Seconds from an error of a rank until it is killed. A script that has caught the error would otherwise continue, and
the other ranks would wait for this one in their next collective."""


class State(enum.Enum):
    """The states of a run."""

    RUNNING = "all ranks run"
    ALARMED = "rank 0 must end: another rank has failed, or Ctrl-C was pressed a second time"
    FINISHING = "rank 0 has finished, and the other ranks finish as well"
    ENDING = "rank 0 has failed: the other ranks get a moment to end by themselves"
    OVER = "the remaining ranks are killed"


S = State
TABLE = (
    # in one of these states        this event         leads to
    ((S.RUNNING,), "rank failed", S.ALARMED),
    ((S.RUNNING,), "second Ctrl-C", S.ALARMED),
    ((S.RUNNING,), "rank 0 done", S.FINISHING),
    ((S.ALARMED,), "rank 0 done", S.ENDING),
    ((S.RUNNING, S.ALARMED), "rank 0 failed", S.ENDING),
    ((S.FINISHING,), "rank failed", S.ENDING),
    ((S.FINISHING, S.ENDING), "all ended", S.OVER),
    ((S.ALARMED, S.FINISHING, S.ENDING), "time over", S.OVER),
    ((S.RUNNING, S.ALARMED, S.FINISHING, S.ENDING), "rank 0 gone", S.OVER),
)
"""The first matching row counts. An event that has no row in the current state is ignored."""
SECONDS = {S.ALARMED: 8.0, S.FINISHING: 60.0, S.ENDING: 3.0}
"""Seconds until "time over" in a state, in ``ENDING`` none after a Ctrl-C. Other states have no limit."""
KILLED = "was killed by SIGKILL, probably out of memory"


class Failure(NamedTuple):
    """How a rank has failed; the smallest is the first."""

    at: float
    rank: int
    what: str
    text: str = ""
    """The traceback."""


class Supervisor:
    """Starts the other ranks of one machine, and lives until all of them have ended."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.rank0: int = plan["rank0"]
        self.logs: dict[int, str] = dict(enumerate(plan["logs"], self.rank0 + 1))
        self.ranks: dict[int, subprocess.Popen[bytes]] = {}
        self.noticed: dict[int, float] = {}
        """Rank -> time at which the supervisor has noticed its end."""
        self.state = State.RUNNING
        self.cause = ""
        """The failure that has ended the run, in one line."""
        self._deadline = float("inf")
        self._has_killed_rank0 = False

    def start(self) -> None:
        for rank, log in self.logs.items():
            names = {"LOCAL_RANK": str(rank - self.rank0), RANK_LOG: log}
            names[ERROR_FILE] = error_file(self.plan["folder"], rank)
            out: Any = open(log, "ab") if log else self.plan["stdout"]  # noqa: SIM115
            self.ranks[rank] = subprocess.Popen(
                self.plan["command"],
                env={**os.environ, **self.plan["env"], **names},
                cwd=self.plan["cwd"],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT if log else None,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
            if log:
                out.close()

    def watch(self) -> None:
        """Follows :data:`TABLE` until the run is over, then ends the remaining processes."""
        while self.state is not State.OVER:
            for event in self._events():
                self._follow(event)
        self.end()

    def _events(self) -> Iterator[str]:
        """Yields the events since the last call. Waits up to :data:`POLL_SECONDS` for a message of rank 0."""
        if request := _request():
            yield request
        if len(_presses) > 1:
            yield "second Ctrl-C"
        for rank, process in self.ranks.items():
            if process.poll() is not None:
                self.noticed.setdefault(rank, time.time())
            elif (error := self._read(rank)) and time.time() - error["at"] > ALONE_SECONDS:
                process.kill()
        if any(self._has_failed(rank) for rank in self.noticed):
            yield "rank failed"
        if os.getppid() != self.plan["pid"]:
            yield "rank 0 gone"
        if len(self.noticed) == len(self.ranks):
            yield "all ended"
        if time.monotonic() > self._deadline or (self.state is State.ENDING and _presses):
            yield "time over"

    def _follow(self, event: str) -> None:
        for states, name, following in TABLE:
            if self.state in states and name == event:
                before, self.state = self.state, following
                self._deadline = time.monotonic() + SECONDS.get(following, float("inf"))
                if following is State.OVER:
                    self._report(before, event)
                return

    # -- the cause -----------------------------------------------------------------------------------------------

    def _report(self, state: State, event: str) -> None:
        """Prints why the run ends, and ends rank 0 if it has not reacted in ``state``."""
        kills_rank0 = state is State.ALARMED and os.getppid() == self.plan["pid"]
        if failure := self._first_failure():
            if failure.rank != self.rank0:
                self.cause = f"rank {failure.rank} {failure.what}"
            if failure.rank != self.rank0 or kills_rank0 or event == "rank 0 gone":  # else rank 0 shows its error
                log = f"; its log: {self.logs[failure.rank]}" if self.logs.get(failure.rank) else ""
                _tell(f"{self._named(failure.rank)} {failure.what}{log}\n{failure.text}".rstrip())
        elif event == "rank 0 gone" and not _presses and len(self.noticed) < len(self.ranks):
            _tell(f"{self._named(self.rank0)} has ended unexpectedly, as if it {KILLED}: ending the other ranks.")
        elif state is State.FINISHING and event == "time over":
            late = ", ".join(str(rank) for rank in self.ranks if rank not in self.noticed)
            self.cause = f"rank {late} did not end in time after rank 0, and was killed"
            _tell(f"{self.cause}.")
        if kills_rank0:
            why = "was asked to end, but did not" if _presses else "did not react to that"
            _tell(f"{self._named(self.rank0)} {why}: ending it.")
            os.kill(self.plan["pid"], signal.SIGKILL)
            self._has_killed_rank0 = True

    def _first_failure(self) -> Failure | None:
        """Returns the failure that came first, or rank 0's, if rank 0 has raised the same error."""
        found = [failure for rank in (self.rank0, *self.ranks) if (failure := self._failure_of(rank))]
        if not found:
            return None
        first = min(found)
        return next((own for own in found if own.rank == self.rank0 and own.what == first.what), first)

    def _failure_of(self, rank: int) -> Failure | None:
        if error := self._read(rank):
            return Failure(error["at"], rank, f"failed: {error['summary']}", error["traceback"])
        if rank == self.rank0 or not self._has_failed(rank):
            return None
        code = self.ranks[rank].returncode
        if code == -signal.SIGKILL:
            return Failure(0.0, rank, KILLED)
        what = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
        return Failure(self.noticed[rank] - NOTICE_SECONDS, rank, what)

    def _has_failed(self, rank: int) -> bool:
        """Returns whether ``rank`` has ended in an error."""
        return self.ranks[rank].returncode not in (None, 0, PREEMPTED_EXIT_CODE)

    def _read(self, rank: int) -> dict[str, Any] | None:
        """Returns what ``rank`` has written about its error."""
        try:
            with open(error_file(self.plan["folder"], rank), encoding="utf-8") as file:
                error: dict[str, Any] = json.load(file)
        except (OSError, ValueError):
            return None
        return error

    def _named(self, rank: int) -> str:
        return f"rank {rank} (process {self.plan['pid'] if rank == self.rank0 else self.ranks[rank].pid})"

    # -- the end -------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Kills the remaining ranks and the processes that ranks have started, and removes files."""
        for process in self.ranks.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # also processes that an ended rank has left behind
            process.wait()
        is_rank0_gone = self._has_killed_rank0 or os.getppid() != self.plan["pid"]
        for rank in [*self.ranks, *([self.rank0] if is_rank0_gone else [])]:
            with contextlib.suppress(OSError):  # killed ranks leave the sockets of their data loader workers
                shutil.rmtree(os.readlink(f"{error_file(self.plan['folder'], rank)}.scratch"), ignore_errors=True)
        shutil.rmtree(self.plan["folder"], ignore_errors=True)
        with contextlib.suppress(OSError):
            os.write(1, self.cause.encode(errors="replace"))


_presses: list[int] = []
"""One entry per Ctrl-C."""


def error_file(folder: str, rank: int) -> str:
    """Returns the path of the file into which ``rank`` writes its error."""
    return os.path.join(folder, f"error{rank}.json")


def _request() -> str:
    """Returns what rank 0 sends, or an empty text after :data:`POLL_SECONDS`."""
    if not select.select([0], [], [], POLL_SECONDS)[0]:
        return ""
    if not (sent := os.read(0, 100).decode()):
        time.sleep(POLL_SECONDS)  # at the end of file select returns at once
    return sent


def _tell(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"lightning_zero: {text}\n".encode(errors="replace"))


def _die_with_parent() -> None:
    """Makes Linux kill a rank when the supervisor ends for any reason."""
    with contextlib.suppress(Exception):
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main(plan: str) -> None:
    """Starts the ranks of the ``plan``, and returns when all of them have ended."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        # Rank 0 handles these signals. Not SIG_IGN, because the ranks would inherit it, unlike a handler.
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGINT, lambda *_: _presses.append(1))
    supervisor = Supervisor(json.loads(plan))
    try:
        supervisor.start()
        supervisor.watch()
    except BaseException:
        supervisor.end()
        raise


if __name__ == "__main__":
    main(sys.argv[1])
    sys.exit(0)
