"""Finds mistakes on a command line within half a second, before heavy imports.

Hydra finds the remaining mistakes when it composes the config, which needs PyTorch and Lightning. This module uses the
standard library only.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from difflib import get_close_matches
from itertools import zip_longest
from pathlib import Path

from lightning_zero.config import PlanConfig, ZeroConfig
from lightning_zero.registry import NAMES

GROUPS = Path(__file__).resolve().parents[1] / "conf"
"""Folder of the Hydra groups."""
_FLAGS = {
    # Hydra's flag -> whether the next argument is its value
    **dict.fromkeys(("--help", "-h", "--hydra-help", "--version", "--run", "-r", "--multirun", "-m"), False),
    **dict.fromkeys(("--resolve", "--shell-completion", "-sc", "--info", "-i"), False),
    **dict.fromkeys(("--cfg", "-c", "--package", "-p", "--experimental-rerun"), True),
    **dict.fromkeys(("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"), True),
}
_OTHER_GROUPS = ("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd")
"""Flags that add choices which only Hydra knows."""
_TOP_LEVEL = {"seed": "seed", "ckpt_path": "ckpt_path", "checkpoint": "ckpt_path", "resume": "ckpt_path"}


def mistake(arguments: Sequence[str], own_flags: Sequence[str] = ()) -> str | None:
    """Returns a message about the first mistake in ``arguments``, which follow the command; ``None`` if there is none.

    Args:
        arguments: Overrides and flags of Hydra.
        own_flags: Flags that the command itself takes.
    """
    for flag, value in _flags(arguments):
        if flag not in _FLAGS and flag not in own_flags:
            return _hydra_form(flag, value)
    plain = [item for item in arguments if not item.startswith("-")]
    foreign = any(flag in _OTHER_GROUPS for flag, _ in _flags(arguments))
    if foreign or any(item.lstrip("+").startswith("hydra.searchpath") for item in plain):
        return None
    checks = (_unknown_choice, unknown_setting, _unknown_key)
    return next((text for item in plain for check in checks if (text := check(item))), None)


def help_page() -> str:
    """The page of ``fit --help``: Hydra's template without the config, which takes seconds to compose."""
    import yaml  # only here, for speed

    config = yaml.safe_load((GROUPS / "config.yaml").read_text(encoding="utf-8"))
    page, _, _ = config["hydra"]["help"]["template"].partition("The config as these overrides make it")
    groups = "".join(f"{group}: {', '.join(choices(group))}\n" for group in _groups())
    return f"{page.replace('$APP_CONFIG_GROUPS', groups).rstrip()}\n"


def _groups() -> list[str]:
    folders = {path.parent.relative_to(GROUPS).as_posix() for path in GROUPS.rglob("*.yaml")} - {"."}
    return sorted(folder for folder in folders if not folder.startswith("hydra"))


def choices(group: str) -> list[str]:
    """The sorted choices of one of this package's groups."""
    found = {path.stem for path in (GROUPS / group).glob("*.yaml")}
    return sorted(found | set(NAMES if group == "strategy" else ()))


def _flags(arguments: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yields every flag with its value, or with the next word, which may be its value."""
    skip = False
    for item, following in zip_longest(arguments, arguments[1:], fillvalue="-"):
        if skip:
            skip = False
            continue
        if not re.match(r"--?[a-zA-Z]", item):
            continue
        flag, separator, value = item.partition("=")
        skip = not separator and _FLAGS.get(flag, False)
        yield flag, value if separator else None if following.startswith("-") or "=" in following else following


def _hydra_form(flag: str, value: str | None) -> str:
    """The message about a flag that Hydra does not have, with its replacement."""
    name = flag.lstrip("-").replace("-", "_")
    shown = flag if value is None else f"{flag}={value}"
    if name in ("config", "config_file", "cfg_file", "conf"):
        path = Path(value or "FOLDER/NAME.yaml")
        return (
            f"{shown}: name a config by its folder and its name: write --config-dir {path.parent} --config-name"
            f" {path.stem}; for a file of overrides, FOLDER/experiment/NAME.yaml, write --config-dir FOLDER"
            " experiment=NAME."
        )
    if close := get_close_matches(flag, _FLAGS, n=1, cutoff=0.8):
        return f"{shown}: did you mean {close[0]}?"
    return f"{shown}: settings are written without dashes: write {_setting(name)}={value or 'VALUE'}."


def _setting(name: str) -> str:
    """The key that an option of this name most likely means; one of the Trainer's if none of ours has the name."""
    if (GROUPS / name).is_dir() or "." in name:
        return name
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    if name in ("offload", "engine", "compile"):
        return f"strategy/{name}"
    return f"strategy.{name}" if name in {f.name for f in fields(ZeroConfig)} else f"trainer.{name}"


def _unknown_choice(override: str) -> str | None:
    """The message about a ``group=choice`` that the group does not have."""
    match = re.fullmatch(r"\+{0,2}([a-z_/]+)=\[?([\w,\- /]*)\]?", override)
    if not match or not (GROUPS / match[1]).is_dir():
        return None
    group = match[1]
    known = choices(group)
    for choice in match[2].split(","):
        choice = choice.strip()
        if choice and choice != "null" and "/" not in choice and choice not in known:
            close = get_close_matches(choice, known, n=1)
            meant = f" did you mean {group}={close[0]}?" if close else ""
            return f"{group}={choice}: this choice does not exist.{meant} {group} is one of {', '.join(known)}."
    return None


def unknown_setting(override: str) -> str | None:
    """The repair for an override that misnames a setting inside a group; ``None`` if it is right, or not known to be
    wrong."""
    match = re.fullmatch(r"(?:\+{0,2}|~)(strategy|trainer|plan)\.(\w+)(?:=(.*))?", override)
    if not match:
        return None
    where, name, value = match.groups()
    if where == "strategy" and (GROUPS / where / name).is_dir() and name != "engine":
        if value is not None and value.startswith("{"):  # a mapping of settings, which Hydra merges
            return None
        if value is not None and value.startswith("["):
            return f"strategy.{name} is a group of settings: set each one by name, strategy.{name}.NAME=VALUE."
        return f"strategy.{name} is a group of settings: use strategy/{name}={value}."
    if where == "trainer" and name in ("strategy", "callbacks"):
        return f"{name} is a group of its own: use {name}={value}."
    known = {
        "strategy": (*(f.name for f in fields(ZeroConfig)), "name"),  # one of Lightning's strategies, by name
        "trainer": trainer_settings(),
        "plan": tuple(f.name for f in fields(PlanConfig)),
    }[where]
    if not known or name in (*known, "_target_"):
        return None
    close = get_close_matches(name, known, n=1)
    repair = f"did you mean {where}.{close[0]}?" if close else f"known: {', '.join(known)}."
    return f"{where}.{name} is not a setting; {repair}"


def trainer_settings() -> tuple[str, ...]:
    """The arguments of Lightning's Trainer; empty before Lightning is imported, which takes seconds."""
    trainer = getattr(sys.modules.get("lightning.pytorch"), "Trainer", None)
    return () if trainer is None else tuple(inspect.signature(trainer).parameters)


def _unknown_key(override: str) -> str | None:
    """The message about an override whose first name is neither a group nor a setting of ``config.yaml``."""
    match = re.fullmatch(r"\+{0,2}(\w+)(\W.*)?", override, flags=re.DOTALL)
    text = (GROUPS / "config.yaml").read_text(encoding="utf-8")
    known = {"hydra", *re.findall(r"^(\w+):", text, flags=re.MULTILINE)} - {"defaults"}
    known |= {path.name for path in GROUPS.iterdir() if path.is_dir() and not path.name.startswith("_")}
    if not match or "=" not in override or match[1] in known:  # without, it is the value of a flag
        return None
    name, rest = match.groups()
    setting = _setting(name)
    close = get_close_matches(name, sorted(known), n=1)
    if close and (setting == name or setting.startswith("trainer.")):
        meant = f"did you mean {close[0]}{rest}?"
    else:
        meant = f"write {setting}{rest}."
    return f"{name} is neither a group nor a setting; {meant}"
