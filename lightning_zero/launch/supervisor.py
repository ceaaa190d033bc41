"""The supervisor: a process that starts, watches and ends the other ranks of one machine, and decides how a run ends.

Rank 0 runs this file by its path, not as part of the package, whose imports take seconds: import nothing here but the
standard library. Rank 0 cannot do this work itself: it may be killed, or stopped, or hang inside a collective, and then
none of its Python code runs any more.

:data:`TABLE` lists the states of a run and what leads from one to the next. The process that is called rank 0 here is
the first rank of its machine.

Who failed first? A rank that raises asks the other ranks, through their store, whether it is the first
(:mod:`~lightning_zero.launch.failure`), and writes the answer into a file for the supervisor. A rank that was killed or
stopped cannot do so: the supervisor sees it. :meth:`Supervisor._report` puts the two together, and nothing else does.

    rank 0 sends      lines of JSON: a plan, then ``{"do": event, "seconds": ...}`` with an event of the table; end of
                      file: rank 0 is gone;
                      ``"all raised"``, which changes no state: rank 0 shows the error of all ranks
    supervisor sends  lines of JSON: ``{"started": [pid, ...]}``, ``{"lost": rank}`` for each rank that ended in an
                      error, last ``{"ended": {rank: code}, "failed": {...} or None, "late": [rank, ...],
                      "insists": bool}``; one that insists on the end of rank 0 does not end before it

The plan: ``ranks`` (of each ``rank``, ``command``, ``env``, the paths ``log``, ``error``, ``scratch``), ``rank0`` (its
number), ``cwd``, ``folder`` (the run's own, removed at the end), ``scratch`` (rank 0's, removed if it was killed),
``stdout`` (the number of an open file for ranks without a log).

The supervisor is in rank 0's process group, so that it gets Ctrl-C of a terminal as well: Python tells rank 0's main
thread of it by an exception, which is lost in code that catches all, and late while C++ code waits. Each rank leads a
session of its own, so that a kill of its group also ends the processes that it has started.
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
"""128 + SIGTERM: the rank ended because it was asked to, after saving."""
POLL_SECONDS = 0.05
LOG_TAIL_BYTES = 6000


class State(enum.Enum):
    """Of a run, as its supervisor knows it."""

    STARTING = "no step was made: a run that is asked to end has nothing to lose"
    RUNNING = "steps are made"
    PRESSED = "rank 0 was asked to end, and must do so now"
    FAILED = "another rank has failed, and rank 0 must notice"
    FINISHING = "rank 0 is done: the other ranks finish"
    ENDING = "rank 0 has failed or was asked to end: the other ranks get a moment to end by themselves"
    OVER = "ranks that are left are killed"


S = State
ALIVE = (S.STARTING, S.RUNNING, S.PRESSED)
TABLE = (
    # in one of these states  when this happens      comes this state  after reporting
    ((S.RUNNING,), "run begins", S.STARTING, ""),
    ((S.STARTING,), "first step", S.RUNNING, ""),
    ((S.STARTING,), "Ctrl-C", S.PRESSED, ""),
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
SECONDS = {S.PRESSED: 3.5, S.FAILED: 8.0, S.FINISHING: 60.0, S.ENDING: 1.0}
"""After which the time of a state is over, unless rank 0 says otherwise. The other states last."""
KILLED = "was killed by SIGKILL, probably out of memory"
STOPPED = "does not answer, it is stopped (SIGSTOP)"


class Supervisor:
    """Starts the ranks of one run, and stays until all of them have ended."""

    def __init__(self, plan: dict[str, Any], lines: _Lines) -> None:
        self.plan = plan
        self.lines = lines
        self.rank0 = os.getppid()
        self.ranks: dict[int, subprocess.Popen[bytes]] = {}
        self.codes: dict[int, int] = {}
        self.state = State.STARTING
        self.failure: dict[str, Any] | None = None
        """The rank that failed first."""
        self._deadline = float("inf")
        self._pressed_until = 0.0
        self._presses = 0
        self._late: list[int] = []
        self._all_raised = False
        """Rank 0 knows that all ranks have raised its error; the others may not have noted it yet."""
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
        _send({"started": [process.pid for process in self.ranks.values()]})

    def watch(self) -> None:
        """Follows :data:`TABLE` until the run is over, then ends what is left of it."""
        while self.state is not State.OVER:
            for event, seconds in self._events():
                self._follow(event, seconds)
        self.end()

    def _events(self) -> Iterator[tuple[str, float | None]]:
        """The events since the last call, which is :data:`POLL_SECONDS` ago if there are none."""
        for line in self.lines.read():
            request: dict[str, Any] = json.loads(line) if line else {"do": "rank 0 gone"}
            self._all_raised = request["do"] == "all raised" or (self._all_raised and request["do"] != "run begins")
            if request["do"] == "run begins":  # a rank that has ended in an error of all ranks does not take part
                for spec in self.plan["ranks"]:
                    with contextlib.suppress(OSError):
                        os.unlink(spec["error"])
            yield request["do"], request.get("seconds")
        while _presses:
            self._presses += _presses.pop()
            yield "second Ctrl-C" if self._presses > 1 and self.state is not State.STARTING else "Ctrl-C", None
        failed = [spec for spec in self.plan["ranks"] if self._has_failed(spec)]
        if failed:  # all were looked at before one is named
            yield "rank failed", None
        if _is_stopped(self.rank0):
            yield "rank 0 stopped", None
        if len(self.codes) == len(self.ranks):
            yield "all ended", None
        if time.monotonic() > self._deadline:
            yield "time over", None

    def _has_failed(self, spec: dict[str, Any]) -> bool:
        """Whether this rank has ended in an error that not all ranks have raised."""
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
        if error is None and self.failure is None and self.state is not State.ENDING:  # it could not say anything
            what = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
            self.failure = self._describe(spec, KILLED if code == -signal.SIGKILL else what, _tail(spec["log"]))
        return error is None or self._is_alone(error)

    def _is_alone(self, error: dict[str, Any]) -> bool:
        """Whether not all ranks have raised ``error``: rank 0 has raised those of all ranks too, and shows them."""
        return not (error["alike"] or self._all_raised)

    def _follow(self, event: str, seconds: float | None) -> None:
        for states, name, following, report in TABLE:
            if self.state in states and name == event:
                self.state = following
                seconds = SECONDS.get(following) if seconds is None else seconds
                self._deadline = float("inf") if seconds is None else time.monotonic() + seconds
                if following is State.PRESSED:
                    self._pressed_until = self._deadline
                self._report(report)
                return

    def _report(self, what: str) -> None:
        """Tells the user what has led to the new state."""
        if what == "rank 0 gone" and not self._pressed_until and len(self.codes) < len(self.ranks):
            _tell(f"{self._rank0()} has ended unexpectedly, as if it {KILLED}: ending the others.")
        elif what == "rank 0 killed":
            self._kill_rank0()
        elif what == "late":
            self._late = [rank for rank in self.ranks if rank not in self.codes]
            _tell(f"rank {', '.join(map(str, self._late))} had not ended in time after rank 0: killed.")
        elif what == "rank":
            for spec in self.plan["ranks"]:
                if _is_stopped(self.ranks[spec["rank"]].pid):  # ranks that failed were waiting for this one
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
            why = "was asked to end, and did not" if self._pressed_until else "did not react to that"
            _tell(f"{self._rank0()} {STOPPED if _is_stopped(self.rank0) else why}: ending it.")
            os.kill(self.rank0, signal.SIGKILL)
            self._has_killed_rank0 = True

    def end(self) -> None:
        """Kills the ranks that are left and the processes that ranks have started, and removes files."""
        for rank, process in self.ranks.items():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # also processes that an ended rank has left behind
            self.codes[rank] = process.wait()
        for spec in self.plan["ranks"]:  # scratch folders of killed processes: sockets of data loader workers
            with contextlib.suppress(OSError), open(spec["scratch"], encoding="utf-8") as path:
                shutil.rmtree(path.read(), ignore_errors=True)
        shutil.rmtree(self.plan["folder"], ignore_errors=True)
        insists = time.monotonic() < self._pressed_until
        _send({"ended": self.codes, "failed": self.failure, "late": self._late, "insists": insists})
        while os.getppid() == self.rank0 and time.monotonic() < self._pressed_until:
            time.sleep(POLL_SECONDS)
        if self._pressed_until:
            self._kill_rank0()
        if self._has_killed_rank0 or os.getppid() != self.rank0:
            shutil.rmtree(self.plan["scratch"], ignore_errors=True)


_presses: list[int] = []
"""One for each Ctrl-C that was not heard yet."""


class _Lines:
    """Lines that rank 0 sends."""

    def __init__(self) -> None:
        self._rest = b""

    def read(self) -> list[str]:
        """Those that are there, after at most :data:`POLL_SECONDS`; an empty one once rank 0 is gone."""
        if not select.select([0], [], [], POLL_SECONDS)[0]:
            return []
        if not (chunk := os.read(0, 1 << 16)):
            time.sleep(POLL_SECONDS)  # the end of file is there at once, each time
            return [""]
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [line.decode() for line in lines]

    def first(self) -> str:
        """The first line, of which no other is expected before it is answered."""
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
    """The rank's own report of its failure."""
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
    """Linux: the kernel kills a rank when the supervisor has ended, for whatever reason."""
    with contextlib.suppress(Exception):
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main() -> None:
    """Reads the plan, starts the ranks, and returns when the last of them has ended."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        # Rank 0 decides what a signal means. No SIG_IGN, which the ranks would inherit, unlike a handler.
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
