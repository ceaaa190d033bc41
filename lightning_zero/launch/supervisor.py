"""The supervisor: a process that starts, watches and ends the other ranks of one machine, and decides how a run ends.

Rank 0 runs this file by its path, because importing the package takes seconds: import only the standard library here.
Rank 0 cannot do this work itself. It may be killed or stopped, or hang inside a collective, and then none of its Python
code runs.

:data:`TABLE` lists the states of a run and its transitions. In this file, rank 0 is the first rank of its machine.

Which rank failed first? A rank that raises finds out through the ranks' store whether it is the first
(:mod:`~lightning_zero.launch.failure`), and writes the answer into a file for the supervisor. A rank that was killed or
stopped cannot do so, but the supervisor notices. Only :meth:`Supervisor._report` combines both sources.

    rank 0 sends      lines of JSON: a plan, then ``{"do": event, "seconds": ...}`` with an event of the table. End of
                      file means that rank 0 has ended. Two events change no state: ``"run begins"`` forgets errors and
                      Ctrl-C of earlier runs, ``"all raised"`` says that all ranks have raised one error, which rank 0
                      shows
    supervisor sends  lines of JSON: ``{"lost": rank}`` for each rank that ended in an error, last ``{"ended":
                      {rank: code}, "failed": {...} or None, "late": [rank, ...]}``

The plan: ``ranks`` (for each ``rank``, ``command``, ``env``, the paths ``log``, ``error``, ``scratch``), ``rank0`` (its
number), ``cwd``, ``folder`` (the session's, removed at the end), ``scratch`` (rank 0's, removed if it was killed),
``stdout`` (a file descriptor for ranks without a log).

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
from typing import Any

PREEMPTED_EXIT_CODE = 143
"""128 + SIGTERM: the rank was asked to end, and did so after saving."""
POLL_SECONDS = 0.05
LOG_TAIL_BYTES = 6000


class State(enum.Enum):
    """The states of a run."""

    RUNNING = "all ranks run"
    PRESSED = "rank 0 was asked to end by a second Ctrl-C, and must react now"
    FAILED = "another rank has failed, and rank 0 must notice"
    FINISHING = "rank 0 has finished, and the other ranks finish as well"
    ENDING = "rank 0 has failed or was asked to end: the other ranks get a moment to end by themselves"
    OVER = "the remaining ranks are killed"


S = State
ALIVE = (S.RUNNING, S.PRESSED)
TABLE = (
    # in one of these states  this event             leads to          after this report
    ((S.RUNNING,), "second Ctrl-C", S.PRESSED, ""),
    (ALIVE, "rank failed", S.FAILED, "rank"),
    (ALIVE, "rank 0 gone", S.OVER, "rank 0 gone"),
    (ALIVE, "rank 0 done", S.FINISHING, ""),
    ((S.FAILED,), "rank 0 done", S.ENDING, ""),
    ((*ALIVE, S.FAILED), "rank 0 failed", S.ENDING, "rank"),
    ((S.PRESSED, S.FAILED), "time over", S.OVER, "rank 0 killed"),
    ((S.FAILED,), "rank 0 stopped", S.OVER, "rank 0 killed"),
    ((S.FINISHING,), "rank failed", S.ENDING, "rank"),
    ((S.FINISHING,), "time over", S.OVER, "late"),
    ((S.ENDING,), "time over", S.OVER, ""),
    ((S.FINISHING, S.ENDING), "all ended", S.OVER, ""),
    ((S.FAILED, S.FINISHING, S.ENDING), "rank 0 gone", S.OVER, ""),
)
"""The first matching row counts. An event that has no row in the current state is ignored."""
SECONDS = {S.PRESSED: 3.5, S.FAILED: 8.0, S.FINISHING: 60.0, S.ENDING: 1.0}
"""Seconds until "time over" in a state, unless rank 0 sends another number. Other states have no limit."""
KILLED = "was killed by SIGKILL, probably out of memory"
STOPPED = "does not respond, because it is stopped (SIGSTOP)"


class Supervisor:
    """Starts the other ranks of one machine, and lives until all of them have ended."""

    def __init__(self, plan: dict[str, Any], lines: _Lines) -> None:
        self.plan = plan
        self.lines = lines
        self.rank0 = os.getppid()
        self.ranks: dict[int, subprocess.Popen[bytes]] = {}
        self.codes: dict[int, int] = {}
        self.state = State.RUNNING
        self.failure: dict[str, Any] | None = None
        """The rank that failed first."""
        self._deadline = float("inf")
        self._presses = 0
        self._late: list[int] = []
        self._all_raised = False
        """Whether rank 0 has reported that all ranks raised its error. Their own files may not say so yet."""
        self._has_killed_rank0 = False

    def start(self) -> None:
        for spec in self.plan["ranks"]:
            out: Any = open(spec["log"], "ab") if spec["log"] else self.plan["stdout"]  # noqa: SIM115
            self.ranks[spec["rank"]] = subprocess.Popen(
                spec["command"],
                env=spec["env"],
                cwd=self.plan["cwd"],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT if spec["log"] else None,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
            if spec["log"]:
                out.close()

    def watch(self) -> None:
        """Follows :data:`TABLE` until the run is over, then ends the remaining processes."""
        while self.state is not State.OVER:
            for event, seconds in self._events():
                self._follow(event, seconds)
        self.end()

    def _events(self) -> Iterator[tuple[str, float | None]]:
        """Yields the events since the last call. Waits up to :data:`POLL_SECONDS` for a message of rank 0."""
        for line in self.lines.read():
            request: dict[str, Any] = json.loads(line) if line else {"do": "rank 0 gone"}
            self._all_raised = request["do"] == "all raised" or (self._all_raised and request["do"] != "run begins")
            if request["do"] == "run begins":
                self._presses = 0
                # Without its file, a rank that ended in the last run counts as failed
                for spec in self.plan["ranks"]:
                    with contextlib.suppress(OSError):
                        os.unlink(spec["error"])
            yield request["do"], request.get("seconds")
        while _presses:
            self._presses += _presses.pop()
            yield "second Ctrl-C" if self._presses > 1 else "Ctrl-C", None
        failed = [spec for spec in self.plan["ranks"] if self._has_failed(spec)]
        if failed:  # polls all ranks before it reports one
            yield "rank failed", None
        if _is_stopped(self.rank0):
            yield "rank 0 stopped", None
        if len(self.codes) == len(self.ranks):
            yield "all ended", None
        if time.monotonic() > self._deadline:
            yield "time over", None

    def _has_failed(self, spec: dict[str, Any]) -> bool:
        """Returns whether this rank has ended in an error that not all ranks have raised."""
        rank = spec["rank"]
        if rank not in self.codes:
            if (code := self.ranks[rank].poll()) is None:
                return False
            self.codes[rank] = code
            if code not in (0, PREEMPTED_EXIT_CODE):
                _send({"lost": rank})
        if (code := self.codes[rank]) in (0, PREEMPTED_EXIT_CODE):
            return False
        error = _error_of(spec) if code > 0 else None
        if error is None and self.failure is None and self.state is not State.ENDING:  # the rank left no report
            what = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
            self.failure = self._describe(spec, KILLED if code == -signal.SIGKILL else what, _tail(spec["log"]))
        return error is None or self._is_alone(error)

    def _is_alone(self, error: dict[str, Any]) -> bool:
        """Returns whether only some ranks have raised ``error``. Rank 0 itself shows an error that all raised."""
        return not (error["alike"] or self._all_raised)

    def _follow(self, event: str, seconds: float | None) -> None:
        for states, name, following, report in TABLE:
            if self.state in states and name == event:
                self.state = following
                seconds = SECONDS.get(following) if seconds is None else seconds
                self._deadline = float("inf") if seconds is None else time.monotonic() + seconds
                self._report(report)
                return

    def _report(self, what: str) -> None:
        """Prints the cause of the new state for the user."""
        if what == "rank 0 gone" and not self._presses and len(self.codes) < len(self.ranks):
            _tell(f"{self._rank0()} has ended unexpectedly, as if it {KILLED}: ending the other ranks.")
        elif what == "rank 0 killed":
            self._kill_rank0()
        elif what == "late":
            self._late = [rank for rank in self.ranks if rank not in self.codes]
            _tell(f"rank {', '.join(map(str, self._late))} did not end in time after rank 0, and was killed.")
        elif what == "rank":
            for spec in self.plan["ranks"]:
                if _is_stopped(self.ranks[spec["rank"]].pid):  # the others failed because they waited for it
                    self.failure = self._describe(spec, STOPPED, "")
                elif self.failure is None and (error := _error_of(spec)) and error["first"] and self._is_alone(error):
                    self.failure = self._describe(spec, f"failed: {error['summary']}", error["traceback"])
            if self.failure is not None and not self.failure["told"]:
                self.failure["told"] = True
                log = f"; its log: {self.failure['log']}" if self.failure["log"] else ""
                process = self.ranks[self.failure["rank"]].pid
                text = f"rank {self.failure['rank']} (process {process}) {self.failure['what']}{log}"
                _tell(f"{text}\n{self.failure['text']}".rstrip())

    def _describe(self, spec: dict[str, Any], what: str, text: str) -> dict[str, Any]:
        return {"rank": spec["rank"], "what": what, "text": text, "log": spec["log"], "told": False}

    def _rank0(self) -> str:
        return f"rank {self.plan['rank0']} (process {self.rank0})"

    def _kill_rank0(self) -> None:
        if os.getppid() == self.rank0:
            why = "was asked to end, but did not" if self._presses else "did not react to that"
            _tell(f"{self._rank0()} {STOPPED if _is_stopped(self.rank0) else why}: ending it.")
            os.kill(self.rank0, signal.SIGKILL)
            self._has_killed_rank0 = True

    def end(self) -> None:
        """Kills the remaining ranks and the processes that ranks have started, and removes files."""
        for rank, process in self.ranks.items():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # also processes that an ended rank has left behind
            self.codes[rank] = process.wait()
        for spec in self.plan["ranks"]:  # killed ranks leave the sockets of their data loader workers
            with contextlib.suppress(OSError), open(spec["scratch"], encoding="utf-8") as path:
                shutil.rmtree(path.read(), ignore_errors=True)
        shutil.rmtree(self.plan["folder"], ignore_errors=True)
        _send({"ended": self.codes, "failed": self.failure, "late": self._late})
        if self._has_killed_rank0 or os.getppid() != self.rank0:
            shutil.rmtree(self.plan["scratch"], ignore_errors=True)


_presses: list[int] = []
"""One entry per Ctrl-C that was not handled yet."""


class _Lines:
    """Reads the lines that rank 0 sends."""

    def __init__(self) -> None:
        self._rest = b""

    def read(self) -> list[str]:
        """Returns the new lines, after at most :data:`POLL_SECONDS`. Returns an empty line if rank 0 has ended."""
        if not select.select([0], [], [], POLL_SECONDS)[0]:
            return []
        if not (chunk := os.read(0, 1 << 16)):
            time.sleep(POLL_SECONDS)  # at the end of file select returns at once
            return [""]
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [line.decode() for line in lines]

    def first(self) -> str:
        """Returns the first line. Rank 0 sends no other before it is answered."""
        while not (lines := self.read()):
            pass
        return lines[0]


def _send(message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        os.write(1, json.dumps(message).encode() + b"\n")


def _tell(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"lightning_zero: {text}\n".encode(errors="replace"))


def _error_of(spec: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the rank's report of its failure, if it has written one."""
    try:
        with open(spec["error"], encoding="utf-8") as lines:
            error: dict[str, Any] = json.load(lines)
    except (OSError, ValueError):
        return None
    return error


def _tail(path: str | None) -> str:
    if not path:
        return ""
    try:
        with open(path, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - LOG_TAIL_BYTES))
            return log.read().decode(errors="replace")
    except OSError:
        return ""


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as line:
            return line.read().rsplit(")", 1)[1].split()[0] == "T"
    except (OSError, IndexError):
        return False


def _die_with_parent() -> None:
    """Makes Linux kill a rank when the supervisor ends for any reason."""
    with contextlib.suppress(Exception):
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main() -> None:
    """Reads the plan, starts the ranks, and returns when all of them have ended."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        # Rank 0 handles these signals. Not SIG_IGN, because the ranks would inherit it, unlike a handler.
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGINT, lambda *_: _presses.append(1))
    lines = _Lines()
    if not (plan := lines.first()):
        return
    supervisor = Supervisor(json.loads(plan), lines)
    try:
        supervisor.start()
        supervisor.watch()
    except BaseException:
        supervisor.end()
        raise


if __name__ == "__main__":
    main()
    sys.exit(0)
