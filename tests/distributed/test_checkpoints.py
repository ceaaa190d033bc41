"""Checkpoints move between strategies, world sizes and forms, and lose nothing."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import resource
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_zero
from lightning_zero.checkpoint import directory
from lightning_zero.checkpoint import file as one_file
from lightning_zero.checkpoint.store import BackgroundSaver
from lightning_zero.comm.agree import Agreement
from lightning_zero.errors import CheckpointError
from tests.helpers import moves
from tests.helpers.ranks import outcome, run_ranks
from tests.helpers.zoo import make_trainer

# ---------------------------------------------------------------------------------------------------------------------
# From any strategy to any other; all moves are walked by `python benchmarks/checkpoints.py moves`, and `groups`
# ---------------------------------------------------------------------------------------------------------------------

HSDP = "zero3, 2 groups of 2"
MOVES = [
    moves.Move("zero3", 2, "sharded", "zero3", 3, "sharded-async", "mid-epoch, stateful", "features"),
    moves.Move("zero3", 2, "sharded", "ddp", 2, "file", "mid-epoch, stateful", "features"),
    moves.Move("zero2", 1, "file", "zero3", 2, "file", "mid-epoch", "fp16"),
    moves.Move("ddp", 2, "file", "zero3", 3, "sharded", "epoch end", "two optimizers"),
    moves.Move("zero3_deepspeed", 2, "sharded", HSDP, 4, "file", "epoch end", "two optimizers"),
    moves.Move(HSDP, 4, "sharded", "zero1", 2, "file", "mid-epoch", "features"),
]


@pytest.fixture(scope="module")
def travel(ranks, tmp_path_factory) -> moves.Travel:
    def run(fn: Any, *args: Any, world_size: int, **limit: float) -> list[Any]:
        """New processes for groups, as in test_hsdp."""
        if world_size == 4:
            return run_ranks(fn, 4, *args, **limit)
        return ranks(fn, *args, world_size=world_size, **limit)

    return moves.Travel(run, tmp_path_factory.mktemp("moves"))


@pytest.mark.parametrize("move", MOVES, ids=str)
def test_moves(move: moves.Move, travel: moves.Travel) -> None:
    assert travel.difference(move) <= moves.TOLERANCES[move.kind]


# ---------------------------------------------------------------------------------------------------------------------
# What continues
# ---------------------------------------------------------------------------------------------------------------------


class _WeightedLoader(moves.Features):
    """Draws samples with replacement from the global random state, like any sampler that is no DistributedSampler."""

    def train_dataloader(self) -> Any:
        data = moves.dataset()
        sampler = torch.utils.data.WeightedRandomSampler(torch.arange(1.0, len(data) + 1), len(data))
        return DataLoader(data, batch_size=6, sampler=sampler, num_workers=2)


def _weighted(path: str | None, resume: str | None) -> list[float]:
    torch.manual_seed(5)
    module = _WeightedLoader()
    callbacks = [moves._SaveAt(3, path)] if path else []
    trainer = make_trainer({"stage": 2}, max_steps=9, callbacks=callbacks)
    trainer.fit(module, ckpt_path=resume)
    return module.losses


def test_a_random_sampler_draws_the_same_order_again(ranks2, tmp_path: Path) -> None:
    path = str(tmp_path / "x.ckpt")
    straight = ranks2(_weighted, path, None)
    resumed = ranks2(_weighted, None, path)
    assert [losses[3:] for losses in straight] == resumed


def _with_max_steps(max_steps: int, save_at: tuple[int, str] | None, resume: str | None) -> moves.Run:
    callbacks = [moves._SaveAt(*save_at)] if save_at else []
    return moves.run(
        "zero2", "file", "features", "mid-epoch", 0, resume=resume, callbacks=callbacks, max_steps=max_steps
    )


def test_max_steps_continues_after_an_epochs_end(ranks2, tmp_path: Path) -> None:
    """Lightning's own DDP trains one batch too many in the epoch that was done."""
    stop = 2 * moves.BATCHES_PER_EPOCH
    path = str(tmp_path / "x.ckpt")
    straight = ranks2(_with_max_steps, stop + 9, (stop, path), None)
    resumed = ranks2(_with_max_steps, stop + 9, None, path)
    for ours, reference in zip(resumed, straight, strict=True):
        assert ours.losses == reference.losses[stop:]


# ---------------------------------------------------------------------------------------------------------------------
# What the file is
# ---------------------------------------------------------------------------------------------------------------------


class _Edits(moves.Features):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"answer": 42}
        state = checkpoint["state_dict"]
        for name in [n for n in state if n.startswith("blocks.1.inner")]:  # frozen, so not worth its space
            del state[name]
        state["last.weight"] = state["last.weight"].half()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["mine"] == {"answer": 42}
        checkpoint["state_dict"]["last.weight"] = checkpoint["state_dict"]["last.weight"].float()


def _fit_edits(strategy: Any, path: str, resume: str | None = None, **saving: Any) -> dict[str, Tensor]:
    torch.manual_seed(1)
    module = _Edits()
    module.strict_loading = False
    trainer = make_trainer(strategy, max_steps=2 if resume is None else 4)
    trainer.fit(module, moves.loader("epoch end", 2), ckpt_path=resume)
    trainer.save_checkpoint(path, **saving)
    return {k: v.detach().clone() for k, v in module.state_dict().items()}


def test_one_file_is_what_ddp_writes(ranks2, tmp_path: Path) -> None:
    """Keys, types, ties, hyper-parameters, optimizer states and the user's edits; readable with weights_only."""
    ours, ddps = str(tmp_path / "ours.ckpt"), str(tmp_path / "ddp.ckpt")
    weights = ranks2(_fit_edits, {"stage": 3, "min_unit_numel": 1}, ours)[0]
    ranks2(_fit_edits, "ddp", ddps)
    result, expected = torch.load(ours, weights_only=True), torch.load(ddps, weights_only=True)
    assert list(result) == [*expected, "lightning_zero"]
    assert type(result["state_dict"]) is type(expected["state_dict"])
    assert result["state_dict"]._metadata == expected["state_dict"]._metadata
    assert list(result["state_dict"]) == list(expected["state_dict"])
    for name, value in expected["state_dict"].items():
        assert result["state_dict"][name].dtype == value.dtype
        torch.testing.assert_close(result["state_dict"][name], value, rtol=1e-5, atol=1e-6)  # order of summation
    tied = [result["state_dict"][f"blocks.{i}.inner.weight"] for i in (0, 2)]
    assert tied[0].data_ptr() == tied[1].data_ptr()
    assert result["hyper_parameters"] == expected["hyper_parameters"]
    assert [s.keys() for s in result["optimizer_states"]] == [s.keys() for s in expected["optimizer_states"]]
    assert result["optimizer_states"][0]["param_groups"] == expected["optimizer_states"][0]["param_groups"]
    for mine, theirs in zip(
        result["optimizer_states"][0]["state"].values(), expected["optimizer_states"][0]["state"].values(), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert os.path.getsize(ours) < os.path.getsize(ddps) + 2 * 35_000  # the random states of two ranks
    loaded = _Edits.load_from_checkpoint(ours, weights_only=True, strict=False)
    torch.testing.assert_close(loaded.first.weight, weights["first.weight"], rtol=0, atol=0)


def test_edits_survive_a_resume(ranks2, tmp_path: Path) -> None:
    path = str(tmp_path / "x.ckpt")
    strategy = {"stage": 3, "min_unit_numel": 1, "checkpoint": "sharded"}
    ranks2(_fit_edits, strategy, path)
    ranks2(_fit_edits, strategy, str(tmp_path / "y.ckpt"), path)
    assert os.path.isdir(path)


def _save_weights(path: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(1)
    module = moves.Features()
    trainer = make_trainer({"stage": 3, "min_unit_numel": 1, "checkpoint": "sharded"}, max_steps=3)
    trainer.fit(module, moves.loader("epoch end", 2))
    trainer.save_checkpoint(path, weights_only=True)
    fresh = moves.Features()
    fresh.load_state_dict(lightning_zero.load_checkpoint(path)["state_dict"])
    return module.state_dict(), fresh.state_dict()


def test_a_folder_of_weights_alone_is_read_outside_of_a_run(ranks2, tmp_path: Path) -> None:
    for saved, read in ranks2(_save_weights, str(tmp_path / "x.ckpt")):
        assert all(torch.equal(read[k], saved[k]) for k in saved)


# ---------------------------------------------------------------------------------------------------------------------
# Safety
# ---------------------------------------------------------------------------------------------------------------------


def _save(form: str, path: str, stage: int = 3, **options: Any) -> None:
    save_at = None if form == "file" else 2  # while tensors are shards: afterwards these small ones go into rest.pt
    moves.run(f"zero{stage}", form, "features", "epoch end", 2, save_at, path, **options)


def _resume(path: str) -> list[float]:
    return moves.run("zero3", "file", "features", "epoch end", 4, None, None, path).losses


DAMAGED_FILES = {
    "truncated": (lambda path: os.truncate(path, path.stat().st_size // 2), "is truncated, damaged or not a torch"),
    "other archive": (lambda path: torch.save({"weights": torch.zeros(3)}, path), "has no 'state_dict'"),
    "list": (lambda path: torch.save([1, 2], path), "holds a list"),
    "missing": (Path.unlink, "Checkpoint file not found"),
}
"""Damage to a file -> how it is done, and the error."""


def test_a_bad_file_is_an_error_that_names_it_on_every_rank(ranks2, tmp_path: Path) -> None:
    full = tmp_path / "whole.ckpt"
    ranks2(_save, "file", str(full))
    for how, (damage, said) in DAMAGED_FILES.items():
        damage(Path(shutil.copy(full, tmp_path / f"{how}.ckpt")))
        for text in ranks2(_said, _resume, str(tmp_path / f"{how}.ckpt")):
            assert said in text
            assert f"{how}.ckpt" in text


def _said(fn: Any, *args: Any) -> str:
    """What ``fn`` raises, on this rank."""
    with pytest.raises((CheckpointError, OSError)) as error:
        fn(*args)
    return str(error.value)


def _become_foreign(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()
    (path / "readme.txt").write_text("nothing here")


def _only(path: Path, pattern: str) -> Path:
    (found,) = path.glob(pattern)
    return found


DAMAGED_FOLDERS = {
    "no marker": (lambda path: (path / "checkpoint.json").unlink(), "is missing, so its saving was interrupted"),
    "later format": (
        lambda path: (path / "checkpoint.json").write_text('{"format": 99, "data": "data-0"}'),
        "has format 99",
    ),
    "no shard": (lambda path: _only(path, "*/__1_0.distcp").unlink(), "__1_0.distcp is missing"),
    "short shard": (lambda path: os.truncate(_only(path, "*/__1_0.distcp"), 100), "__1_0.distcp is truncated"),
    "no rest": (lambda path: _only(path, "*/rest.pt").unlink(), "rest.pt is missing"),
    "foreign": (_become_foreign, "it is not a sharded checkpoint of lightning_zero"),
}
"""Damage to a folder -> how it is done, and the error."""


def test_a_bad_folder_is_an_error_that_names_what_is_missing(ranks2, tmp_path: Path) -> None:
    full = tmp_path / "whole.ckpt"
    ranks2(_save, "sharded", str(full))
    for how, (damage, said) in DAMAGED_FOLDERS.items():
        damage(shutil.copytree(full, tmp_path / f"{how}.ckpt"))
        for text in ranks2(_said, _resume, str(tmp_path / f"{how}.ckpt")):
            assert said in text
            assert f"{how}.ckpt" in text


class Harm:
    """Unpickling one writes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.write_text, (Path(self.path), "harm done"))


def _plant(path: Path, where: str, harm: Path) -> None:
    """Something that should not be unpickled."""
    if where == "file":
        torch.save({**torch.load(path, weights_only=True), "evil": Harm(str(harm))}, path)
        return
    (data,) = path.glob("data-*")
    if where == "rest":
        torch.save({**torch.load(data / "rest.pt", weights_only=True), "evil": Harm(str(harm))}, data / "rest.pt")
    elif where == "torch's index":
        (data / ".metadata").write_bytes(pickle.dumps(Harm(str(harm))))
    else:
        content = io.BytesIO()
        torch.save(Harm(str(harm)), content)
        (data / "evil").write_bytes(content.getvalue())
        index = json.loads((data / "index.json").read_text())
        for piece in (piece for pieces in index.values() for piece in pieces):
            piece[2:] = ["evil", 0, len(content.getvalue())]
        (data / "index.json").write_text(json.dumps(index))


def test_nothing_beyond_the_allow_list_is_unpickled(ranks2, tmp_path: Path) -> None:
    file, folder, harm = tmp_path / "file.ckpt", tmp_path / "folder.ckpt", tmp_path / "harm"
    ranks2(_save, "file", str(file))
    ranks2(_save, "sharded", str(folder))
    rest, piece = (shutil.copytree(folder, tmp_path / f"{where}.ckpt") for where in ("rest", "piece"))
    for path, where in ((file, "file"), (rest, "rest"), (piece, "piece"), (folder, "torch's index")):
        _plant(path, where, harm)
    for path in (file, rest):
        for text in ranks2(_said, _resume, str(path)):
            assert str(path) in text
            assert "weights_only" in text
    state = lightning_zero.load_checkpoint(piece)["state_dict"]
    with pytest.raises(CheckpointError, match=r"evil: 'state_dict/first.weight' .* is UnpicklingError"):
        state["first.weight"].clone()
    assert len(ranks2(_resume, str(folder))[0]) == 2  # of four steps
    assert not harm.exists()


def _full_disk(form: str, folder: str) -> tuple[str, list[float], bool]:
    """Saves, cannot save while files must stay small, goes on training, saves again."""
    said = []

    class Saves(L.Callback):
        def on_train_batch_end(self, trainer: Any, *unused: Any) -> None:
            if trainer.global_step == 1:
                trainer.save_checkpoint(f"{folder}/x.ckpt")
            if trainer.global_step == 2:
                before = resource.getrlimit(resource.RLIMIT_FSIZE)
                if trainer.global_rank == 0:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
                try:
                    with pytest.raises(CheckpointError) as error:
                        trainer.save_checkpoint(f"{folder}/x.ckpt")
                finally:
                    resource.setrlimit(resource.RLIMIT_FSIZE, before)
                said.append(str(error.value))

    run = moves.run("zero3", form, "features", "epoch end", 4, callbacks=[Saves(), moves._StopAt(4)])
    return said[0], run.losses, len(run.losses) == 4


@pytest.mark.parametrize("form", ["file", "sharded"])
def test_a_full_disk_is_an_error_on_every_rank_and_training_goes_on(form: str, ranks2, tmp_path: Path) -> None:
    for said, _, went_on in ranks2(_full_disk, form, str(tmp_path)):
        assert "x.ckpt could not be written" in said or "could not be written" in said
        assert "Its earlier content is untouched" in said
        assert went_on
    assert len(ranks2(_resume, str(tmp_path / "x.ckpt"))[0]) == 3  # the one before is whole
    assert [p.name for p in tmp_path.iterdir()] == ["x.ckpt"]  # and nothing else is left


def test_what_was_there_stays_until_the_new_one_is_whole_in_the_background(tmp_path: Path) -> None:
    """A save that fails must not be followed by the deletion of the one before it."""
    saver = BackgroundSaver(Agreement(alone=True))
    old, new = tmp_path / "old.ckpt", tmp_path / "new.ckpt"
    weights = {"state_dict": {"w": torch.ones(2000, 3)}, "live": {"steps": 1}}
    saver.save(weights, str(old))
    saver.wait()
    saver.save({**weights, "unpicklable": lambda: None}, str(new))
    saver.then(lambda: shutil.rmtree(old))
    with pytest.raises((AttributeError, pickle.PicklingError)):
        saver.wait()
    assert [p.name for p in tmp_path.iterdir()] == ["old.ckpt"]
    saver.save(weights, str(new))
    weights["live"]["steps"] = 2  # training goes on
    saver.then(lambda: shutil.rmtree(old))
    saver.close()
    assert [p.name for p in tmp_path.iterdir()] == ["new.ckpt"]
    assert directory.read(new, None)["live"] == {"steps": 1}


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    agreement = Agreement(alone=True)
    directory.write({"state_dict": {}, "epoch": 3}, str(tmp_path / "e3.ckpt"), agreement)
    os.symlink("e3.ckpt", tmp_path / "last.ckpt")
    directory.write({"state_dict": {}, "epoch": 9}, str(tmp_path / "last.ckpt"), agreement)
    assert [directory.read(tmp_path / name, None)["epoch"] for name in ("e3.ckpt", "last.ckpt")] == [3, 9]


def test_a_save_in_the_background_takes_no_stream(tmp_path: Path) -> None:
    """In a thread it is that of the host's first device, which each rank would open and wait for."""
    saver = BackgroundSaver(Agreement(alone=True))
    with mock.patch("torch.cuda.is_available"), mock.patch("torch.cuda.current_stream") as current_stream:
        saver.save({"state_dict": {"w": torch.ones(2000, 3)}}, str(tmp_path / "a.ckpt"))
        saver.close()
    assert not current_stream.called


def test_the_next_save_of_a_name_replaces_what_a_killed_one_has_left(tmp_path: Path) -> None:
    content = {"state_dict": {"w": torch.ones(2000, 3)}, "epoch": 1}
    (tmp_path / ".file.ckpt.partial").write_bytes(b"half")
    (tmp_path / "folder.ckpt" / "data-.partial").mkdir(parents=True)
    (tmp_path / "folder.ckpt" / "data-.partial" / "__7_0.distcp").write_bytes(b"half")
    one_file.write(content, str(tmp_path / "file.ckpt"))
    directory.write(content, str(tmp_path / "folder.ckpt"), Agreement(alone=True))
    assert one_file.read(str(tmp_path / "file.ckpt"), None)["epoch"] == 1
    assert directory.read(tmp_path / "folder.ckpt", None)["epoch"] == 1
    assert {p.name for p in tmp_path.iterdir()} == {"file.ckpt", "folder.ckpt"}
    assert not list(tmp_path.rglob("*partial*")) + list(tmp_path.rglob("__7_0.distcp"))


def _save_where_each_rank_says(folder: str) -> list[str]:
    trainer = make_trainer(
        {"stage": 3, "checkpoint": "sharded-async"},
        max_steps=3,
        callbacks=[moves._SaveAt(3, f"{folder}/loss={0.5 + int(os.environ['RANK'])}.ckpt")],
    )
    trainer.fit(moves.Features(), moves.loader("mid-epoch", 2))
    return sorted(os.listdir(folder))


def test_where_ranks_name_different_folders_rank_0s_is_everybodys(ranks2, tmp_path: Path) -> None:
    """A metric in the file name that was not synchronised."""
    ranks2(_save_where_each_rank_says, str(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["loss=0.5.ckpt"]
    state = lightning_zero.load_checkpoint(str(tmp_path / "loss=0.5.ckpt"))
    assert state["global_step"] == 3
    assert all(torch.isfinite(value.clone()).all() for value in state["state_dict"].values())


def _batch_norm(form: str, path: str) -> None:
    class Norm(moves.Features):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Sequential(nn.Linear(5, 2000), nn.BatchNorm1d(2000))  # statistics above SMALL_BYTES

        def training_step(self, batch: Any, index: int) -> Tensor:
            return self.loss(batch) + self.wide(batch[0]).square().mean()

    torch.manual_seed(1)
    trainer = make_trainer({"stage": 3, "checkpoint": form}, max_steps=3, callbacks=[moves._SaveAt(3, path)])
    trainer.fit(Norm(), moves.loader("mid-epoch", 2))


def test_buffers_in_a_folder_are_rank_0s_as_in_a_file(ranks2, tmp_path: Path) -> None:
    """Each rank has seen other samples; DDP, and one file, keep rank 0's statistics."""
    paths = {form: str(tmp_path / f"{form}.ckpt") for form in ("file", "sharded")}
    for form, path in paths.items():
        ranks2(_batch_norm, form, path)
    file_, folder = (lightning_zero.load_checkpoint(path)["state_dict"] for path in paths.values())
    assert all(torch.equal(folder[name].clone(), value) for name, value in file_.items())


def test_a_file_never_replaces_a_folder_nor_the_other_way(ranks2, tmp_path: Path) -> None:
    file, folder = tmp_path / "file.ckpt", tmp_path / "folder.ckpt"
    file.write_bytes(b"")
    folder.mkdir()
    for text in ranks2(_said, _save, "file", str(folder)):
        assert "is a folder" in text
    for text in ranks2(_said, _save, "sharded", str(file)):
        assert "is a file" in text
    assert file.is_file()
    assert not list(folder.iterdir())


# ---------------------------------------------------------------------------------------------------------------------
# ModelCheckpoint, remote paths, plugins
# ---------------------------------------------------------------------------------------------------------------------


def _model_checkpoint(form: str, folder: str) -> tuple[list[str], str, list[float]]:
    callback = ModelCheckpoint(
        dirpath=folder, filename="{step}", every_n_train_steps=2, save_top_k=2, monitor="step", mode="max",
        save_last="link",
    )  # fmt: skip
    moves.run(
        "zero3", form, "features", "epoch end", 9, callbacks=[callback, moves._StopAt(9)], enable_checkpointing=True
    )
    again = moves.run(
        "zero2", form, "features", "epoch end", 11, resume="last", callbacks=[callback, moves._StopAt(11)],
        enable_checkpointing=True,
    )  # fmt: skip
    return sorted(os.listdir(folder)), callback.best_model_path, again.losses


def test_model_checkpoint_keeps_links_and_deletes(ranks2, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for names, best, losses in ranks2(_model_checkpoint, "sharded-async", str(folder)):
        assert names == ["last.ckpt", "step=10.ckpt", "step=8.ckpt"]
        assert best == str(folder / "step=10.ckpt")
        assert len(losses) == 3  # from step 8 to step 11
    assert (folder / "last.ckpt").is_symlink()
    assert (folder / "step=10.ckpt").is_dir()


def _remote() -> tuple[list[float], list[float]]:
    path = "memory://bucket/runs/x.ckpt"
    straight = moves.run("zero3", "file", "features", "mid-epoch", 14, 10, path)
    resumed = moves.run("zero3", "file", "features", "mid-epoch", 14, None, None, path)
    return straight.losses[10:], resumed.losses


def test_an_fsspec_url_serves_as_path(ranks1) -> None:
    """``memory://`` lives in one process."""
    ((straight, resumed),) = ranks1(_remote)
    assert len(resumed) == 4
    assert resumed == straight


def _sharded_at_url() -> None:
    callback = ModelCheckpoint(dirpath="memory://bucket/runs", save_last=True)
    moves.run("zero3", "sharded", "features", "epoch end", 2, callbacks=[callback], enable_checkpointing=True)


def test_a_folder_at_an_url_is_refused_before_training(ranks2) -> None:
    for kind, text in ranks2(outcome, _sharded_at_url):
        assert kind == "CheckpointError"
        assert "memory://bucket/runs is not local" in text
        assert "checkpoint='file'" in text


class Counting(TorchCheckpointIO):
    """A user's own way of storing files."""

    saved = 0
    loaded = 0

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.saved += 1
        assert storage_options is None or storage_options == {"tier": "cold"}
        super().save_checkpoint(checkpoint, path)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        self.loaded += 1
        return super().load_checkpoint(path, *args, **kwargs)


def _plugin(path: str) -> tuple[int, int, list[float]]:
    plugin = Counting()
    torch.manual_seed(1)
    module = moves.Features()
    trainer = make_trainer({"stage": 3, "min_unit_numel": 1}, max_steps=2, plugins=[plugin])
    trainer.fit(module, moves.loader("epoch end", 2))
    trainer.save_checkpoint(path, storage_options={"tier": "cold"})
    resumed = moves.run("zero3", "file", "features", "epoch end", 4, None, None, path, plugins=[plugin])
    return plugin.saved, plugin.loaded, resumed.losses


def test_a_checkpoint_io_plugin_is_honoured(ranks2, tmp_path: Path) -> None:
    results = ranks2(_plugin, str(tmp_path / "x.ckpt"))
    assert [r[:2] for r in results] == [(1, 1), (0, 1)]
    assert [len(r[2]) for r in results] == [2, 2]


def _synced(path: str, form: str) -> set[str]:
    """Files and folders that this rank has had the system write to the disk, by their names from the folder of ``path``
    on."""
    fsync, found = os.fsync, set()

    def noting(descriptor: int) -> None:
        found.add(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), os.path.dirname(path)))
        fsync(descriptor)

    os.fsync = noting
    try:
        settings = {"stage": 3, "min_unit_numel": 1, "checkpoint": form}
        trainer = make_trainer(settings, max_steps=1)
        trainer.fit(moves.Features(), moves.loader("epoch end", 1))
        trainer.save_checkpoint(path)
        trainer.strategy.teardown()  # waits for what is under way
    finally:
        os.fsync = fsync
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize("form", ["file", "sharded-async"])
def test_every_save_ends_on_the_disk(form: str, ranks2, tmp_path: Path) -> None:
    """Or a power failure could leave a name without content."""
    first, second = ranks2(_synced, str(tmp_path / "x.ckpt"), form)
    assert (tmp_path / "x.ckpt").exists()
    assert "." in first  # the rename
    if form == "file":
        assert any(".x.ckpt." in name for name in first)
        return
    for rank, found in enumerate((first, second)):
        assert any(Path(name).name.startswith(f"__{rank}_") for name in found), found


def _plugin_with_shards() -> None:
    moves.run("zero3", "sharded", "features", "epoch end", 4, plugins=[Counting()])


def test_a_plugin_with_shards_is_refused(ranks2) -> None:
    for kind, text in ranks2(outcome, _plugin_with_shards):
        assert kind == "ValueError"
        assert "checkpoint='sharded' with a CheckpointIO plugin (Counting)" in text


# ---------------------------------------------------------------------------------------------------------------------
# Whole state for callbacks
# ---------------------------------------------------------------------------------------------------------------------


def _callback_reads() -> bool:
    right = []

    class Reads(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *unused: Any) -> None:
            state = trainer.strategy.lightning_module_state_dict()
            right.append(all(torch.equal(state[k], v.cpu()) for k, v in module.state_dict().items()))
            out = copy.deepcopy(module).blocks[0](torch.ones(2, moves.WIDTH))  # an exporter runs the module
            right.append(bool(out.isfinite().all()))

    run = moves.run("zero3", "file", "features", "epoch end", 4, callbacks=[Reads(), moves._StopAt(4)])
    return len(right) == 8 and all(right) and len(run.losses) == 4


def test_callbacks_read_whole_state_on_every_rank(ranks2) -> None:
    assert ranks2(_callback_reads) == [True, True]


def _different_calls() -> str:
    class Confused(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *unused: Any) -> None:
            if trainer.is_global_zero:
                trainer.strategy.lightning_module_state_dict()
            else:
                trainer.save_checkpoint("/nonexistent/x.ckpt")

    with pytest.raises(RuntimeError) as error:
        make_trainer({"stage": 2}, max_steps=4, callbacks=[Confused()]).fit(
            moves.Features(), moves.loader("epoch end", 2)
        )
    return str(error.value)


def test_different_collective_calls_raise_on_every_rank(ranks2) -> None:
    for said in ranks2(_different_calls):
        assert "rank 0: strategy.lightning_module_state_dict(); rank 1: trainer.save_checkpoint()" in said
