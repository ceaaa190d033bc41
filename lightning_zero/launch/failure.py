"""Handles an exception of a run: did all ranks raise it, who reports it, and may a checkpoint be saved?

After an exception ranks may be at different places of the program. No collective is safe then: neither the save of an
``on_exception`` callback, nor the next fit of a script that has caught the exception. So each rank publishes in the
store (no collective) what it raised and where, and waits a moment for the others.

    all raised alike    same type, same step, same lines of code: ranks continue together; checkpoints are saved, and a
                        script that catches the error may start another fit with the same ranks
    not all did         no checkpoint is saved, the other ranks are ended, and the next fit of this script is refused

The store also records which rank raised first. A rank that has a supervisor writes this into a file for it. For ranks
that fail without raising see :mod:`~lightning_zero.launch.supervisor`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_zero.launch import rendezvous, tracebacks
from lightning_zero.private.lightning import set_on_instance

WAIT_SECONDS = 4.0
"""Seconds for which a rank that has raised waits for the others to raise as well."""
ANSWER_SECONDS = 2.0
"""Further seconds for an answer of the store. If rank 0 is stopped, its store stays connected and never answers."""
ALONE_SECONDS = 5.0
"""Seconds from an error that not all ranks raised to the exit of a rank that has a supervisor. A script that has caught
the error would otherwise continue, and the other ranks would wait for this one in their next collective."""
_POLL_SECONDS = 0.02
ERROR_FILE = "LIGHTNING_ZERO_ERROR_FILE"
"""Environment variable of ranks that a supervisor started: the file into which they write their error."""
RANK_LOG = "LIGHTNING_ZERO_RANK_LOG"
"""Environment variable of ranks that a supervisor started: the file of their output; empty for the terminal."""


class AgreedInterrupt(KeyboardInterrupt):
    """Raised on all ranks between the same two steps, after Ctrl-C on one of them."""


# -- have all ranks raised the same? -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """The ranks' common knowledge of an exception."""

    why: str | None
    """The reason, for people, why the ranks have not all raised alike. ``None`` if they have."""
    first: int | None = None
    """The rank that raised first; ``None`` if unknown."""
    what: str = ""
    """The error that this rank raised, in one line."""

    @property
    def alike(self) -> bool:
        return self.why is None


def judge(error: BaseException, strategy: Any, trainer: Any, is_over: Callable[[], bool]) -> Verdict:
    """Finds out whether all ranks have raised ``error`` alike. Each rank that has raised calls this.

    Waits at most :data:`WAIT_SECONDS` for the others, and writes the result into :data:`ERROR_FILE`.

    Args:
        error: The exception of this rank.
        strategy, trainer: The run's.
        is_over: Returns whether another rank is known to have ended; then nobody waits for it.
    """
    size = strategy.num_processes * getattr(strategy, "num_nodes", 1)
    if size == 1:
        return Verdict(None)
    if isinstance(error, KeyboardInterrupt) and not isinstance(error, AgreedInterrupt):
        return Verdict("this rank was interrupted in the middle of a step")
    alike = _what_must_be_alike(error, trainer)
    found: list[Verdict] = []

    def ask() -> None:
        found.append(ask_the_others(error, alike, strategy, size, is_over))

    # On a separate thread, because a call of a connected store has no time limit
    asking = threading.Thread(target=ask, name="lightning_zero-raised", daemon=True)
    try:
        asking.start()
    except RuntimeError:  # no memory for the thread's stack: running out of memory may be the error itself
        ask()
    else:
        asking.join(WAIT_SECONDS + ANSWER_SECONDS)
    verdict = found[0] if found else Verdict("rank 0 does not answer")
    write(error, first=verdict.first in (None, strategy.global_rank), alike=verdict.alike)
    return verdict


def ask_the_others(error: BaseException, alike: str, strategy: Any, size: int, is_over: Callable[[], bool]) -> Verdict:
    environment, rank = strategy.cluster_environment, strategy.global_rank
    try:
        store = rendezvous.words(environment.main_address, environment.main_port, rank)
        said = partial(write, error)
        return compare(store, rank, size, tracebacks.summary(error), alike, is_over, said)
    except (RuntimeError, TimeoutError) as lost:  # rank 0 has ended, and with it the store
        return Verdict(f"rank 0 is gone ({str(lost).splitlines()[0]})")


def _what_must_be_alike(error: BaseException, trainer: Any) -> str:
    steps = [trainer.global_step, trainer.fit_loop.epoch_loop.batch_idx] if trainer is not None else []
    state = str(getattr(trainer, "state", ""))
    found = [type(error).__qualname__, state, *steps, *tracebacks.place(error)]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def compare(
    store: Any,
    rank: int,
    size: int,
    what: str,
    alike: str,
    is_over: Callable[[], bool] = lambda: False,
    note: Callable[[bool], None] = lambda is_first: None,
) -> Verdict:
    """Returns the verdict, which is the same on all ranks that ask.

    The number of a rank's requests does not grow with the number of ranks.

    Args:
        store: The store in which the ranks compare.
        rank, size: This rank, and the number of ranks.
        what: This rank's error, for people.
        alike: The same as a hash, for the comparison.
        is_over: Returns whether another rank is known to have ended.
        note: Called with whether this rank is the first, before any other rank can see that it has raised.
    """
    deadline = time.monotonic() + WAIT_SECONDS
    first, said = json.loads(store.compare_set("first", "", json.dumps([rank, what])))
    note(first == rank)
    same = store.add(alike, 1)  # before "all": otherwise another rank could take this one for one that differs
    store.add("all", 1)
    while True:
        everybody, same = store.add("all", 0), store.add(alike, 0)
        late = is_over() or time.monotonic() > deadline
        if same == size or everybody > same or late:
            # All ranks adopt the first verdict: one rank may run out of time just as the last one arrives
            verdict = store.compare_set("verdict", "", "alike" if same == size else "not alike")
            why = f"{everybody} of {size} ranks raised an error, {same} of them this one (rank {first} first: {said})"
            return Verdict(None if verdict == b"alike" else why, first, said)
        time.sleep(_POLL_SECONDS)


# -- for the supervisor ------------------------------------------------------------------------------------------------


def write(error: BaseException, first: bool, alike: bool = False) -> None:
    """Writes ``error`` into :data:`ERROR_FILE`, if this rank has one.

    Args:
        error: The exception of this rank.
        first: Whether no other rank is known to have raised before.
        alike: Whether all ranks have raised it. Then rank 0 shows it.
    """
    if not (path := os.environ.get(ERROR_FILE)):
        return
    said: dict[str, Any] = {"first": first, "alike": alike}
    said |= {"summary": tracebacks.summary(error), "traceback": tracebacks.full(error)}
    with suppress(OSError):
        new = f"{path}.new"
        with open(new, "w", encoding="utf-8") as file:
            json.dump(said, file)
        os.replace(new, path)  # atomic: the supervisor never reads a part of the file


def note_scratch() -> None:
    """Tells the supervisor where this rank's data loader workers have their sockets. It removes them after a kill."""
    if path := os.environ.get(ERROR_FILE):
        scratch_file(path).write_text(get_temp_dir(), encoding="utf-8")


def scratch_file(error_file: str) -> Path:
    return Path(error_file).with_suffix(".scratch")


def end_soon() -> None:
    """Exits this rank, which cannot continue, after :data:`ALONE_SECONDS`."""
    if ERROR_FILE in os.environ:
        timer = threading.Timer(ALONE_SECONDS, os._exit, (1,))
        timer.daemon = True
        timer.start()


# -- saves -------------------------------------------------------------------------------------------------------------


def saves_on_exception(trainer: Any) -> list[Any]:
    """The callbacks that save a checkpoint when the run raises. A save is collective."""
    callbacks = [c for c in trainer.callbacks if isinstance(c, (OnExceptionCheckpoint, ModelCheckpoint))]
    return [c for c in callbacks if getattr(c, "save_on_exception", True)]


_skipped: list[Callable[[], None]] = []


def skip_saves(trainer: Any, why: str, tells: bool = True) -> None:
    """Replaces saves by a line that explains why there is none, until :func:`save_again`.

    A save would wait for ranks that never come, and would hide the first error. Only the rank with ``tells`` prints.
    """
    told = [] if tells else [why]

    def skip(*args: Any, **kwargs: Any) -> None:
        if not told:
            told.append(why)
            tell(f"no checkpoint is saved after this error: not all ranks raised it alike, {why}.")

    # The callbacks too, because their code after the save relies on the checkpoint
    for owner, name in ((trainer, "save_checkpoint"), *((c, "on_exception") for c in saves_on_exception(trainer))):
        _skipped.append(set_on_instance(owner, name, skip))


def save_again() -> None:
    """Undoes :func:`skip_saves`, because a new run begins."""
    while _skipped:
        _skipped.pop()()


# -- the terminal ------------------------------------------------------------------------------------------------------


def report_errors() -> None:
    """Replaces ``sys.excepthook`` for uncaught errors of a run that :func:`note` has marked.

    Rank 0 shows its traceback, or one line if another rank's error, which the supervisor has shown, caused it. Other
    ranks write their traceback into their log, and nothing on the terminal.
    """
    if getattr(sys.excepthook, "func", None) is not _show:
        sys.excepthook = partial(_show, sys.excepthook)


def note(error: BaseException, headline: str, is_effect: bool = False) -> None:
    """Marks ``error``, which a run has raised. A list of errors would keep the tensors of their frames in memory.

    Args:
        error: The exception of this rank.
        headline: Names the rank, and says why it failed.
        is_effect: Whether an error of another rank, which has been shown, caused this one.
    """
    vars(error)["lightning_zero"] = headline, is_effect


def _show(otherwise: Callable[..., Any], kind: type[BaseException], error: BaseException, tb: Any) -> None:
    marked, log = vars(error).get("lightning_zero"), os.environ.get(RANK_LOG)
    if marked is None or isinstance(error, KeyboardInterrupt):
        otherwise(kind, error, tb)
    elif log is not None:  # another rank than 0
        sys.stderr.write(tracebacks.full(error) if log else "")
    else:
        headline, is_effect = marked
        text = f" ({tracebacks.summary(error)[:200]})\n" if is_effect else f"\n{tracebacks.full(error)}"
        sys.stderr.write(f"lightning_zero: {headline}{text}")
    sys.stderr.flush()


def tell(text: str) -> None:
    """Prints one line for the user, marked as this package's."""
    print(f"lightning_zero: {text}", file=sys.stderr, flush=True)
