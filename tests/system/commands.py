"""Runs commands as a user would. Where a test fails, pytest shows what they printed, every rank of theirs, and the
stacks of those that were still running."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from tests.helpers.ranks import PRELOADED

ROOT = Path(__file__).resolve().parents[2]
MODULE = sys.executable, "-m", "lightning_zero"
SMALL = (
    "data.block_size=32",
    "data.max_characters=20000",
    "data.vocab_size=300",
    "model.width=32",
    "model.num_layers=2",
    "trainer.max_steps=3",
)
"""Makes the main job a matter of seconds."""
LIMIT_SECONDS = 150.0
"""Of each wait; pytest's for a test comes before."""
_MARK = "LIGHTNING_ZERO_TEST"

Fork = Literal["no", "all", "first"]


class Program:
    """A program that was started, and all processes that it has started itself."""

    def __init__(self, command: tuple[str, ...], cwd: Path, fork: Fork, output: str, env: dict[str, str]) -> None:
        self._command, self._output = shlex.join(command), Path(output)
        self._marked = f"{_MARK}={output}".encode()
        inherited = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        # Python shows its stacks on SIGABRT
        env = {**inherited, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", _MARK: output, **env}
        self._process: subprocess.Popen[bytes] | multiprocessing.context.ForkServerProcess
        if fork == "no":
            with open(output, "wb") as file:
                self._process = subprocess.Popen(
                    command,
                    cwd=cwd,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=_hear_interrupts,
                )
        else:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(PRELOADED)
            self._process = context.Process(target=_main, args=(command, str(cwd), env, output, fork == "first"))
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    @property
    def exit_code(self) -> int | None:
        """``None`` while it runs."""
        return self._process.poll() if isinstance(self._process, subprocess.Popen) else self._process.exitcode

    def has_ended(self) -> bool:
        return self.exit_code is not None

    def until(self, condition: Callable[[], object], limit_seconds: float = LIMIT_SECONDS) -> None:
        """Waits; fails when the time is over."""
        assert wait_until(condition, limit_seconds), f"not so far within {limit_seconds:.0f} s: {self._command}"

    def wait(self) -> int:
        """The exit code."""
        self.until(self.has_ended)
        assert self.exit_code is not None
        return self.exit_code

    def processes(self) -> list[int]:
        """Numbers of those that are alive."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                marked = self._marked in (entry / "environ").read_bytes().split(b"\0")
                state, _, _, session, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
                if (marked or int(session) == self.pid) and state != "Z":
                    found.append(int(entry.name))
        return found

    def send(self, number: int) -> None:
        """A signal to all of them."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def wait_until(condition: Callable[[], object], limit_seconds: float) -> bool:
    """Whether ``condition`` came to hold in time."""
    deadline = time.monotonic() + limit_seconds
    while not (holds := bool(condition())) and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds


@contextlib.contextmanager
def started(*command: str, cwd: Path, fork: Fork = "no", **env: str) -> Iterator[Program]:
    """``command``, of which nothing outlives the block.

    Args:
        command: With ``fork`` the words after ``lightning-zero``, or after ``python``: a script or ``-c`` begins them.
        cwd: Where it runs.
        fork: It begins as a fork of a process that has its imports behind it, which take longer than all that the tests
            train. ``all``: so do its other ranks; ``first``: they are programs, as those of a program are.
        env: Variables beside this process's own.
    """
    with tempfile.NamedTemporaryFile() as output:
        program = Program(command, cwd, fork, output.name, env)
        try:
            yield program
        except BaseException:
            program.send(signal.SIGABRT)
            wait_until(lambda: not program.processes(), 3.0)
            raise
        finally:
            program.send(signal.SIGKILL)
            program.until(program.has_ended)
            print(f"$ {shlex.join(command)}\n{program.output}")
            for log in sorted(cwd.rglob("*.log")):
                print(f"--- {log.relative_to(cwd)}\n{log.read_text(errors='replace')}")


def run(*command: str, cwd: Path, fork: Fork = "no", **env: str) -> subprocess.CompletedProcess[str]:
    """:func:`started`, to its end; output and errors come back joined."""
    with started(*command, cwd=cwd, fork=fork, **env) as program:
        return subprocess.CompletedProcess(command, program.wait(), program.output)


def _main(command: tuple[str, ...], cwd: str, environment: dict[str, str], output: str, has_file: bool) -> None:
    """What the interpreter does, in a fork; ranks are programs where ``__main__`` has a file."""
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
    faulthandler.enable(2)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    multiprocessing.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]  # the test's own
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background process of a shell is deaf to
    multiprocessing.set_start_method(None, force=True)  # of data loaders' workers: Python's default again
    os.chdir(cwd)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        if command[0] == "-c":
            sys.argv = ["-c", *command[2:]]
            sys.path.insert(0, "")
            code, path = command[1], "<string>"
        else:
            sys.argv = [*command] if command[0].endswith(".py") else [console_script(), *command]
            path = sys.argv[0]
            sys.path.insert(0, str(Path(path).parent.resolve()))
            code = Path(path).read_text()
            if has_file:
                main.__file__ = path
        exec(compile(code, path, "exec"), vars(main))
    except Exception as error:
        sys.last_type = type(error)
        sys.excepthook(type(error), error, error.__traceback__)  # multiprocessing shows errors without
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # and ends its processes without


def _hear_interrupts() -> None:
    """In a new process: what a shell without a terminal starts in the background is deaf to Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def console_script() -> str:
    return str(Path(sys.executable).parent / "lightning-zero")
