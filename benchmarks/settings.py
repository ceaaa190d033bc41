"""Prints docs/settings.md, which it makes from the dataclasses and the Hydra groups: ``make settings``."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_zero import config
from lightning_zero.launch.slurm import SlurmJob
from lightning_zero.registry import NAMES

CONF = Path(config.__file__).parent / "conf"

PAGES = (
    # dataclass, heading, how to write a setting
    (
        config.ZeroConfig,
        "The strategy",
        "`strategy.NAME=VALUE` on the command line, a keyword of `ZeroStrategy(...)` in Python.",
    ),
    (
        config.OffloadConfig,
        "Offload",
        "`strategy/offload=cpu` (a group) and `strategy.offload.NAME=VALUE`; the fields of `OffloadConfig`, which"
        " `ZeroStrategy(offload=...)` takes. [offload.md](offload.md) explains them.",
    ),
    (
        config.CompileConfig,
        "Compiled units",
        "`strategy/compile=units` (a group) and `strategy.compile.NAME=VALUE`; the fields of `CompileConfig`, which"
        " `ZeroStrategy(compile=...)` takes. [compile.md](compile.md) explains them.",
    ),
    (
        config.ActivationCheckpointingConfig,
        "Recomputed activations",
        "`strategy/activation_checkpointing=full|selective` (a group) and"
        " `strategy.activation_checkpointing.NAME=VALUE`; the fields of `ActivationCheckpointingConfig`, which"
        " `ZeroStrategy(activation_checkpointing=...)` takes besides a word or a list of modules."
        " [compile.md](compile.md#recomputed-activations) explains them.",
    ),
    (config.PlanConfig, "The plan", "`plan.NAME=VALUE` of `lightning-zero plan`."),
    (SlurmJob, "SLURM", "`launcher.NAME=VALUE` of `lightning-zero submit launcher=slurm`."),
)

HEAD = """\
# Settings

<!-- Made by `make settings` from the dataclasses; do not edit. -->

An invalid value is an error before the first step, which names the setting, the value and the repair.
`trainer.NAME=VALUE` sets any argument of `lightning.Trainer`, whose own error a wrong value gets.
`lightning-zero fit --cfg job` prints all settings with your overrides applied.
"""


def page() -> str:
    """The complete page."""
    parts = [HEAD, names(), groups()]
    for cls, heading, how in PAGES:
        rows = [(f"`{f.name}`", shown_default(f), meaning) for f, meaning in documented(cls)]
        parts.append(f"## {heading}\n\n{how}\n\n{table(('setting', 'default', 'meaning'), rows)}")
    return "\n".join(parts)


def names() -> str:
    """The registered names and their settings."""
    rows = [(f"`{name}`", ", ".join(f"`{k}={v!r}`" for k, v in values.items())) for name, values in NAMES.items()]
    return (
        "## Names\n\nFor `Trainer(strategy=NAME)` and `strategy=NAME`, besides Lightning's own, such as `ddp`.\n\n"
        + table(("name", "stands for"), rows)
    )


def groups() -> str:
    """All groups of the command with their choices and the first comment of each file."""
    rows = []
    for folder in sorted(path for path in CONF.rglob("*") if path.is_dir() and path.name != "__pycache__"):
        group = str(folder.relative_to(CONF))
        for file in sorted(folder.glob("*.yaml")):
            rows.append((f"`{group}={file.stem}`", about(file)))
    return (
        "## Groups\n\nWrite `group=choice` on the command line, or `callbacks=[default,early_stopping]` for several"
        " callbacks or loggers. `--config-dir DIR` adds your own choices.\n\n" + table(("choice", "what it is"), rows)
    )


def about(file: Path) -> str:
    """The comment at the top of a group's file, or that of its first commented key."""
    lines = file.read_text(encoding="utf-8").splitlines()
    comments = [line[1:].strip() for line in lines if line.startswith("#") and "@package" not in line]
    if comments:
        return " ".join(comments)
    inline = [line.split(" # ", 1)[1] for line in lines if " # " in line]
    return inline[0] if inline else ""


def documented(cls: type) -> list[tuple[dataclasses.Field[Any], str]]:
    """All fields, each with the docstring below it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    body = tree.body[0].body  # type: ignore[attr-defined]
    found = {}
    for node, following in pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = following.value if isinstance(following, ast.Expr) else None
            said = isinstance(text, ast.Constant) and isinstance(text.value, str)
            found[node.target.id] = markdown(text.value) if said else ""  # type: ignore[union-attr]
    return [(f, found[f.name]) for f in dataclasses.fields(cls)]


def markdown(text: str) -> str:
    """A docstring in one line of Markdown."""
    text = " ".join(text.split())
    text = re.sub(r":\w+:`[~.]?([^`]+)`", r"`\1`", text)
    return text.replace("``", "`")


def shown_default(f: dataclasses.Field[Any]) -> str:
    """The default as a user would write it."""
    if f.default is not dataclasses.MISSING:
        return f"`{f.default!r}`"
    made = f.default_factory()  # type: ignore[misc]
    return "see below" if dataclasses.is_dataclass(made) else f"`{made!r}`"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
