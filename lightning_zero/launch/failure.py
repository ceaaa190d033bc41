"""The ranks' answer to an exception: find out whether all have raised it alike, tell the user once, save or not.

An exception leaves each rank at a place of its own, so no collective may follow it blindly: not the saves of
``on_exception`` callbacks, not the next fit of a script that has caught it. Each rank says through the store (no
collective) what it raised and where, and waits a moment for the others.

    all raised alike    same kind, same step, same lines of code: ranks go on as one; checkpoints are saved, a script
                        that catches the error may start another fit with the same ranks
    not all did         no checkpoint is saved, the other ranks are ended, and the next fit of this script is refused
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
from typing import Any

import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_zero.launch import rendezvous, tracebacks

WAIT_SECONDS = 4.0
"""Time for which a rank that has raised waits for the others to raise as well."""
ANSWER_SECONDS = 2.0
"""Further time for the store, which a stopped rank 0 keeps open and never answers from."""
_POLL_SECONDS = 0.02
RANK_LOG = "LIGHTNING_ZERO_RANK_LOG"
"""Set in ranks that a supervisor started: the file their output goes to; empty for the terminal."""


class AgreedInterrupt(KeyboardInterrupt):
    """Raised on all ranks between the same two steps, after Ctrl-C on one of them."""


# -- do all raise alike? -----------------------------------------------------------------------------------------------


def all_raised(
    error: BaseException, strategy: Any, trainer: Any, is_over: Callable[[], bool]
) -> tuple[str | None, bool]:
    """``None`` if all ranks have raised ``error`` alike, otherwise which has not, in words; and whether this rank is
    the first that knows.

    Every rank that has raised calls it; it waits for the others for at most :data:`WAIT_SECONDS`.

    Args:
        error: What this rank raised.
        strategy, trainer: Of the run.
        is_over: Says that another rank is known to have ended, so that nobody waits for it.
    """
    size = strategy.num_processes * getattr(strategy, "num_nodes", 1)
    if size == 1:
        return None, False
    if isinstance(error, KeyboardInterrupt) and not isinstance(error, AgreedInterrupt):
        return "this rank was interrupted in the middle of a step", True
    alike = _what_must_be_alike(error, trainer)
    found: list[tuple[str | None, bool]] = []

    def ask() -> None:
        found.append(ask_the_others(error, alike, strategy, size, is_over))

    # On a thread of its own: a call of the store has no time limit once it is connected
    asking = threading.Thread(target=ask, name="lightning_zero-raised", daemon=True)
    try:
        asking.start()
    except RuntimeError:  # no memory for its stack: perhaps what has been raised
        ask()
    else:
        asking.join(WAIT_SECONDS + ANSWER_SECONDS)
    return found[0] if found else ("rank 0 does not answer", False)


def ask_the_others(
    error: BaseException, alike: str, strategy: Any, size: int, is_over: Callable[[], bool]
) -> tuple[str | None, bool]:
    environment, rank = strategy.cluster_environment, strategy.global_rank
    address, port = environment.main_address, environment.main_port
    try:
        words = rendezvous.words(address, port, rank)
        store = dist.PrefixStore(f"raised/{rendezvous.count('raised', address, port)}", words)
        why = compare(store, rank, size, tracebacks.summary(error), alike, is_over)
        return why, why is not None and store.add("told", 1) == 1
    except (RuntimeError, TimeoutError) as lost:  # the store went with rank 0
        return f"rank 0 is gone ({str(lost).splitlines()[0]})", False


def _what_must_be_alike(error: BaseException, trainer: Any) -> str:
    steps = [trainer.global_step, trainer.fit_loop.epoch_loop.batch_idx] if trainer is not None else []
    state = str(getattr(trainer, "state", ""))
    found = [type(error).__qualname__, state, *steps, *tracebacks.place(error)]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def compare(store: Any, rank: int, size: int, what: str, alike: str, is_over: Callable[[], bool]) -> str | None:
    """Few words for each rank, however many there are."""
    deadline = time.monotonic() + WAIT_SECONDS
    store.set(str(rank), what)
    store.compare_set("first", "", json.dumps([rank, what]))
    same = store.add(alike, 1)  # before "all", so that nobody counts a rank there that is not yet counted here
    store.add("all", 1)
    while True:
        everybody, same = store.add("all", 0), store.add(alike, 0)
        late = is_over() or time.monotonic() > deadline
        if same == size or everybody > same or late:
            # The first verdict is everybody's: one rank may run out of time as the last one arrives
            verdict = store.compare_set("verdict", "", "alike" if same == size else "not alike")
            return None if verdict == b"alike" else _difference(store, rank, size, everybody > same)
        time.sleep(_POLL_SECONDS)


def _difference(store: Any, rank: int, size: int, others_raised: bool) -> str:
    missing = [str(other) for other in range(size) if not store.check([str(other)])]
    if missing and not others_raised:
        return f"rank {', '.join(missing[:8])}{', ...' if len(missing) > 8 else ''} did not raise it"
    first, said = json.loads(store.get("first"))
    if first != rank:
        return f"rank {first} raised something else, or elsewhere ({said})"
    return "another rank raised something else, elsewhere, or later"


# -- saves -------------------------------------------------------------------------------------------------------------


def saves_on_exception(trainer: Any) -> list[Any]:
    """Callbacks that save a checkpoint, a collective, when the run raises."""
    callbacks = [c for c in trainer.callbacks if isinstance(c, (OnExceptionCheckpoint, ModelCheckpoint))]
    return [c for c in callbacks if getattr(c, "save_on_exception", True)]


def skip_saves(trainer: Any, why: str, tells: bool = True) -> None:
    """Until the next run of ``trainer`` saving is a line that says why there is none (on one rank, which ``tells``): it
    would wait for ranks that never come, and hide the error that matters."""
    told = [] if tells else [why]

    def skip(*args: Any, **kwargs: Any) -> None:
        if not told:
            told.append(why)
            tell(f"no checkpoint is saved after this error: not all ranks raised it alike, {why}.")

    trainer.save_checkpoint = skip
    for callback in saves_on_exception(trainer):  # what it does after saving believes that there is a checkpoint
        callback.on_exception = skip


def save_again(trainer: Any) -> None:
    """A new run begins: takes back :func:`skip_saves`."""
    for owner, name in (
        (trainer, "save_checkpoint"),
        *((c, "on_exception") for c in getattr(trainer, "callbacks", ())),
    ):
        if getattr(vars(owner).get(name), "__qualname__", "").startswith("skip_saves."):
            delattr(owner, name)


# -- telling -----------------------------------------------------------------------------------------------------------


def write(path: str, error: BaseException, alike: bool = False, alone: bool = False, at: float | None = None) -> None:
    """For the supervisor, which cannot know why a rank ended.

    Args:
        path: Where it looks.
        error: What this rank raised.
        alike: All ranks have, so that rank 0 shows it.
        alone: Not all have, and this rank cannot go on: the supervisor ends it if it has caught the error.
        at: When, in seconds since the epoch; now, if it is not given.
    """
    said = {
        "at": at or time.time(),
        "summary": tracebacks.summary(error),
        "traceback": tracebacks.folded(error),
        "alike": alike,
        "alone": alone,
    }
    with suppress(OSError):
        new = f"{path}.new"
        with open(new, "w", encoding="utf-8") as file:
            json.dump(said, file)
        os.replace(new, path)  # whole or not at all


class Reporter:
    """Shows what a run raised when nobody has caught it, in place of Python's own words.

    Rank 0 shows its error folded, or one line where the error of another rank, which the supervisor has shown, has
    caused it. Other ranks leave the terminal to the supervisor and rank 0. Logs of ranks get everything.
    """

    def __init__(self) -> None:
        self._before = sys.excepthook
        self._errors: list[tuple[BaseException, str, bool]] = []
        sys.excepthook = self._show

    def note(self, error: BaseException, headline: str, is_effect: bool) -> None:
        """``error`` has come out of a run.

        Args:
            error: What this rank raised.
            headline: Which rank it is, and why it failed.
            is_effect: The error of another rank, which has been shown, has caused this one.
        """
        self._errors.append((error, headline, is_effect))

    def _show(self, kind: type[BaseException], error: BaseException, tb: Any) -> None:
        found = next((noted for noted in self._errors if noted[0] is error), None)
        log = os.environ.get(RANK_LOG)
        if found is None or isinstance(error, KeyboardInterrupt):
            self._before(kind, error, tb)
        elif log is not None:  # another rank than 0
            sys.stderr.write(tracebacks.whole(error) if log else "")
        elif found[2]:
            sys.stderr.write(f"lightning_zero: {found[1]} ({tracebacks.summary(error)[:200]})\n")
        else:
            hint = "" if tracebacks.FULL in os.environ else f"; {tracebacks.FULL}=1 shows all frames"
            sys.stderr.write(f"lightning_zero: {found[1]}{hint}\n{tracebacks.folded(error)}")
        sys.stderr.flush()


def tell(text: str) -> None:
    """One line of ours for the user."""
    print(f"lightning_zero: {text}", file=sys.stderr, flush=True)
