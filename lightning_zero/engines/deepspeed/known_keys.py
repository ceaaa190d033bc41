"""Refuses keys of a config file that DeepSpeed does not know.

DeepSpeed itself refuses unknown keys in some sections, when the engine starts, and ignores them everywhere else: with
``{"zero_optimizaton": {"stage": 2}}`` DeepSpeed would train at another stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any

from lightning_zero.config import RawConfig
from lightning_zero.engines.deepspeed.ds_config import INERT


def check_keys(raw: RawConfig) -> None:
    """Raises ``ValueError`` if ``raw`` has a key that DeepSpeed does not know; the message suggests the nearest key.

    A top-level name that begins with ``_`` or ``//`` is a comment. The check is skipped if DeepSpeed is not installed,
    as on a login node that submits a job: the job's ranks check again.
    """
    if find_spec("deepspeed") is None:
        return
    content = {key: value for key, value in raw.content().items() if not key.startswith(("_", "//"))}
    _check_section(content, [], raw.origin)


def _check_section(content: Mapping[str, Any], path: list[str], origin: str) -> None:
    known = _known(path)
    for key, value in content.items():
        full = ".".join([*path, key])
        if known and key not in known:
            raise ValueError(f"{full} in {origin} is not a setting of DeepSpeed; {_repair(path, key, known)}")
        if replacement := known.get(key):
            raise ValueError(f"{full} in {origin} is deprecated: use {replacement}.")
        if isinstance(value, Mapping):
            _check_section(value, [*path, key], origin)


def _known(path: list[str]) -> Mapping[str, str]:
    """Returns the known keys of the section at ``path``, in the form of :func:`.private.known_settings`."""
    if path in (["optimizer"], ["scheduler"]):
        return {"type": "", "params": ""}
    if path and path[0] in (*INERT, "optimizer", "scheduler"):  # parameters: see file_optimizer
        return {}
    from lightning_zero.engines.deepspeed.private import known_settings  # imports torch

    return known_settings(path)


def _repair(path: list[str], key: str, known: Mapping[str, str]) -> str:
    if close := get_close_matches(key, known, n=1, cutoff=0.75):
        return f"did you mean {close[0]}?"
    for home in ([], ["zero_optimization"]):
        if key in _known(home):
            return f"it belongs in {'.'.join(home) or 'the top level'}."
    return f"{'.'.join(path) or 'the top level'} has {', '.join(sorted(known))}."
