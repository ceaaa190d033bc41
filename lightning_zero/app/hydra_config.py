"""Connects Hydra to the library: the known settings on the way in, plain objects on the way out.

The keys and defaults come from ``ZeroConfig`` for ``strategy=zero*`` and from ``lightning.Trainer`` for ``trainer=*``,
so that settings are listed once. Hydra refuses overrides of other keys; the class that receives a value checks it.
Importing ``lightning_zero.conf`` registers them; Hydra does so for ``pkg://lightning_zero.conf``, in this project's
command and in any other app. The functions ``make_*`` return plain objects; no ``DictConfig`` gets past them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.errors import CompactHydraException
from hydra.utils import instantiate
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from lightning_zero.config import ZeroConfig, closest
from lightning_zero.launch.launcher import LaunchedDDP
from lightning_zero.launch.slurm import SlurmJob, run_stamp
from lightning_zero.private.lightning import start_method
from lightning_zero.strategy import ZeroStrategy

_TRAINER = {name: p.default for name, p in inspect.signature(Trainer).parameters.items()}
"""Argument of the Trainer -> its default."""
_GROUPS_OF_THEIR_OWN = ("strategy", "callbacks")
"""Arguments of the Trainer that have Hydra groups of their own."""


class ConfigError(CompactHydraException, ValueError):
    """A setting is invalid. The message is complete, so ``hydra.main`` prints it without a traceback."""


# -- the known settings ----------------------------------------------------------------------------------------------


@dataclass
class Job:
    """The top level of this project's own ``config.yaml``."""

    seed: int | None = None
    ckpt_path: str | None = None
    model: Any = None
    data: Any = None
    strategy: Any = None
    trainer: Any = None
    callbacks: Any = None
    logger: Any = None
    launcher: Any = None
    task_name: str = "lightning_zero"
    tags: list[str] = field(default_factory=list)
    optimized_metric: str | None = None
    profile: bool = False
    plan: Any = None


def register_configs() -> None:
    """Registers the known settings with Hydra; idempotent."""
    OmegaConf.register_new_resolver("run_stamp", run_stamp, replace=True)
    trainer = {name: default for name, default in _TRAINER.items() if name not in _GROUPS_OF_THEIR_OWN}
    nodes = {
        "job": Job,
        "zero": {"_target_": "lightning_zero.app.hydra_config.make_strategy", **asdict(ZeroConfig())},
        "trainer": {"_target_": "lightning.pytorch.Trainer", **trainer},
        "slurm": asdict(SlurmJob()),
    }
    for name, node in nodes.items():
        ConfigStore.instance().store(name=f"_{name}_schema", node=node, provider="lightning_zero")


# -- the way out -----------------------------------------------------------------------------------------------------


@contextmanager
def as_config_error(prefix: str = "") -> Iterator[None]:
    """Raises a wrong setting as :class:`ConfigError`, which is printed without a traceback."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{prefix}{error}") from error


def make_strategy(**settings: Any) -> DDPStrategy | str:
    """A value for ``Trainer(strategy=...)``, from the ``strategy`` group (also through Hydra's ``instantiate``).

    Raises:
        ConfigError: If a setting is invalid; names the setting, its value and the repair.
    """
    if "stage" not in settings:
        return _lightning_strategy(str(settings.get("name", "ddp")))
    return ZeroStrategy.from_config(make_zero_config(settings))


def _lightning_strategy(name: str) -> DDPStrategy | str:
    """Lightning's strategy of this name, but DDP with our launcher if it starts processes by popen."""
    known = StrategyRegistry.get(name, None) if name in StrategyRegistry.available_strategies() else None
    if type(known) is not DDPStrategy or start_method(known) != "popen":
        return name
    return LaunchedDDP(**StrategyRegistry[name]["init_params"])


def make_zero_config(settings: Mapping[str, Any] | DictConfig) -> ZeroConfig:
    """A validated :class:`ZeroConfig` from the ``strategy`` group."""
    values = {str(name): to_plain(value) for name, value in settings.items() if name != "_target_"}
    with as_config_error("strategy: "):
        return ZeroConfig.from_kwargs(**values)


def make_trainer(cfg: DictConfig, **more: Any) -> Trainer:
    """The Trainer of the groups ``trainer``, ``strategy``, ``callbacks`` and ``logger`` of ``cfg``.

    Args:
        cfg: Any config with the node ``trainer`` and optionally ``strategy``, ``callbacks`` and ``logger``. The last
            two map names to ``_target_`` nodes. With an empty ``logger``, ``trainer.logger`` counts.
        more: Values for arguments of the Trainer that the config leaves at ``None``.
    """
    given = to_plain(cfg.trainer)
    given.pop("_target_", None)
    for name, value in given.items():
        if name not in _TRAINER:
            raise ConfigError(f"trainer.{name}={value!r}: not an argument of the Trainer.{closest(name, [*_TRAINER])}")
    arguments = {**_build(given), **{name: value for name, value in more.items() if given.get(name) is None}}
    if cfg.get("strategy") is not None:
        strategy = to_plain(cfg.strategy)
        ours = strategy.get("_target_", "").startswith("lightning_zero.")
        arguments["strategy"] = make_strategy(**strategy) if ours else _build(strategy)
    if cfg.get("callbacks"):
        arguments["callbacks"] = _all_of(cfg.callbacks)
    if "logger" in cfg and arguments.get("logger") is None:
        arguments["logger"] = _all_of(cfg.logger) or False
    with as_config_error("trainer: "):  # MisconfigurationException is neither: see cli
        return Trainer(**arguments)


def make_object(cfg: DictConfig, group: str) -> Any:
    """Builds the object of a group with one ``_target_`` node (``model``, ``data``); ``None`` if the group is empty."""
    node = cfg.get(group)
    if node is None:
        return None
    if OmegaConf.is_missing(node, "_target_") or "_target_" not in node:
        raise ConfigError(
            f"{group}._target_ is not set: give the class to build, such as {group}._target_=my_module.MyClass"
        )
    return _build(to_plain(node))


def _all_of(group: DictConfig | None) -> list[Any]:
    """Builds the objects of a group that maps names to ``_target_`` nodes."""
    return [each for each in _build(to_plain(group) or {}).values() if each is not None]


def _build(node: Any) -> Any:
    """Replaces each dict with a ``_target_``, at any depth, by the object that it describes."""
    return instantiate(node, _convert_="all")


def make_slurm_job(cfg: DictConfig) -> SlurmJob:
    """The validated settings of the group ``launcher=slurm``."""
    check_launcher(cfg, "slurm")
    settings = {key: value for key, value in to_plain(cfg.launcher).items() if key != "name"}
    with as_config_error():
        return SlurmJob(**settings)


def check_launcher(cfg: DictConfig, name: str) -> None:
    """Raises ``ConfigError`` if the command needs another launcher than ``cfg.launcher``."""
    if (found := cfg.launcher.name) != name:
        uses = "submit launcher=slurm launcher.nodes=...; all other commands use launcher=local, also under srun"
        raise ConfigError(f"launcher.name={found!r}: use {uses}.")


def explain(error: BaseException) -> str:
    """Returns the message of one of Hydra's errors and, if an override names an unknown key, the one that was meant."""
    said, cause = str(error), error.__cause__
    if cause is not None and str(cause) not in said:
        said = f"{said}\n{cause}"
    lines = [line for line in said.splitlines() if not line.strip().startswith(("object_type", "reference_type"))]
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)):
        # Hydra's advice to append a key with + does not work for a mistyped setting
        lines = [*(line for line in lines if not line.startswith("To append to your config use")), _meant(cause)]
    return "\n".join(lines)


def _meant(cause: Any) -> str:
    where, _, key = (cause.full_key or "").rpartition(".")
    if where == "trainer" and key in _GROUPS_OF_THEIR_OWN:
        return f"{key} is a group of its own: use {key}=CHOICE."
    parent: Any = cause.parent_node
    sections = [] if where else [name for name in ("trainer", "strategy") if key in (parent.get(name) or ())]
    return f"Write {sections[0]}.{key}." if sections else closest(key, list(parent)).strip()


def to_plain(node: Any) -> Any:
    """Converts ``node`` to plain dicts, lists and values, with interpolations resolved."""
    if not OmegaConf.is_config(node):
        return node
    try:
        return OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error)) from error
