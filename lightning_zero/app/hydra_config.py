"""Connects Hydra to the library: typed schemas on the way in, plain objects on the way out.

The schemas are derived from existing dataclasses and signatures, so that settings are listed once: from ``ZeroConfig``
for ``strategy=zero*``, from ``lightning.Trainer.__init__`` for ``trainer=*``. Importing ``lightning_zero.conf``
registers them; Hydra does so for ``pkg://lightning_zero.conf``, in this project's command and in any other app. The
functions ``make_*`` return plain objects; no ``DictConfig`` gets past them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import time
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException, InstantiationException
from hydra.utils import instantiate
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, LearningRateMonitor, ProgressBar
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from lightning_zero.config import PlanConfig, ZeroConfig, closest
from lightning_zero.launch.launcher import LaunchedDDP
from lightning_zero.launch.slurm import SlurmJob, run_stamp
from lightning_zero.private.lightning import start_method
from lightning_zero.strategy import ZeroStrategy

_GROUPS_OF_THEIR_OWN = ("strategy", "callbacks")
"""Arguments of the Trainer that have Hydra groups of their own."""
_GROUPS_IN_STRATEGY = tuple(f"strategy.{name}" for name in ("offload", "compile", "activation_checkpointing"))
"""Settings of the strategy that are groups."""
_PRIMITIVE = {int, float, bool, str, type(None)}


class ConfigError(CompactHydraException, ValueError):
    """A setting is invalid. The message is complete, so ``hydra.main`` prints it without a traceback."""


# -- schemas ---------------------------------------------------------------------------------------------------------


def plain_type(hint: Any) -> Any:
    """The type that OmegaConf checks: plain types and their unions, the schema of a dataclass, and ``Any`` for all
    others, such as ``Literal`` or a union with a ``Logger``, whose values the receiver checks."""
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if sections := [each for each in members if isinstance(each, type) and dataclasses.is_dataclass(each)]:
        return schema_of(sections[0])
    return Union[tuple(members)] if _PRIMITIVE.issuperset(members) else Any  # noqa: UP007  (built at run time)


@functools.cache
def schema_of(config: type, target: str | None = None) -> type:
    """Makes an unfrozen dataclass with the fields and defaults of ``config``, and with types that OmegaConf supports.

    Args:
        config: A dataclass whose fields all have defaults.
        target: Path of the callable for Hydra's ``instantiate``.
    """
    hints = get_type_hints(config)
    made = [(f.name, _or_none(plain_type(hints[f.name]), f), _default(f)) for f in dataclasses.fields(config)]
    return _make_schema(config.__name__, made, target)


def _or_none(hint: Any, f: dataclasses.Field[Any]) -> Any:
    """Allows ``None`` for a field whose default is ``None``, whatever its declared type."""
    return Union[hint, None] if f.default is None and hint is not Any else hint  # noqa: UP007


def _default(f: dataclasses.Field[Any]) -> Any:
    value = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.field(default_factory=schema_of(type(value)))
    if isinstance(value, (tuple, list)):
        return dataclasses.field(default_factory=lambda: list(value))
    return value


def _make_schema(name: str, made: list[tuple[str, Any, Any]], target: str | None) -> type:
    if target is not None:
        made = [("_target_", str, target), *made]
    return dataclasses.make_dataclass(name, made)


def trainer_schema() -> type:
    """A schema with all arguments of ``lightning.Trainer`` except those with groups, typed as far as OmegaConf can."""
    hints = get_type_hints(Trainer.__init__)
    parameters = list(inspect.signature(Trainer.__init__).parameters.values())[1:]
    made = [(p.name, plain_type(hints[p.name]), p.default) for p in parameters if p.name not in _GROUPS_OF_THEIR_OWN]
    return _make_schema("Trainer", made, "lightning.pytorch.Trainer")


@dataclasses.dataclass
class LightningStrategy:
    """One of Lightning's own strategies, by its registered name."""

    _target_: str = "lightning_zero.app.hydra_config.make_strategy"
    name: str = "ddp"


@dataclasses.dataclass
class Launcher:
    """The group ``launcher``: how processes are started."""

    name: str = "local"


@dataclasses.dataclass
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
    tags: list[str] = dataclasses.field(default_factory=list)
    optimized_metric: str | None = None
    profile: bool = False
    plan: Any = dataclasses.field(default_factory=lambda: schema_of(PlanConfig))


def zero_schema() -> type:
    """The schema of ``ZeroConfig``, built by :func:`make_strategy`."""
    return schema_of(ZeroConfig, target="lightning_zero.app.hydra_config.make_strategy")


def register_configs() -> None:
    """Registers the schemas with Hydra; idempotent."""
    store = ConfigStore.instance()
    schemas = {
        "job": Job,
        "zero": zero_schema(),
        "lightning_strategy": LightningStrategy,
        "trainer": trainer_schema(),
        "launcher": Launcher,
        "slurm": dataclasses.make_dataclass("Slurm", [], bases=(schema_of(SlurmJob), Launcher)),
    }
    OmegaConf.register_new_resolver("run_stamp", run_stamp, replace=True)
    for name, schema in schemas.items():
        store.store(name=f"_{name}_schema", node=schema, provider="lightning_zero")


# -- the way out -----------------------------------------------------------------------------------------------------


@contextmanager
def _as_config_error(prefix: str = "") -> Iterator[None]:
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
    settings = to_plain(settings)
    settings.pop("_target_", None)
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
    values = to_plain(settings)
    values.pop("_target_", None)
    with _as_config_error("strategy: "):
        return ZeroConfig.from_kwargs(**values)


def make_plan_config(cfg: DictConfig) -> PlanConfig:
    """A validated :class:`PlanConfig` from the node ``plan``."""
    with _as_config_error():
        return PlanConfig(**to_plain(cfg.get("plan") or {}))


def make_trainer(cfg: DictConfig, **more: Any) -> Trainer:
    """The Trainer of the groups ``trainer``, ``strategy``, ``callbacks`` and ``logger`` of ``cfg``.

    Args:
        cfg: Any config with the node ``trainer`` and optionally ``strategy``, ``callbacks`` and ``logger``. The last
            two map names to ``_target_`` nodes. With an empty ``logger``, ``trainer.logger`` counts.
        more: Values for arguments of the Trainer that the config leaves at ``None``.
    """
    given = to_plain(cfg.trainer) or {}
    arguments = {key: _instantiate(value, f"trainer.{key}") for key, value in given.items() if key != "_target_"}
    for key, value in more.items():
        if arguments.get(key) is None:
            arguments[key] = value
    if cfg.get("strategy") is not None:
        strategy = to_plain(cfg.strategy)
        ours = strategy.get("_target_", "").startswith("lightning_zero.")
        arguments["strategy"] = make_strategy(**strategy) if ours else _instantiate(strategy, "strategy")
    if cfg.get("callbacks"):
        arguments["callbacks"] = _all_of(cfg, "callbacks")
    if "logger" in cfg and arguments.get("logger") is None:
        arguments["logger"] = _all_of(cfg, "logger") or False
    arguments["callbacks"] = _without_switched_off(arguments)
    if HydraConfig.initialized():
        arguments["callbacks"] = [*(arguments.get("callbacks") or []), RunRecord()]
    with _as_config_error("trainer: "):  # MisconfigurationException is neither: see cli
        return Trainer(**arguments)


class RunRecord(Callback):
    """Writes the final metrics, the steps and the seconds of a fit into ``result.json`` in the folder of its Hydra job.

    The metrics are the Trainer's ``callback_metrics``, so no logger is needed.
    """

    def __init__(self) -> None:
        self._folder = Path(HydraConfig.get().runtime.output_dir)  # read it now: a spawned rank has no HydraConfig
        self._since = 0.0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._since = time.perf_counter()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        record = {
            "seconds": time.perf_counter() - self._since,
            "steps": trainer.global_step,
            "ranks": trainer.world_size,
            "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        }
        (self._folder / "result.json").write_text(json.dumps(record, indent=1), encoding="utf-8")


def _without_switched_off(arguments: Mapping[str, Any]) -> list[Callback] | None:
    """Drops callbacks that a switch of ``trainer`` turns off, and logs their names. Lightning refuses, for example, a
    progress bar with ``enable_progress_bar=false``."""
    callbacks: list[Callback] | None = arguments.get("callbacks")
    switches: dict[str, type[Callback]] = {
        "enable_progress_bar": ProgressBar,
        "enable_checkpointing": Checkpoint,
        "logger": LearningRateMonitor,
    }
    off = {name: kind for name, kind in switches.items() if arguments.get(name) is False}
    for name, kind in off.items():
        if left_out := [type(each).__name__ for each in callbacks or [] if isinstance(each, kind)]:
            rank_zero_info(f"trainer.{name}=false: dropped {', '.join(left_out)} from callbacks.")
    return callbacks and [each for each in callbacks if not isinstance(each, tuple(off.values()))]


def _all_of(cfg: DictConfig, group: str) -> list[Any]:
    """Builds the objects of a group that maps names to ``_target_`` nodes."""
    nodes = to_plain(cfg[group]) or {}
    return [_instantiate(node, f"{group}.{name}") for name, node in nodes.items() if node is not None]


def make_object(cfg: DictConfig, group: str) -> Any:
    """Builds the object of a group with one ``_target_`` node (``model``, ``data``); ``None`` if the group is empty."""
    node = cfg.get(group)
    if node is None:
        return None
    if OmegaConf.is_missing(node, "_target_") or "_target_" not in node:
        raise ConfigError(
            f"{group}._target_ is not set: give the class to build, such as {group}._target_=my_module.MyClass"
        )
    return _instantiate(to_plain(node), group)


def check_launcher(cfg: DictConfig, name: str) -> None:
    """Raises ``ConfigError`` if the command needs another launcher than ``cfg.launcher``."""
    found = to_plain(cfg.launcher).get("name")
    if found not in ("local", "slurm"):
        raise ConfigError(f"launcher.name={found!r}: use 'local' or 'slurm'.")
    if name == "local" and found == "slurm":
        raise ConfigError("launcher=slurm: use the command submit, or remove it under srun.")
    if name == "slurm" and found == "local":
        raise ConfigError("launcher=local does not start a batch job: use submit launcher=slurm launcher.nodes=...")


def make_slurm_job(cfg: DictConfig) -> SlurmJob:
    """The validated settings of the group ``launcher=slurm``."""
    check_launcher(cfg, "slurm")
    settings = {key: value for key, value in to_plain(cfg.launcher).items() if key != "name"}
    with _as_config_error():
        return SlurmJob(**settings)


def meant(error: BaseException) -> str:
    """Returns the repair if ``error`` says that an override names an unknown key, or gives a group a value; else ""."""
    cause: Any = error.__cause__
    path = getattr(cause, "full_key", None) or ""
    where, _, key = path.rpartition(".")
    if path in _GROUPS_IN_STRATEGY:
        return f"{path} is a group of settings: use {path.replace('.', '/')}=CHOICE, or set {path}.NAME=VALUE."
    if not isinstance(cause, (ConfigAttributeError, ConfigKeyError)):
        return ""
    if where == "trainer" and key in _GROUPS_OF_THEIR_OWN:
        return f"{key} is a group of its own: use {key}=CHOICE."
    parent: Any = cause.parent_node
    sections = [] if where else [name for name in ("trainer", "strategy") if key in (parent.get(name) or ())]
    return f"Write {sections[0]}.{key}." if sections else closest(key, list(parent)).strip()


def to_plain(node: Any) -> Any:
    """Converts ``node`` to plain dicts, lists and values, with interpolations resolved."""
    if OmegaConf.is_config(node):
        try:
            return OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            raise ConfigError(str(error)) from error
    if isinstance(node, Mapping):
        return {key: to_plain(value) for key, value in node.items()}
    return node


def _instantiate(node: Any, where: str) -> Any:
    if isinstance(node, list):
        return [_instantiate(item, where) for item in node]
    if not (isinstance(node, dict) and "_target_" in node):
        return node
    try:
        return instantiate(node, _convert_="all")
    except InstantiationException as error:
        # A class that is not found or called wrongly is an error in the config: one message. Any other error inside a
        # constructor keeps its traceback.
        inside = error.__cause__
        if inside is not None and not isinstance(inside, (ImportError, TypeError, ValueError)):
            raise
        # Hydra's own text does not say why a target cannot be imported.
        raise ConfigError(f"{where}: {inside if isinstance(inside, ImportError) else error}") from inside
