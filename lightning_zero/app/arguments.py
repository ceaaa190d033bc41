"""Finds mistakes on a command line before anything heavy is imported: within half a second.

Hydra finds the rest once it has composed the config, for which it needs the Trainer's signature, so PyTorch and
Lightning. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from difflib import get_close_matches
from itertools import zip_longest
from pathlib import Path

from lightning_zero.config import ZeroConfig
from lightning_zero.registry import NAMES

GROUPS = Path(__file__).resolve().parents[1] / "conf"
"""The folder of the groups."""
_FLAGS = {
    # flag of Hydra's -> whether the next argument is its value
    **dict.fromkeys(("--help", "-h", "--hydra-help", "--version", "--run", "-r", "--multirun", "-m"), False),
    **dict.fromkeys(("--resolve", "--shell-completion", "-sc", "--info", "-i"), False),
    **dict.fromkeys(("--cfg", "-c", "--package", "-p", "--experimental-rerun"), True),
    **dict.fromkeys(("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"), True),
}
_OTHER_GROUPS = ("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd")
"""Flags that bring in choices which only Hydra can know."""
_NOT_OF_THE_TRAINER = {"seed": "seed", "ckpt_path": "ckpt_path", "checkpoint": "ckpt_path", "resume": "ckpt_path"}


def mistake(arguments: Sequence[str], own_flags: Sequence[str] = ()) -> str | None:
    """The message about a mistake in ``arguments`` (those after the command's word); ``None`` if there is none.

    Args:
        arguments: Hydra's overrides and flags.
        own_flags: Flags that the command takes itself.
    """
    for flag, value in _flags(arguments):
        if flag not in _FLAGS and flag not in own_flags:
            return _hydra_form(flag, value)
    plain = [item for item in arguments if not item.startswith("-")]
    foreign = any(flag in _OTHER_GROUPS for flag, _ in _flags(arguments))
    if foreign or any(item.lstrip("+").startswith("hydra.searchpath") for item in plain):
        return None
    return next((text for text in map(_unknown_choice, plain) if text), None)


def _flags(arguments: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Every flag with its value, or with the next word, which may be its value."""
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
    """The replacement for a flag that Hydra does not have."""
    name = flag.lstrip("-").replace("-", "_")
    shown = flag if value is None else f"{flag}={value}"
    if name in ("config", "config_file", "cfg_file", "conf"):
        path = Path(value or "FOLDER/NAME.yaml")
        return (
            f"{shown}: a config is found by its name in a folder: write --config-dir {path.parent} --config-name"
            f" {path.stem}; a file of overrides belongs into FOLDER/experiment/NAME.yaml: write --config-dir FOLDER"
            " experiment=NAME."
        )
    if close := get_close_matches(flag, _FLAGS, n=1, cutoff=0.8):
        return f"{shown}: did you mean {close[0]}?"
    return f"{shown}: settings are written without dashes: write {_setting(name)}={value or 'VALUE'}."


def _setting(name: str) -> str:
    """The key that an option of that name most likely means; the Trainer's where none of ours has the name."""
    if (GROUPS / name).is_dir() or "." in name:
        return name
    if name in _NOT_OF_THE_TRAINER:
        return _NOT_OF_THE_TRAINER[name]
    if name in ("offload", "engine", "compile"):
        return f"strategy/{name}"
    return f"strategy.{name}" if name in {f.name for f in fields(ZeroConfig)} else f"trainer.{name}"


def _unknown_choice(override: str) -> str | None:
    """The message about a ``group=choice`` that the group does not have."""
    match = re.fullmatch(r"\+{0,2}([a-z_/]+)=\[?([\w,\- /]*)\]?", override)
    if not match or not (GROUPS / match[1]).is_dir():
        return None
    group = match[1]
    known = sorted({path.stem for path in (GROUPS / group).glob("*.yaml")} | set(NAMES if group == "strategy" else ()))
    for choice in match[2].split(","):
        choice = choice.strip()
        if choice and choice != "null" and "/" not in choice and choice not in known:
            close = get_close_matches(choice, known, n=1)
            meant = f" did you mean {group}={close[0]}?" if close else ""
            return f"{group}={choice}: there is no such choice.{meant} {group} is one of {', '.join(known)}."
    return None
