"""A run of ``fsdp2`` apart from its engine: where ``configure_model`` builds, and the disk of ``offload="nvme"``."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_zero.comm.agree import Agreement
from lightning_zero.engines.base import Engine
from lightning_zero.engines.optimizer_step import fusible_groups
from lightning_zero.engines.precision import DtypePolicy
from lightning_zero.engines.run import EngineRun

TENSORS_IN_FILES = 3
"""Number of tensors of a parameter's size in files, with Adam: the parameter and two states."""


class Fsdp2Run(EngineRun):
    """See :class:`~lightning_zero.engines.run.EngineRun`."""

    def loads_on_host(self, device: torch.device) -> bool:
        config = self.config
        fits_on_device = config.stage < 3 and config.offload.target == "none" and not config.auto
        return device.type != "cpu" and not fits_on_device

    def make_engine(self, device: torch.device, dtypes: DtypePolicy) -> Engine:
        from lightning_zero.engines.fsdp2.engine import Fsdp2Engine  # imported with the first run, not with the package

        return Fsdp2Engine(self.config, device, dtypes)

    def prepare(self, engine: Engine, module: nn.Module, trainer: Any, agreement: Agreement) -> None:
        """Choose the folder for ``offload="nvme"`` and check its disk space (collective).

        Raises:
            ValueError: On other systems than Linux."""
        if self.config.offload.target != "nvme":
            return
        if not sys.platform.startswith("linux"):
            raise ValueError(f"offload='nvme' on {sys.platform}: only Linux is supported; use offload='cpu' or 'none'.")
        ranks = dist.get_world_size()
        size = self.config.shard_size or ranks
        assert size != "auto", "the strategy has put a number in its place"
        here = min(trainer.strategy.num_processes, ranks)
        need = TENSORS_IN_FILES * here / size * sum(p.numel() * p.element_size() for p in module.parameters())
        given = self.config.offload.path
        engine.offload_path = os.path.join(trainer.default_root_dir, "offload") if given is None else given
        with agreement.raise_if_any_failed():
            if trainer.local_rank == 0:
                _require_room(engine.offload_path, given is None, need)
        if trainer.local_rank == 0:
            print(
                f"offload: about {need / 2**30:.3g} GiB go to unnamed files in {engine.offload_path}, which are deleted"
                " when the run or its processes end.",
                flush=True,
            )

    def note_on_optimizers(self, optimizers: Collection[Optimizer]) -> str:
        names = sorted({type(o).__name__ for o in optimizers if fusible_groups(o)})
        if self.config.offload.target == "none" or not names:
            return ""
        return (
            f"offload={self.config.offload.target!r}: {', '.join(names)} steps in host memory with PyTorch's fused"
            " kernel, because neither fused nor foreach was set."
        )


def _require_room(folder: str, is_default: bool, need_bytes: float) -> None:
    """Raises ``ValueError`` if no file can be created in ``folder``, or its disk has less than ``need_bytes`` free."""
    name, host = f"offload.path={folder!r}" + (" (the default)" if is_default else ""), socket.gethostname()
    try:
        if is_default:
            os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"0")
    except OSError as error:
        raise ValueError(
            f"{name} cannot be used on {host} ({error.strerror}): create the folder, mount the disk, change its"
            " permissions, or set another path."
        ) from error
    free = shutil.disk_usage(folder).free
    if free < need_bytes:
        raise ValueError(
            f"{name} has {free / 2**30:.3g} GiB free on {host}, but this run writes about {need_bytes / 2**30:.3g} GiB"
            " there: free some space, set another path, or use offload='cpu'."
        )
