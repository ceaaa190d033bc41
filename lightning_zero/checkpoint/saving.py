"""Saving and loading during a run: in which form, with whose values, and what is still under way.

One :class:`Saving` lives as long as its strategy; :meth:`Saving.begin` hands it the agreement of each run. All its
methods but :meth:`Saving.remove` are collective.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import nn

from lightning_zero.checkpoint import directory, file
from lightning_zero.checkpoint.collected import Collected
from lightning_zero.checkpoint.layout import EXTRA
from lightning_zero.checkpoint.resume import Resume, collect
from lightning_zero.checkpoint.store import BackgroundSaver, Loaded, is_directory, load, remove, together
from lightning_zero.comm.agree import IN_BACKGROUND, Agreement
from lightning_zero.private.lightning import TUNERS_FILES, checkpoint_connector
from lightning_zero.private.torch import DisableTorchFunction


class Collecting(Enum):
    """Whether Lightning collects a checkpoint, and so what a rank gets from the methods that return state."""

    NOTHING = auto()
    """The call is a user's own: every rank gets whole tensors, once all ranks have agreed that they make it."""
    FOR_RANK_0 = auto()
    """For one file: rank 0 gets whole tensors, the others their shapes alone, so a host holds one copy, not one for
    each rank."""
    SHARDS = auto()
    """For a directory: every rank gets its own shards, and nothing is gathered."""
    FAILED = auto()
    """As ``NOTHING``. The last collecting raised, perhaps because a hook read values where only shapes are."""

    @property
    def is_under_way(self) -> bool:
        """Whether it is Lightning that asks."""
        return self in (Collecting.FOR_RANK_0, Collecting.SHARDS)


class Saving:
    """Writes and reads the checkpoints of a strategy's runs.

    Args:
        form: ``"file"``, ``"sharded"`` or ``"sharded-async"``, as in ``ZeroConfig.checkpoint``.
    """

    def __init__(self, form: str) -> None:
        self._form = form
        self.collecting = Collecting.NOTHING
        self._memory: Collected | None = None
        self._meet: Callable[[], None] = _nothing  # no lambda: copies of a Trainer are pickled
        self._end_reads: Callable[[], None] = _nothing
        self._agreement: Agreement | None = None
        self._loaded: Loaded | None = None
        self._resumed: Resume | None = None
        self._continues = False
        self._background: BackgroundSaver | None = None

    def refuse_plugin(self, checkpoint_io: Any) -> None:
        """Raises ``ValueError`` for a plugin beside a form that plugins know nothing of."""
        if self._form != "file" and type(checkpoint_io) not in (type(None), *_ON_FILES):
            raise ValueError(
                f"checkpoint={self._form!r} with a CheckpointIO plugin ({type(checkpoint_io).__name__}):"
                " plugins write the one-file form; use checkpoint='file' or no plugin."
            )

    # -- a run ---------------------------------------------------------------------------------------------------

    @property
    def agreement(self) -> Agreement:
        """Of all ranks of the run; of this process alone, if the ranks were its children and have ended."""
        return self._agreement if self._agreement is not None else Agreement(alone=True)

    def begin(self, agreement: Agreement) -> None:
        """A run begins; before set-up, because checkpoints are loaded into the module while it is still whole."""
        self._agreement, self.collecting = agreement, Collecting.NOTHING

    def follow(self, trainer: Any, meet: Callable[[], None], end_reads: Callable[[], None]) -> None:
        """From here on :attr:`collecting` tells Lightning's own collecting of a checkpoint from a user's call.

        ``meet`` is called before ranks wait for each other, ``end_reads`` when rank 0 alone has read parameters.

        It stays so after the run: a checkpoint of a module that has stayed sharded is collected the same way.
        """
        self._meet, self._end_reads = meet, end_reads
        checkpoint_connector(trainer).dump_checkpoint = _Dump(self, trainer)

    def collect(self, trainer: Any, weights_only: bool | None) -> dict[str, Any]:
        """The checkpoint as Lightning collects it, each rank's part by the strategy's form."""
        connector = checkpoint_connector(trainer)
        self._meet()
        self.agreement.gather(None, "trainer.save_checkpoint()")
        self.collecting = Collecting.FOR_RANK_0 if self._form == "file" else Collecting.SHARDS
        if self.collecting is Collecting.FOR_RANK_0:
            folder = getattr(trainer.checkpoint_callback, "dirpath", None)
            self._memory = Collected([folder, trainer.default_root_dir])
        try:
            checkpoint: dict[str, Any] = type(connector).dump_checkpoint(connector, weights_only)
            if self.agreement.rank == 0:
                checkpoint = {key: _apart(value) for key, value in checkpoint.items()}
            self._end_reads()
        except BaseException:
            self.collecting = Collecting.FAILED
            raise
        finally:
            self._memory = None
        self.collecting = Collecting.NOTHING
        return checkpoint

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a Trainer has had the same runs, and is of its process alone."""
        state = type(self)(self._form).__dict__
        return state if self._agreement is None else {**state, "_agreement": Agreement(alone=True)}

    def on_rank_0(self) -> tuple[Agreement, Collected] | None:
        """Agreement and memory for collecting one file; ``None`` if every rank gets whole tensors."""
        return None if self._memory is None else (self.agreement, self._memory)

    def end(self, run_failed: bool) -> None:
        """Waits for saves in the background. One that fails ends a run; beside another failure it is a warning."""
        self._forget_loaded()
        if self._resumed is not None:
            self._resumed.close()
            self._resumed = None
        if self._background is not None:
            background, self._background = self._background, None
            try:
                background.close()
            except Exception as error:
                if not run_failed:
                    raise
                rank_zero_warn(f"The last checkpoint could not be completed: {error}")

    # -- writing -------------------------------------------------------------------------------------------------

    def save(
        self, checkpoint: dict[str, Any], path: str, trainer: Any, storage_options: Any, beside_training: bool
    ) -> None:
        """Writes ``checkpoint`` in the strategy's form; in the background only ``beside_training``.

        Raises:
            CheckpointError: On every rank, if it cannot be written; the checkpoint before it is untouched.
        """
        if self._form != "file" and storage_options is not None:
            raise TypeError(
                "save_checkpoint(storage_options=...) is for CheckpointIO plugins, which"
                f" checkpoint={self._form!r} has none of: use checkpoint='file', or leave it out."
            )
        if "optimizer_states" in checkpoint and self._agreement is None:
            rank_zero_warn(
                f"{path} has the weights, and training cannot continue from it: optimizers and progress ended with the"
                " processes of the run. A ModelCheckpoint saves them inside the run."
            )
        with DisableTorchFunction():
            if "optimizer_states" in checkpoint:  # not save_weights_only
                checkpoint[EXTRA] = collect(trainer, self.agreement)
            if self._form == "file":
                together(self.agreement, lambda: _write_file(checkpoint, path, trainer, storage_options))
            elif self._form == "sharded" or not beside_training:
                if self._background is not None:  # an older checkpoint is complete first
                    together(self.agreement, self._background.wait)
                directory.write(checkpoint, path, self.agreement)
            else:
                if self._background is None:  # its thread agrees in messages of its own
                    self._background = BackgroundSaver(self.agreement.beside(IN_BACKGROUND))
                self._background.save(checkpoint, path)

    def wait(self) -> None:
        """Returns when nothing is being written any more; raises if that failed."""
        if self._background is not None:
            self._background.wait()

    def remove(self, filepath: Any, checkpoint_io: Any) -> None:
        """Deletes a checkpoint, on one rank, after the saves that are under way: the next one is complete first."""

        def remove_it() -> None:
            try:
                if not remove(os.fspath(filepath)):
                    checkpoint_io.remove_checkpoint(filepath)
            except OSError as error:  # on this rank alone, and nothing depends on it
                rank_zero_warn(f"{filepath} could not be deleted: {error}")

        if self._background is not None:
            self._background.then(remove_it)
        else:
            remove_it()

    # -- reading -------------------------------------------------------------------------------------------------

    def load(self, checkpoint_path: Any, weights_only: bool | None, checkpoint_io: Any) -> dict[str, Any]:
        """The content of a file or a sharded directory, its tensors left on the disk until they are used.

        Raises:
            FileNotFoundError: On every rank, if there is nothing there.
            CheckpointError: On every rank, if it is incomplete, damaged, foreign, or more than ``weights_only`` admits.
        """
        self._forget_loaded()
        # Rank 0's path: a rank that looks for the newest checkpoint by itself may find a later one than others
        path = self.agreement.gather(os.fspath(checkpoint_path))[0]
        if self._background is not None:
            together(self.agreement, self._background.wait)
        ours = type(_innermost(checkpoint_io)) in _ON_FILES  # plugins around it change the writing only
        if ours or together(self.agreement, lambda: is_directory(path)):
            self._loaded = load(path, weights_only, self.agreement)
        else:
            safely = weights_only is not False
            content = together(self.agreement, lambda: checkpoint_io.load_checkpoint(path, weights_only=safely))
            self._loaded = Loaded(content)
        self._continues = not os.path.basename(path).startswith(TUNERS_FILES)
        return self._loaded.content

    def resume(self, trainer: Any) -> None:
        """Continues from the checkpoint that was loaded for this run, if there is one; before the first batch. Behind a
        tuner's trial steps loaders and random states go on from there, as under DDP."""
        if self._loaded is not None:
            if self._continues:
                self._resumed = Resume(self._loaded.content, self.agreement)
                self._resumed.apply(trainer)
            self._forget_loaded()

    def _forget_loaded(self) -> None:
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None


def _nothing() -> None:
    """There is no run whose ranks could wait for each other."""


def _apart(value: Any) -> Any:
    """``value`` of a checkpoint, copied if it holds modules or parameters: a network among the hyperparameters."""
    return copy.deepcopy(value) if _holds_parameters(value) else value


def _holds_parameters(value: Any) -> bool:
    if isinstance(value, nn.Module):
        return True
    if isinstance(value, Mapping):
        return any(map(_holds_parameters, value.values()))
    if isinstance(value, (list, tuple, set)):
        return any(map(_holds_parameters, value))
    if isinstance(value, functools.partial):
        return any(map(_holds_parameters, (*value.args, *value.keywords.values())))
    return isinstance(value, nn.Parameter)


class _Dump:
    """A connector's ``dump_checkpoint``. No function: in a copy of the Trainer it collects for the copy."""

    def __init__(self, saving: Saving, trainer: Any) -> None:
        self._saving, self._trainer = saving, trainer

    def __call__(self, weights_only: bool | None = None) -> dict[str, Any]:
        module = self._trainer.lightning_module
        try:
            assert module.trainer
        except RuntimeError:  # copies of modules leave their trainer out
            module.trainer = self._trainer
        return self._saving.collect(self._trainer, weights_only)


def _write_file(checkpoint: dict[str, Any], path: str, trainer: Any, storage_options: Any) -> None:
    strategy = trainer.strategy
    if strategy.is_global_zero:
        strategy.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)


class WholeFileIO(TorchCheckpointIO):
    """Lightning's, with files that appear all at once, when all of their content is on the disk."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """See :func:`~lightning_zero.checkpoint.file.write`."""
        if storage_options is not None:
            return super().save_checkpoint(checkpoint, path, storage_options)  # says that it knows none
        return file.write(checkpoint, os.fspath(path))


_ON_FILES = (TorchCheckpointIO, WholeFileIO)


def on_whole_files(checkpoint_io: Any) -> Any:
    """``checkpoint_io``, or :class:`WholeFileIO` in the place of none and of Lightning's own; a plugin that wraps
    another (``AsyncCheckpointIO``) and was given none wraps ours."""
    if type(checkpoint_io) in (type(None), TorchCheckpointIO):
        return WholeFileIO()
    if hasattr(checkpoint_io, "checkpoint_io"):
        checkpoint_io.checkpoint_io = WholeFileIO()  # Lightning's setter leaves one that is there
    return checkpoint_io


def _innermost(checkpoint_io: Any) -> Any:
    return _innermost(checkpoint_io.checkpoint_io) if hasattr(checkpoint_io, "checkpoint_io") else checkpoint_io
