"""The ranks' answer to an exception: find out whether all have raised it alike, tell the user once, save or not.

An exception leaves each rank at a place of its own, so no collective may follow it blindly: not the saves of
``on_exception`` callbacks, not the next fit of a script that has caught it. Each rank says through the store (no
collective) what it raised and where, and waits a moment for the others.

    all raised alike    same kind, same step, same lines of code: ranks go on as one; checkpoints are saved, a script
                        that catches the error may start another fit with the same ranks
    not all did         no checkpoint is saved, the other ranks are ended, and the next fit of this script is refused

The store also knows which rank raised first. A rank whose supervisor reports failures writes that into a file; see
:mod:`~lightning_zero.launch.supervisor` for the ranks that fail without raising.
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

import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_zero.launch import rendezvous, tracebacks

WAIT_SECONDS = 4.0
"""Time for which a rank that has raised waits for the others to raise as well."""
ANSWER_SECONDS = 2.0
"""Further time for the store, which a stopped rank 0 keeps open and never answers from."""
ALONE_SECONDS = 5.0
"""Time for a rank that its supervisor has started to end after an error that not all ranks raised; then it ends itself:
if its script has caught the error, the other ranks wait for it in their next collective."""
_POLL_SECONDS = 0.02
ERROR_FILE = "LIGHTNING_ZERO_ERROR_FILE"
"""Set in ranks that a supervisor started: where they write what made them fail."""
RANK_LOG = "LIGHTNING_ZERO_RANK_LOG"
"""Set in ranks that a supervisor started: the file their output goes to; empty for the terminal."""


class AgreedInterrupt(KeyboardInterrupt):
    """Raised on all ranks between the same two steps, after Ctrl-C on one of them."""


# -- do all raise alike? -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """What the ranks know of an exception of this rank."""

    why: str | None
    """Why ranks have not all raised alike, in words; ``None``: they have."""
    first: int | None = None
    """The rank that raised first; ``None`` if this is not known."""
    what: str = ""
    """What that rank raised."""

    @property
    def alike(self) -> bool:
        return self.why is None


def judge(error: BaseException, strategy: Any, trainer: Any, is_over: Callable[[], bool]) -> Verdict:
    """Asks the other ranks whether all have raised ``error`` alike; each rank that has raised calls it.

    It waits for the others for at most :data:`WAIT_SECONDS`, and writes what it finds into :data:`ERROR_FILE`.

    Args:
        error: What this rank raised.
        strategy, trainer: Of the run.
        is_over: Says that another rank is known to have ended, so that nobody waits for it.
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

    # On a thread of its own: a call of the store has no time limit once it is connected
    asking = threading.Thread(target=ask, name="lightning_zero-raised", daemon=True)
    try:
        asking.start()
    except RuntimeError:  # no memory for its stack: perhaps what has been raised
        ask()
    else:
        asking.join(WAIT_SECONDS + ANSWER_SECONDS)
    verdict = found[0] if found else Verdict("rank 0 does not answer")
    write(error, first=verdict.first in (None, strategy.global_rank), alike=verdict.alike)
    return verdict


def ask_the_others(error: BaseException, alike: str, strategy: Any, size: int, is_over: Callable[[], bool]) -> Verdict:
    environment, rank = strategy.cluster_environment, strategy.global_rank
    address, port = environment.main_address, environment.main_port
    try:
        words = rendezvous.words(address, port, rank)
        store = dist.PrefixStore(f"raised/{rendezvous.count('raised', address, port)}", words)
        said = partial(write, error)
        return compare(store, rank, size, tracebacks.summary(error), alike, is_over, said)
    except (RuntimeError, TimeoutError) as lost:  # the store went with rank 0
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
    """The verdict, the same on all ranks that ask; few words for each rank, however many there are.

    Args:
        store: Where the ranks ask.
        rank, size: This rank, and the number of ranks.
        what: What this rank raised, for people.
        alike: The same, to be compared.
        is_over: Says that another rank is known to have ended.
        note: Called with whether this rank is the first, before another rank can see that it has raised.
    """
    deadline = time.monotonic() + WAIT_SECONDS
    store.set(str(rank), what)
    first, said = json.loads(store.compare_set("first", "", json.dumps([rank, what])))
    note(first == rank)
    same = store.add(alike, 1)  # before "all", so that nobody counts a rank there that is not yet counted here
    store.add("all", 1)
    while True:
        everybody, same = store.add("all", 0), store.add(alike, 0)
        late = is_over() or time.monotonic() > deadline
        if same == size or everybody > same or late:
            # The first verdict is everybody's: one rank may run out of time as the last one arrives
            verdict = store.compare_set("verdict", "", "alike" if same == size else "not alike")
            why = None if verdict == b"alike" else _difference(store, rank, size, everybody > same, first, said)
            return Verdict(why, first, said)
        time.sleep(_POLL_SECONDS)


def _difference(store: Any, rank: int, size: int, others_raised: bool, first: int, said: str) -> str:
    missing = [str(other) for other in range(size) if not store.check([str(other)])]
    if missing and not others_raised:
        return f"rank {', '.join(missing[:8])}{', ...' if len(missing) > 8 else ''} did not raise it"
    if first != rank:
        return f"rank {first} raised something else, or elsewhere ({said})"
    return "another rank raised something else, elsewhere, or later"


# -- for the supervisor ------------------------------------------------------------------------------------------------


def write(error: BaseException, first: bool, alike: bool = False) -> None:
    """Writes into :data:`ERROR_FILE`, if this rank has one, what it raised.

    Args:
        error: What this rank raised.
        first: No other rank is known to have raised before.
        alike: All ranks have raised it, so that rank 0 shows it.
    """
    if not (path := os.environ.get(ERROR_FILE)):
        return
    said: dict[str, Any] = {"first": first, "alike": alike}
    said |= {"summary": tracebacks.summary(error), "traceback": tracebacks.folded(error)}
    with suppress(OSError):
        new = f"{path}.new"
        with open(new, "w", encoding="utf-8") as file:
            json.dump(said, file)
        os.replace(new, path)  # whole or not at all


def note_scratch() -> None:
    """Tells the supervisor the folder for sockets of this rank's data loader workers, to be removed after a kill."""
    if path := os.environ.get(ERROR_FILE):
        scratch_file(path).write_text(get_temp_dir(), encoding="utf-8")


def scratch_file(error_file: str) -> Path:
    return Path(error_file).with_suffix(".scratch")


def end_soon() -> None:
    """This rank cannot go on; see :data:`ALONE_SECONDS`."""
    if ERROR_FILE in os.environ:
        timer = threading.Timer(ALONE_SECONDS, os._exit, (1,))
        timer.daemon = True
        timer.start()


# -- saves -------------------------------------------------------------------------------------------------------------


def saves_on_exception(trainer: Any) -> list[Any]:
    """Callbacks that save a checkpoint, a collective, when the run raises."""
    callbacks = [c for c in trainer.callbacks if isinstance(c, (OnExceptionCheckpoint, ModelCheckpoint))]
    return [c for c in callbacks if getattr(c, "save_on_exception", True)]


_skipped: list[tuple[Any, str]] = []


def skip_saves(trainer: Any, why: str, tells: bool = True) -> None:
    """Until :func:`save_again` saving is a line that says why there is none (on one rank, which ``tells``): it would
    wait for ranks that never come, and hide the error that matters."""
    told = [] if tells else [why]

    def skip(*args: Any, **kwargs: Any) -> None:
        if not told:
            told.append(why)
            tell(f"no checkpoint is saved after this error: not all ranks raised it alike, {why}.")

    # The callbacks too: what they do after saving assumes that there is a checkpoint
    for owner, name in ((trainer, "save_checkpoint"), *((c, "on_exception") for c in saves_on_exception(trainer))):
        setattr(owner, name, skip)
        _skipped.append((owner, name))


def save_again() -> None:
    """A new run begins: takes back :func:`skip_saves`."""
    while _skipped:
        owner, name = _skipped.pop()
        vars(owner).pop(name, None)


# -- telling -----------------------------------------------------------------------------------------------------------


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
