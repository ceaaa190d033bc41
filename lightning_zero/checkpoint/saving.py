"""Saves and loads checkpoints during a run: chooses the form, which rank has values, and the order of pending saves.

One :class:`Saving` lives as long as its strategy; :meth:`Saving.begin` passes it the agreement of each run. All its
methods except :meth:`Saving.remove` are collective.
"""

from __future__ import annotations

import copy
import functools
import os
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import nn

from lightning_zero.checkpoint import directory, file
from lightning_zero.checkpoint.layout import EXTRA
from lightning_zero.checkpoint.resume import collect, resume
from lightning_zero.checkpoint.store import BackgroundSaver, is_directory, load, together
from lightning_zero.comm.agree import IN_BACKGROUND, Agreement
from lightning_zero.private.lightning import TUNERS_FILES, checkpoint_connector
from lightning_zero.private.torch import DisableTorchFunction, pytree


class Saving:
    """Writes and reads the checkpoints of a strategy's runs.

    Args:
        form: ``"file"``, ``"sharded"`` or ``"sharded-async"``, as in ``ZeroConfig.checkpoint``.
    """

    def __init__(self, form: str) -> None:
        self._form = form
        self.collecting: str | None = None
        """The form for which Lightning is collecting a checkpoint; decides what the methods that return state return.
        For a file, rank 0 gets full tensors and the other ranks only shapes, so that a host holds one copy instead of
        one per rank. For a directory, every rank gets its own shards. ``None`` is a user's own call: every rank gets
        full tensors."""
        self.agreement = Agreement(alone=True)
        """The latest run's agreement; of this process alone if the ranks were its child processes and have ended."""
        self._loaded: dict[str, Any] | None = None  # for resume()
        self._background: BackgroundSaver | None = None

    # -- a run ---------------------------------------------------------------------------------------------------

    def begin(self, agreement: Agreement, checkpoint_io: Any) -> None:
        """Begins a run. Call it before set-up: checkpoints are loaded into the module before it is sharded.

        Raises:
            ValueError: For a plugin with a form that plugins do not support.
        """
        if self._form != "file" and type(checkpoint_io) is not TorchCheckpointIO:
            raise ValueError(
                f"checkpoint={self._form!r} with a CheckpointIO plugin ({type(checkpoint_io).__name__}):"
                " plugins write only one file; use checkpoint='file', or no plugin."
            )
        self.agreement = agreement

    def follow(self, trainer: Any) -> None:
        """Lets :attr:`collecting` tell Lightning's own collection of a checkpoint from a user's call.

        Stays in effect after the run: a checkpoint of a module that stays sharded is collected in the same way.

        Raises:
            CheckpointError: If callbacks of ``trainer`` would write sharded checkpoints to a remote place.
        """
        if self._form != "file":
            for callback in trainer.checkpoint_callbacks:
                directory.local_path(getattr(callback, "dirpath", None) or trainer.default_root_dir)
        checkpoint_connector(trainer).dump_checkpoint = functools.partial(self.collect, trainer)

    def collect(self, trainer: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Collects a checkpoint as Lightning does; each rank gets its part according to the strategy's form."""
        connector = checkpoint_connector(trainer)
        trainer.lightning_module.trainer = trainer  # copies of modules leave it out
        trainer.strategy.serve_reads()
        self.agreement.gather(None, "trainer.save_checkpoint()")
        self.collecting = self._form
        try:
            checkpoint: dict[str, Any] = type(connector).dump_checkpoint(connector, weights_only)
            if self.agreement.rank == 0:  # before end_reads: copying parameters may need the other ranks' rows
                checkpoint = {key: _apart(value) for key, value in checkpoint.items()}
            trainer.strategy.end_reads()
        except Exception as error:
            if "meta" in str(error) and hasattr(error, "add_note"):
                error.add_note(
                    "While a checkpoint is collected, only rank 0 has the tensors' values and the other ranks have"
                    " their shapes: read values under `if self.trainer.is_global_zero`."
                )
            raise
        finally:
            self.collecting = None
        return checkpoint

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for a copy of a Trainer after its runs, which agrees with its own process only."""
        return {**vars(self), "agreement": Agreement(alone=True)}

    def end(self, run_failed: bool) -> None:
        """Waits for background saves. A failed one raises, or only warns if the run has failed already."""
        self._loaded = None
        if self._background is not None:
            background, self._background = self._background, None
            try:
                background.close()
            except Exception as error:
                if not run_failed:
                    raise
                rank_zero_warn(f"The last checkpoint could not be completed: {error}")

    # -- writing -------------------------------------------------------------------------------------------------

    def save(self, checkpoint: dict[str, Any], path: str, trainer: Any, storage_options: Any) -> None:
        """Writes ``checkpoint`` in the strategy's form; in the background only while an engine trains.

        Raises:
            CheckpointError: On every rank, if it cannot be written; the previous checkpoint is untouched.
        """
        if checkpoint.get("optimizer_states") == []:
            rank_zero_warn(
                f"{path} has the weights only, so training cannot continue from it: this process has no optimizers. A"
                " run in child processes keeps them there; a ModelCheckpoint saves them during the run."
            )
        strategy = trainer.strategy
        with DisableTorchFunction():
            if "optimizer_states" in checkpoint:  # not save_weights_only
                checkpoint[EXTRA] = collect(trainer, self.agreement)
            if self._form == "file" or storage_options is not None:
                with self.agreement.raise_if_any_failed():
                    if self.agreement.rank == 0:
                        _write_file(checkpoint, path, strategy.checkpoint_io, storage_options)
            elif self._form == "sharded" or strategy.engine is None:
                if self._background is not None:  # complete older checkpoints first
                    together(self.agreement, self._background.wait)
                directory.write(checkpoint, path, self.agreement)
            else:
                if self._background is None:  # another kind, because its thread must not mix messages with this one
                    self._background = BackgroundSaver(self.agreement.with_kind(IN_BACKGROUND))
                self._background.save(checkpoint, path)

    def remove(self, filepath: Any, checkpoint_io: Any) -> None:
        """Deletes a checkpoint, on one rank, after pending saves: the checkpoint that replaces it is complete first."""

        def remove_it() -> None:
            try:
                if not directory.remove(os.fspath(filepath)):
                    checkpoint_io.remove_checkpoint(filepath)
            except OSError as error:  # a warning is enough: only this rank is here, and nothing depends on it
                rank_zero_warn(f"{filepath} could not be deleted: {error}")

        if self._background is not None:
            self._background.then(remove_it)
        else:
            remove_it()

    # -- reading -------------------------------------------------------------------------------------------------

    def load(self, checkpoint_path: Any, weights_only: bool | None, checkpoint_io: Any) -> dict[str, Any]:
        """Returns the content of a file or a sharded directory; its tensors stay on the disk until they are used.

        Raises:
            FileNotFoundError: On every rank, if there is nothing at the path.
            CheckpointError: On every rank, if it is incomplete, damaged, foreign, or more than ``weights_only`` admits.
        """
        # Rank 0's path: ranks that look for the newest checkpoint at different times may find different ones.
        path = self.agreement.gather(os.fspath(checkpoint_path))[0]
        if self._background is not None:
            together(self.agreement, self._background.wait)
        if type(checkpoint_io) is TorchCheckpointIO or together(self.agreement, lambda: is_directory(path)):
            content = load(path, weights_only, self.agreement)
        else:
            safely = weights_only is not False
            content = together(self.agreement, lambda: checkpoint_io.load_checkpoint(path, weights_only=safely))
        of_tuner = os.path.basename(path).startswith(TUNERS_FILES)
        self._loaded = None if of_tuner else content
        return content

    def resume(self, trainer: Any) -> None:
        """Continues from the checkpoint that was loaded for this run, if there is one. Call it before the first batch.
        After a tuner's trial steps, loaders and random states are not restored, as under DDP."""
        if self._loaded is not None:
            resume(self._loaded, trainer, self.agreement)
        self._loaded = None


def _apart(value: Any) -> Any:
    """Copies a checkpoint's ``value`` if it holds modules or parameters, such as a network in the hyperparameters."""
    holds = any(isinstance(leaf, (nn.Module, nn.Parameter)) for leaf in pytree.tree_leaves(value))
    return copy.deepcopy(value) if holds else value


def _write_file(checkpoint: dict[str, Any], path: str, checkpoint_io: Any, storage_options: Any) -> None:
    if type(checkpoint_io) is TorchCheckpointIO and storage_options is None:
        file.write(checkpoint, path)
    else:
        checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)
