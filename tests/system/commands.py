"""Runs commands as a user would, each with a time limit. Where a test fails, pytest shows what they printed, every rank
of theirs, and the stacks of those that were still running."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib.util
import multiprocessing
import os
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULE = "-m", "lightning_zero"
SMALL = (
    "data.block_size=32",
    "data.max_characters=20000",
    "data.vocab_size=300",
    "model.width=32",
    "model.num_layers=2",
    "trainer.max_steps=3",
)
"""Makes the main job a matter of seconds."""
LIMIT_SECONDS = 115.0
"""Of each wait; pytest's for a test comes before."""
_MARK = "LIGHTNING_ZERO_TEST"


def wait_until(condition: Callable[[], object], limit_seconds: float) -> bool:
    """Whether ``condition`` came to hold in time."""
    deadline = time.monotonic() + limit_seconds
    while not (holds := bool(condition())) and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds


class Program:
    """A program that was started, and all processes that it has started itself."""

    def __init__(self, command: tuple[str, ...], cwd: Path, output: str, env: dict[str, str]) -> None:
        self.cwd = cwd
        self._command, self._output = shlex.join(command), Path(output)
        self._marked = f"{_MARK}={output}".encode()
        with open(output, "wb") as file:
            self.process = subprocess.Popen(
                command,
                cwd=cwd,
                # Python shows its stacks on SIGABRT
                env={**_environment(), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", _MARK: output, **env},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_hear_interrupts,
            )

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def until(self, condition: Callable[[], object], limit_seconds: float = LIMIT_SECONDS) -> None:
        """Waits; fails when the time is over."""
        assert wait_until(condition, limit_seconds), f"not so far within {limit_seconds:.0f} s: {self._command}"

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def wait(self, limit_seconds: float = LIMIT_SECONDS) -> int:
        """The exit code."""
        self.until(self.has_ended, limit_seconds)
        return self.process.returncode

    def processes(self) -> list[int]:
        """Numbers of those that are alive."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self._marked in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def send(self, number: int) -> None:
        """A signal to all of them."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


@contextlib.contextmanager
def started(*command: str, cwd: Path, **env: str) -> Iterator[Program]:
    """``command``, of which nothing outlives the block."""
    with tempfile.NamedTemporaryFile() as output:
        program = Program(command, cwd, output.name, env)
        try:
            yield program
        except BaseException:
            program.send(signal.SIGABRT)
            wait_until(lambda: not program.processes(), 3.0)
            raise
        finally:
            program.send(signal.SIGKILL)
            program.process.wait()
            _show(command, program.output, cwd)


def run(*command: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Python with ``command`` as its arguments, in ``cwd``; output and errors come back joined."""
    with started(sys.executable, *command, cwd=cwd, **env) as program:
        return subprocess.CompletedProcess(command, program.wait(), program.output)


def run_imported(*command: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """``lightning-zero`` with ``command``, or Python, if it begins with a script or ``-c``, as :func:`run` would do it,
    in a fork of a process that has its imports behind it. Ranks of a command are forks, too, unless it asks for
    ``strategy.start_method=popen``, those of a script are programs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["hydra", "lightning.pytorch", "lightning_zero.app.cli", "lightning_zero.app.hydra_config"]
    )
    with tempfile.NamedTemporaryFile("r") as output:
        fork = context.Process(target=_main, args=(command, str(cwd), {**_environment(), **env}, output.name))
        fork.start()
        try:
            fork.join(LIMIT_SECONDS)
            assert not fork.is_alive(), f"not done within {LIMIT_SECONDS:.0f} s: {shlex.join(command)}"
        except BaseException:
            _signal_group(fork.pid, signal.SIGABRT)
            fork.join(3.0)
            raise
        finally:
            _signal_group(fork.pid, signal.SIGKILL)
            fork.join()
            text = Path(output.name).read_text(errors="replace")
            _show(command, text, cwd)
        assert fork.exitcode is not None
        return subprocess.CompletedProcess(command, fork.exitcode, text)


def _main(command: tuple[str, ...], cwd: str, environment: dict[str, str], output: str) -> None:
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
    faulthandler.enable(2)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    multiprocessing.current_process()._config.pop("tempdir", None)  # the test's own
    os.chdir(cwd)
    main = sys.modules["__main__"] = types.ModuleType("__main__")  # of no file, so ranks are forks if nothing is said
    main.__spec__ = importlib.util.find_spec("lightning_zero.__main__")  # for those that are to be programs
    try:
        if command[0] == "-c":
            sys.path.insert(0, "")
            exec(command[1], vars(main))
        elif command[0].endswith(".py"):
            sys.argv = [*command]
            sys.path.insert(0, str(Path(command[0]).parent.resolve()))
            runpy.run_path(command[0], run_name="__main__")
        else:
            sys.argv = ["lightning-zero", *command]
            from lightning_zero.app.cli import main as lightning_zero

            lightning_zero()
    except Exception as error:
        sys.last_type = type(error)
        sys.excepthook(type(error), error, error.__traceback__)  # multiprocessing shows errors without
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # and ends its processes without


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def _hear_interrupts() -> None:
    """In a new process: a shell without a terminal starts what it starts in the background deaf to Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _signal_group(leader: int | None, number: int) -> None:
    if leader is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, number)


def _show(command: tuple[str, ...], output: str, folder: Path) -> None:
    print(f"$ {shlex.join(command)}\n{output}")
    for log in sorted(folder.rglob("*.log")):
        print(f"--- {log.relative_to(folder)}\n{log.read_text(errors='replace')}")


def console_script() -> str:
    return str(Path(sys.executable).parent / "lightning-zero")
