"""Refuses keys of a config file that DeepSpeed does not know.

DeepSpeed ignores them at the top level: with ``{"zero_optimizaton": {"stage": 2}}`` it would train at another stage.
In sections that it reads with its own models, DeepSpeed refuses them when the engine starts. The rest has no effect in
a run of this engine.
"""

from __future__ import annotations

from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any

from lightning_zero.config import RawConfig

_TOP = "the top level"
_MADE_HERE = {"type": "", "params": ""}
"""Keys of ``optimizer`` and ``scheduler``; for ``params`` see ``file_optimizer``."""


def check_keys(raw: RawConfig) -> None:
    """Raises ``ValueError`` if ``raw`` has a key that DeepSpeed does not know; the message suggests the nearest key.

    A top-level name that begins with ``_`` or ``//`` is a comment. The check is skipped if DeepSpeed is not installed,
    as on a login node that submits a job: the job's ranks check again.
    """
    if find_spec("deepspeed") is None:
        return
    from lightning_zero.engines.deepspeed.private import known_settings  # imports torch

    known = {**known_settings(), "optimizer": _MADE_HERE, "scheduler": _MADE_HERE}
    content = {key: value for key, value in raw.content().items() if not key.startswith(("_", "//"))}
    sections: list[tuple[str, Any]] = [("", content)]
    for path, section in sections:  # which grows
        for key, value in section.items():
            full = f"{path}.{key}" if path else key
            if key not in known[path]:
                repair = _repair(path, key, known)
                raise ValueError(f"{full} in {raw.origin} is not a setting of DeepSpeed; {repair}")
            if replacement := known[path][key]:
                raise ValueError(f"{full} in {raw.origin} is deprecated: use {replacement}.")
            if full in known and isinstance(value, dict):
                sections.append((full, value))


def _repair(path: str, key: str, known: dict[str, dict[str, str]]) -> str:
    if close := get_close_matches(key, known[path], n=1, cutoff=0.75):
        return f"did you mean {close[0]}?"
    if home := [section or _TOP for section, keys in known.items() if key in keys]:
        return f"it belongs in {home[0]}."
    return f"{path or _TOP} has {', '.join(sorted(known[path]))}."
