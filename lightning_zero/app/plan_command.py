"""``lightning-zero plan``: makes a plan from the Hydra groups of a run.

It does not start the run: it builds the module on the meta device and uses no Trainer. So a laptop can plan for 64
GPUs.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from hydra.errors import InstantiationException
from omegaconf import DictConfig

from lightning_zero.app.hydra_config import ConfigError, as_config_error, make_object, make_zero_config, to_plain
from lightning_zero.config import PlanConfig, ZeroConfig
from lightning_zero.host import available_host_bytes
from lightning_zero.planner import GIB, Plan, device_memory_bytes, first_batch, plan


def run_plan(cfg: DictConfig) -> Plan:
    """Makes the plan of the run that ``cfg`` describes, and shows it in the forms that ``cfg.plan`` sets."""
    with as_config_error():
        config = PlanConfig(**to_plain(cfg.plan))
    trainer = to_plain(cfg.trainer) or {}
    device = _device(trainer)
    devices = num_devices(trainer.get("devices"), device)
    module = _on_meta(cfg)
    if module is None:
        raise ConfigError("model is empty: set it, such as model=gpt or model=custom model._target_=my_module.MyClass")
    try:
        made = plan(
            module,
            _batch(cfg, config),
            world_size=devices * int(trainer.get("num_nodes") or 1),
            ranks_per_host=devices,
            precision=trainer.get("precision") or "32-true",
            device=device,
            device_memory_gib=_device_memory_gib(config, device, devices),
            host_memory_gib=config.host_memory_gib or available_host_bytes() / GIB,
            headroom=config.headroom,
            micro_batches=int(trainer.get("accumulate_grad_batches") or 1),
            max_steps=max(int(trainer.get("max_steps") or 0), 0) or 1000,
            config=_zero_config(cfg),
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    text = json.dumps(dataclasses.asdict(made), indent=2)
    if config.json not in (None, "-"):
        Path(config.json).write_text(text, encoding="utf-8")
    print(text if config.json == "-" else made, flush=True)
    return made


def num_devices(value: Any, device: str) -> int:
    """Number of processes per node for a value of ``Trainer(devices=...)``."""
    if isinstance(value, (list, tuple)):
        return len(value)
    text = str(value)
    if text in ("auto", "-1", "None"):
        return max(torch.cuda.device_count(), 1) if device == "cuda" else 1
    if text.isdigit() and int(text):
        return int(text)
    raise ConfigError(f"trainer.devices={value!r}: use a number of devices, a list of them or 'auto'.")


def _device(trainer: Mapping[str, Any]) -> str:
    name = str(trainer.get("accelerator") or "auto")
    if name in ("gpu", "cuda"):
        return "cuda"
    return "cuda" if name == "auto" and torch.cuda.is_available() else "cpu"


def _device_memory_gib(config: PlanConfig, device: str, devices: int) -> float:
    if config.device_memory_gib is not None:
        return config.device_memory_gib
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "plan.device_memory_gib=null: this machine has no GPU to query, so set the memory of one, such as"
            " plan.device_memory_gib=80."
        )
    return device_memory_bytes(torch.device(device), devices) / GIB


def _on_meta(cfg: DictConfig) -> Any:
    """Builds the module on the meta device, or in memory if that fails: its constructor may need values."""
    try:
        with torch.device("meta"):
            return make_object(cfg, "model")
    except InstantiationException as error:
        if not isinstance(error.__cause__, (NotImplementedError, RuntimeError)):
            raise
        return make_object(cfg, "model")


def _zero_config(cfg: DictConfig) -> ZeroConfig:
    """The config of a strategy of ours, validated, so that a plan refuses the same settings as a run; the default
    config for DDP. The planner reads units and agreements from it, and counts as for ``fully_shard`` on both
    engines."""
    strategy = to_plain(cfg.get("strategy")) or {}
    return make_zero_config(strategy) if "min_unit_numel" in strategy else ZeroConfig()  # ddp


def _batch(cfg: DictConfig, config: PlanConfig) -> Any:
    if config.batch is None:
        return _batch_of_data(cfg)
    dtype = getattr(torch, config.batch_dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"plan.batch_dtype={config.batch_dtype!r}: use a torch dtype such as int64 or float32.")

    def tensor(shape: Any) -> torch.Tensor:
        if not (isinstance(shape, (list, tuple)) and shape and all(isinstance(n, int) and n > 0 for n in shape)):
            raise ConfigError(f"plan.batch={config.batch!r}: use a shape such as [8,129], or shapes by name.")
        return torch.empty(shape, dtype=dtype, device="meta")

    if isinstance(config.batch, Mapping):
        return {name: tensor(shape) for name, shape in config.batch.items()}
    if config.batch and isinstance(config.batch[0], (list, tuple)):
        return tuple(map(tensor, config.batch))
    return tensor(config.batch)


def _batch_of_data(cfg: DictConfig) -> Any:
    data = make_object(cfg, "data")
    if data is None:
        return None
    data.prepare_data()
    data.setup("fit")
    return first_batch(data.train_dataloader())
