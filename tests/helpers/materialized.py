"""One rank of a run whose other ranks are not there builds a Llama that no process here could hold.

    python -m tests.helpers.materialized '{"world_size": 8, "sizes": {...}, "room_gib": 14}'

prints ``{"parameters": ..., "largest": ..., "peak": ..., "kept": ...}``: bytes of the module and of its largest unit,
and those beyond the process's imports, at most and after sharding. Messages reach nobody and bring nothing; memory is
what it would be.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_zero.config import ZeroConfig
from lightning_zero.engines.fsdp2.run import Fsdp2Run
from lightning_zero.engines.precision import DtypePolicy
from lightning_zero.host import return_freed_memory
from tests.helpers.lifetime import forget_peak, resident

SEVEN_BILLION = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 128256,
}
TINY = {**SEVEN_BILLION, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 8}


class Llama(L.LightningModule):
    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        self.sizes = sizes

    def configure_model(self) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **self.sizes))

    def training_step(self, batch: Any, index: int) -> Any:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def materialized(world_size: int, sizes: dict[str, int], room_gib: float) -> dict[str, float]:
    return_freed_memory()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    _build(Llama(TINY))  # imports are there
    gc.collect()
    before = resident("VmRSS")
    space = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (space + int(room_gib * 2**30),) * 2)
    forget_peak()
    module = Llama(sizes)
    engine = _build(module)  # holds the shards
    peak, kept = resident("VmHWM") - before, resident("VmRSS") - before
    largest = module.model.lm_head.weight.numel()
    num_parameters = sum(p.numel() for p in module.parameters())
    del engine
    return {"parameters": 4 * num_parameters, "largest": 4 * largest, "peak": peak, "kept": kept}


def _build(module: Llama) -> Any:
    """What a run does up to its first step, but for the optimizer."""
    # torch's own collectives, and nothing to agree upon: what is not there can't be asked
    run = Fsdp2Run(ZeroConfig(stage=3, transport="torch", find_unused_parameters=False))
    module.configure_model()
    engine = run.make_engine(torch.device("cpu"), DtypePolicy())
    engine.shard(module)
    return engine


if __name__ == "__main__":
    print(json.dumps(materialized(**json.loads(sys.argv[1]))))
