"""A run leaves the process as it found it, also one that fails: filters, the user's objects, DDP's own reducer."""

from __future__ import annotations

import gc
import os
import signal
import warnings
import weakref
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from torch import nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from lightning_zero.launch.supervisor import PREEMPTED_EXIT_CODE
from tests.helpers import zoo
from tests.helpers.ranks import outcome


class Module(zoo.Zoo):
    """``look``, if there is one, is called in each step."""

    def __init__(self, fails_at: int = 99) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.fails_at = fails_at
        self.seen: list[Any] = []

    def build(self) -> None:
        self.net = nn.Linear(zoo.WIDTH, zoo.WIDTH)  # type: ignore[assignment]

    def look(self) -> Any:
        return None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(self.look())
        if batch_idx == self.fails_at:
            raise LookupError("not well")
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        self.made = torch.optim.AdamW(self.parameters(), lr=0.1)
        return self.made


def _data() -> DataLoader[Any]:
    return DataLoader(zoo.RandomDataset(16), batch_size=2)


def _trainer(strategy: Any, **more: Any) -> L.Trainer:
    return zoo.make_trainer(strategy, **{"max_epochs": 1, **more})


# -- collectives that are queued on a device -------------------------------------------------------------------------


class _Device(ZeroStrategy):
    """As on a GPU, where collectives wait in a queue."""

    queues_collectives = True


class _Parts(Module):
    def look(self) -> Any:
        if self.global_rank == 1 and len(self.seen) == 1:
            raise ValueError("elsewhere")


def _in_a_group_at_teardown() -> tuple[str, list[bool], str]:
    trainer, seen = _trainer(_Device(stage=3)), []
    trainer.strategy.accelerator.teardown = lambda: seen.append(dist.is_initialized())  # frees the device's memory
    kind, _ = outcome(trainer.fit, _Parts(fails_at=1), _data())
    return kind, seen, outcome(trainer.fit, Module(), _data())[1]


def test_ranks_that_part_leave_their_group_before_memory_is_freed(ranks2: Any) -> None:
    """To free it waits for all that is queued: for ever, if another rank never joins."""
    for (kind, seen, then), expected in zip(
        ranks2(_in_a_group_at_teardown), ("LookupError", "ValueError"), strict=True
    ):
        assert kind == expected
        assert seen
        assert not any(seen)
        assert "this script cannot start another run" in then


# -- SLURM -----------------------------------------------------------------------------------------------------------


def _one_task(folder: str) -> None:
    job = {"JOB_ID": "7", "JOB_NAME": "train", "STEP_ID": "0", "NTASKS": "1", "NTASKS_PER_NODE": "1"}
    task = {"PROCID": "0", "LOCALID": "0", "NODEID": "0"}
    os.environ.update({f"SLURM_{name}": value for name, value in {**job, **task}.items()})
    os.environ.pop("TORCHELASTIC_RUN_ID", None)  # as if torchrun had not started this process
    scontrol = Path(folder) / "scontrol"
    scontrol.write_text('#!/bin/sh\necho "$@" > "$0.said"\n')
    scontrol.chmod(0o755)
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    os.chdir(folder)


class _SignalledInSetup(L.Callback):
    """The step sync is there, and has not yet taken over the signal."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)


def _signalled_in_setup(folder: str) -> tuple[Any, int, str]:
    _one_task(folder)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    trainer = _trainer({}, plugins=[SLURMEnvironment()], callbacks=[_SignalledInSetup()], default_root_dir=folder)
    try:
        trainer.fit(Module(), _data())
        code: Any = None
    except SystemExit as end:
        code = end.code
    said = Path(folder) / "scontrol.said"
    return code, trainer.global_step, said.read_text().strip() if said.exists() else ""


def test_a_signal_during_set_up_is_not_lost(ranks1: Any, tmp_path: Path) -> None:
    assert ranks1(_signalled_in_setup, str(tmp_path)) == [(PREEMPTED_EXIT_CODE, 1, "requeue 7")]


# -- objects of the user ---------------------------------------------------------------------------------------------


def _trained_by_another(settings: Any) -> tuple[list[float], ...]:
    def fit(module: Module) -> None:
        _trainer(settings).fit(module, _data())

    first = Module(fails_at=3)
    assert outcome(fit, first)[0] == "LookupError"
    momentum = first.made.state[first.net.weight]["exp_avg"].flatten().tolist()
    second = Module()
    second.net = first.net  # sharded: the run that had it ended early
    del first
    gc.collect()
    fit(second)
    return second.net.weight.flatten().tolist(), second.net.bias.tolist(), momentum


@pytest.mark.parametrize(("engine", "stage"), [("fsdp2", 1), ("deepspeed", 2), ("deepspeed", 3)])
def test_layers_of_a_failed_run_go_on_in_another_module(ranks1: Any, engine: str, stage: int) -> None:
    """Of one rank: several begin no other run."""
    wanted = ranks1(_trained_by_another, "ddp")
    found = ranks1(_trained_by_another, {"stage": stage, "engine": engine})
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)  # order of summation


def _kept(settings: dict[str, Any], fails_at: int) -> list[str]:
    """Parts of a run that live on when nobody holds it any more."""
    module, trainer = Module(fails_at=fails_at), _trainer(settings)
    # Where one rank has raised, another may miss it in a message first.
    assert (outcome(trainer.fit, module, _data())[0] == "ok") == (fails_at == 99)
    held = {"module": weakref.ref(module), "trainer": weakref.ref(trainer), "strategy": weakref.ref(trainer.strategy)}
    del module, trainer
    gc.collect()
    return [name for name, reference in held.items() if reference() is not None]


@pytest.mark.parametrize(
    ("engine", "stage", "fails_at", "num_ranks"),
    [("fsdp2", 3, 3, 2), ("deepspeed", 3, 3, 1), ("deepspeed", 3, 99, 2), ("deepspeed", 2, 99, 2)],
)
def test_a_run_that_nobody_holds_is_gone(ranks: Any, engine: str, stage: int, fails_at: int, num_ranks: int) -> None:
    """By itself DeepSpeed's stage 3 keeps the module, and with it the Trainer, for as long as the process lives."""
    settings = {"stage": stage, "engine": engine}
    assert ranks(_kept, settings, fails_at, world_size=num_ranks) == [[]] * num_ranks


def _held(strategy: Any) -> int:
    """Bytes of tensors while the Trainer of a run that has ended is kept; gradients of the last step left out."""
    module, trainer = Module(), _trainer(strategy)
    module.net = nn.Sequential(nn.Linear(zoo.WIDTH, 512), nn.Linear(512, 512))  # type: ignore[assignment]
    trainer.fit(module, _data())
    module.zero_grad()
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated objects that are asked for their class
        tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    with torch._C.DisableTorchFunctionSubclass():  # a state that is touched becomes full
        storages = [getattr(t, "_local_tensor", t).untyped_storage() for t in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def test_the_trainer_keeps_no_more_than_ddps(ranks2: Any) -> None:
    """On an accelerator what is left of the run stays in its memory: shards, gradients."""
    for ours, ddps in zip(ranks2(_held, {"stage": 3, "transport": "torch"}), ranks2(_held, "ddp"), strict=True):
        assert ours < 1.02 * ddps
