"""The supervisor: a process that starts, watches and ends the other ranks of one machine.

Rank 0 runs this file by its path, not as part of the package, whose imports take seconds: import nothing here but the
standard library. The two exchange lines of JSON. Rank 0 cannot do this work itself: it may be killed, or stopped, or
hang inside a collective, and then none of its Python code runs any more.

    rank 0 sends      a plan (first line), then one ``{"do": "wait" | "stop", ...}``; end of file: rank 0 is gone
    supervisor sends  ``{"started": [pid, ...]}``, ``{"signal": n}`` for each SIGINT and SIGTERM of rank 0,
                      ``{"exited": rank}`` for one that ended by an error that all raised, ``{"failed": {...}}``
                      for the first other failure before the request, ``{"ended": {rank: code}, ...}`` last

The plan: ``ranks`` (of each ``rank``, ``command``, ``env``, the paths ``log``, ``errors``, ``ready``), ``rank0`` (the
number of the rank that is called rank 0 here, the first of its machine), ``cwd``, ``folder`` (the run's own, removed at
the end), ``scratch`` (rank 0's, removed if it was killed), ``stdout`` (the number of an open file for ranks without a
log), ``signals`` (the number of an open file with the signals that rank 0 receives, or ``None``).

Each rank leads a session of its own, so that a kill of its group also ends the processes that it has started.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

PREEMPTED_EXIT_CODE = 143
"""128 + SIGTERM: the rank ended because it was asked to, after saving."""
REACTION_SECONDS = 8.0
"""Time for rank 0 to raise after another rank has failed; then rank 0 is killed."""
BLAME_SECONDS = 2.0
"""Time to look for a rank that failed before rank 0 did."""
ALONE_SECONDS = 5.0
"""Time for a rank to end after it raised an error that not all ranks raised; then it is killed."""
POLL_SECONDS = 0.05
MEMORY_SECONDS = 0.5
"""Between two readings of the ranks' memory."""
LOG_TAIL_BYTES = 6000
STOPPED = "does not answer, it is stopped (SIGSTOP)"


class Supervisor:
    """Starts the ranks of one run, and stays until all of them have ended."""

    def __init__(self, plan: dict[str, Any], messages: Iterator[str | None]) -> None:
        self.plan = plan
        self.messages = messages
        self.rank0 = os.getppid()
        self.ranks: dict[int, subprocess.Popen[bytes]] = {}
        self.codes: dict[int, int] = {}
        self.failure: dict[str, Any] | None = None
        self._stopping = False
        self._killed_rank0 = False
        self.memory = Memory()
        self._fate = Fate(self.rank0)

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
        _say({"started": [process.pid for process in self.ranks.values()]})

    def watch(self) -> None:
        """Watches until rank 0 requests the end, is gone, or has not reacted to another rank's failure."""
        deadline = None
        for message in self.messages:
            self._hear_signals()
            self.memory.look([self.rank0, *(process.pid for process in self.ranks.values())])
            self._end_the_lonely()
            self._reap()
            if self.failure and deadline is None:
                self._report()
                _say({"failed": self.failure})
                deadline = time.monotonic() + REACTION_SECONDS
            if message is None:
                # A stopped rank 0 could not react, however long it is given
                if deadline is not None and (time.monotonic() > deadline or _is_stopped(self.rank0)):
                    state = STOPPED if _is_stopped(self.rank0) else "did not react to that"
                    _tell(f"rank 0 (process {self.rank0}) {state}: ending it.")
                    self._kill_rank0()
                    self.end(0.0)
                    return
            elif message == "":
                if self.failure is None and len(self.codes) < len(self.ranks):
                    how = self._fate.words()
                    how += self.memory.about(self.rank0) if SIGKILL in how else ""
                    first = self.plan["rank0"]
                    _tell(f"rank {first} (process {self.rank0}) {how}. It ended unexpectedly: ending the others.")
                self.end(0.0)
                return
            else:
                self._on_request(json.loads(message))
                return

    def _hear_signals(self) -> None:
        """Passes rank 0's signals back to it: its interpreter writes their numbers to the file in C, at once, even
        while its Python code is blocked."""
        if self.plan.get("signals") is None:
            return
        with contextlib.suppress(OSError):
            for number in os.read(self.plan["signals"], 64):
                if number in (signal.SIGINT, signal.SIGTERM):
                    _say({"signal": number})

    def _end_the_lonely(self) -> None:
        """Kills a rank that raised an error alone and lives on because its script caught it: the others would wait for
        it in their next collective."""
        for spec in self.plan["ranks"]:
            rank = spec["rank"]
            if rank in self.codes or not (error := _error_of(spec, before=time.time() - ALONE_SECONDS)):
                continue
            if error.get("alone"):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.ranks[rank].pid, signal.SIGKILL)

    def _on_request(self, request: dict[str, Any]) -> None:
        if request["do"] == "stop":
            self._stopping = True
            if self.failure is None and request.get("failed_at"):
                self._find_earlier_failure(request["failed_at"])
        self.end(request["seconds"])

    def _find_earlier_failure(self, failed_at: float) -> None:
        """Looks for a rank whose failure came before rank 0's and may be its cause, to report that one."""
        deadline = time.monotonic() + BLAME_SECONDS
        while time.monotonic() < deadline and self.failure is None and len(self.codes) < len(self.ranks):
            if any(_error_of(spec, before=failed_at) for spec in self.plan["ranks"]):
                break
            self._reap()
            time.sleep(POLL_SECONDS)
        for spec in self.plan["ranks"]:
            if (error := _error_of(spec, before=failed_at)) and not error.get("alike"):
                self.failure = self._describe(spec, f"failed: {error['summary']}", error["traceback"])
        for spec in self.plan["ranks"]:
            if _is_stopped(self.ranks[spec["rank"]].pid):  # the cause: the ranks that failed were waiting for this one
                self.failure = self._describe(spec, STOPPED, "")
        if self.failure:
            self._report()

    def end(self, seconds: float) -> None:
        """Gives the ranks ``seconds`` to end by themselves, then kills them and the processes they have started."""
        deadline = time.monotonic() + seconds
        while len(self.codes) < len(self.ranks) and time.monotonic() < deadline:
            self._reap()
            if self.failure and not self._stopping:  # rank 0 is done, and another rank has failed after it
                self._report()
                deadline = min(deadline, time.monotonic() + 1.0)
                self._stopping = True
            time.sleep(POLL_SECONDS)
        late = [rank for rank in self.ranks if rank not in self.codes]
        for rank, process in self.ranks.items():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # also processes that an ended rank has left behind
            if rank in late:
                self.codes[rank] = process.wait()
        if late and seconds and not self._stopping:
            _tell(f"rank {', '.join(map(str, late))} had not ended {seconds:.0f} s after rank 0: killed.")
        self._remove_files()
        _say({"ended": self.codes, "failed": self.failure, "late": late})

    def _remove_files(self) -> None:
        """The run's own folder, and the scratch folders (sockets of data loader workers) of killed processes."""
        for spec in self.plan["ranks"]:
            with contextlib.suppress(OSError), open(spec["ready"], encoding="utf-8") as path:
                shutil.rmtree(path.read(), ignore_errors=True)
        if os.getppid() != self.rank0 or self._killed_rank0:
            shutil.rmtree(self.plan["scratch"], ignore_errors=True)
        shutil.rmtree(self.plan["folder"], ignore_errors=True)

    def _reap(self) -> None:
        for spec in self.plan["ranks"]:
            rank = spec["rank"]
            if rank in self.codes or self.ranks[rank].poll() is None:
                continue
            code = self.codes[rank] = self.ranks[rank].returncode
            if code in (0, PREEMPTED_EXIT_CODE) or self.failure:
                continue
            error = _error_of(spec)
            if error and error.get("alike"):  # rank 0 has raised it too, and shows it
                _say({"exited": rank})
            elif error:
                self.failure = self._describe(spec, f"failed: {error['summary']}", error["traceback"])
            elif code == -signal.SIGKILL:
                about = self.memory.about(self.ranks[rank].pid)
                self.failure = self._describe(spec, f"was {SIGKILL}{about}", _tail(spec["log"]))
            else:
                what = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
                self.failure = self._describe(spec, what, _tail(spec["log"]))

    def _describe(self, spec: dict[str, Any], what: str, text: str) -> dict[str, Any]:
        return {"rank": spec["rank"], "what": what, "text": text, "log": spec["log"]}

    def _report(self) -> None:
        assert self.failure is not None
        failure = self.failure
        log = f"; its log: {failure['log']}" if failure.get("log") else ""
        process = self.ranks[failure["rank"]].pid
        _tell(f"rank {failure['rank']} (process {process}) {failure['what']}{log}\n{failure['text']}".rstrip())

    def _kill_rank0(self) -> None:
        if os.getppid() == self.rank0:
            os.kill(self.rank0, signal.SIGKILL)
            self._killed_rank0 = True


SIGKILL = "killed by SIGKILL, probably out of memory"


class Memory:
    """The memory that each rank last held, for the report on a rank that was killed."""

    def __init__(self) -> None:
        self.last: dict[int, int] = {}
        """Process -> its resident memory at the last reading, KiB."""
        self._kills = _oom_kills()
        self._next = 0.0

    def look(self, pids: list[int]) -> None:
        """Reads the memory of ``pids``, at most every :data:`MEMORY_SECONDS`."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + MEMORY_SECONDS
        for pid in pids:
            if held := _field(f"/proc/{pid}/status", "VmRSS:"):
                self.last[pid] = held

    def about(self, pid: int) -> str:
        """The facts about the end of ``pid``, as a text that follows :data:`SIGKILL`."""
        said = []
        if pid in self.last:
            said.append(f"it last held {_gib(self.last[pid])}")
        total, free = _field("/proc/meminfo", "MemTotal:"), _field("/proc/meminfo", "MemAvailable:")
        if total and free:
            said.append(f"{_gib(free)} of the host's {_gib(total)} are available now")
        kills = _oom_kills()
        if kills is not None and self._kills is not None:
            new = kills - self._kills
            said.append(f"the kernel counted {new} kill{'' if new == 1 else 's'} for lack of memory since the start")
        return f" ({', '.join(said)})" if said else ""


def _gib(kib: int) -> str:
    return f"{kib / 2**20:.2f} GiB"


def _field(path: str, name: str) -> int | None:
    try:
        with open(path) as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith(name))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _oom_kills() -> int | None:
    """Kills for lack of memory in this control group (a container, a SLURM job), or on the whole host if the group has
    no count."""
    folders = ["/sys/fs/cgroup", "/sys/fs/cgroup/memory"]
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as lines:
        for line in lines:
            number, controllers, path = line.strip().split(":", 2)
            if number == "0":
                folders[:0] = [f"/sys/fs/cgroup{path}", f"/sys/fs/cgroup/unified{path}"]
            elif controllers == "memory":
                folders.insert(0, f"/sys/fs/cgroup/memory{path}")
    for folder in folders:
        for name in ("memory.events", "memory.oom_control"):  # cgroup v2, v1
            if (found := _field(f"{folder}/{name}", "oom_kill ")) is not None:
                return found
    return _field("/proc/vmstat", "oom_kill ")


class Fate:
    """Finds out how rank 0 ended, which is no child of this process, so that it cannot wait for its exit code."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._handle = -1
        with contextlib.suppress(OSError, AttributeError):  # Linux
            self._handle = os.pidfd_open(pid)

    def words(self) -> str:
        """Its end in words; the likeliest one if the kernel does not say."""
        with contextlib.suppress(OSError):
            select.select([self._handle], [], [], 1.0) if self._handle >= 0 else time.sleep(POLL_SECONDS)
        status = self._from_handle()
        status = self._from_parent() if status is None else status
        if status is None:
            return f"ended without a word, as if {SIGKILL}"
        if number := status & 0x7F:
            return f"was {SIGKILL}" if number == signal.SIGKILL else f"was killed by {signal.Signals(number).name}"
        return f"ended with exit code {status >> 8}"

    def _from_handle(self) -> int | None:
        """Linux 6.15 and later: ``PIDFD_GET_INFO`` of ``PIDFD_INFO_EXIT``, ``struct pidfd_info`` of <linux/pidfd.h>."""
        info = bytearray(struct.pack("=QQ11Ii", 1 << 3, 0, *[0] * 12))
        try:
            fcntl.ioctl(self._handle, (3 << 30) | (len(info) << 16) | (0xFF << 8) | 11, info)
        except (OSError, ValueError):
            return None
        mask, *_, code = struct.unpack("=QQ11Ii", info)
        return int(code) if mask & (1 << 3) else None

    def _from_parent(self) -> int | None:
        """Only while it is a zombie: until its parent has read the exit code."""
        try:
            with open(f"/proc/{self._pid}/stat") as line:
                fields = line.read().rsplit(")", 1)[1].split()
            return (int(fields[49]) or None) if fields[0] == "Z" else None
        except (OSError, IndexError, ValueError):
            return None


def _messages() -> Iterator[str | None]:
    """Lines from rank 0; ``None`` after each :data:`POLL_SECONDS` without one, ``""`` once at the end of file."""
    buffer = b""
    while True:
        ready, _, _ = select.select([0], [], [], POLL_SECONDS)
        if not ready:
            yield None
            continue
        chunk = os.read(0, 1 << 16)
        if not chunk:
            yield ""
            return
        buffer += chunk
        while b"\n" in buffer:
            line, buffer = buffer.split(b"\n", 1)
            yield line.decode()


def _say(message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        os.write(1, json.dumps(message).encode() + b"\n")


def _tell(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"lightning_zero: {text}\n".encode(errors="replace"))


def _error_of(spec: dict[str, Any], before: float = float("inf")) -> dict[str, Any] | None:
    """The rank's own report of its failure, if it is from before ``before`` (seconds since the epoch)."""
    try:
        with open(spec["errors"], encoding="utf-8") as lines:
            error: dict[str, Any] = json.load(lines)
    except (OSError, ValueError):
        return None
    return error if error["at"] < before else None


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
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        # Rank 0 decides what a signal means. No SIG_IGN, which the ranks would inherit, unlike a handler.
        signal.signal(number, lambda *_: None)
    messages = _messages()
    plan = next(message for message in messages if message is not None)
    if not plan:
        return
    supervisor = Supervisor(json.loads(plan), messages)
    try:
        supervisor.start()
        supervisor.watch()
    except BaseException:
        supervisor.end(0.0)
        raise


if __name__ == "__main__":
    main()
    sys.exit(0)
