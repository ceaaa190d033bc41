"""Tests use what a user or a neighbouring room can see. ``ALLOWED`` lists the private names of ours that have no other
way, each with its reason: a use that is not listed fails, and so does an entry that nobody needs any more.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.ranks import ROOT

TESTS = sorted(path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__))
REFUSED_MEMORY = "what a kernel, a container or another host refuses, on a machine that refuses nothing"
NO_COMPILER = "a build that hangs or fails at once: a real one takes minutes"
NO_CUDA = "what only CUDA or NCCL does, on a machine without"
OTHER_HOST = "a process of another host or container, on one machine"

STATE = "a state of the run that ends within it"

ALLOWED: dict[str, dict[str, str]] = {
    "distributed/test_deepspeed_ops.py": {
        "_BUILD": NO_COMPILER,
        "_build_in_child": NO_COMPILER,
        "_is_on_network": OTHER_HOST,
    },
    "distributed/test_deepspeed_settings.py": {"_engine": "DeepSpeed's own engine says which states it has put where"},
    "distributed/test_direct.py": {
        "_CALL_BYTES": "the kernel's limit of 2 GiB for one call",
        "_CALL_PIECES": "the kernel's limit for one call",
    },
    "distributed/test_peer_memory.py": {
        "_connect": REFUSED_MEMORY,
        "_host": REFUSED_MEMORY,
        "_let_read": REFUSED_MEMORY,
        "_read_memory": REFUSED_MEMORY,
        "_MEETING_SECONDS": REFUSED_MEMORY,
    },
    "helpers/peer_memory.py": {
        "_host": REFUSED_MEMORY,
        "_libc": "asks the kernel as the package does",
        "_PR_SET_PTRACER": "asks the kernel as the package does",
    },
    "helpers/saving.py": {"_saving": "the end of a save in the background, whose memory is measured"},
    "integration/test_doctor.py": {"_READER": REFUSED_MEMORY, "_RANK": "a child that ends by chance"},
    "unit/test_host_shards.py": {"_sharded": NO_CUDA},
    "unit/test_planner.py": {"_equal_units": "the same plan without its shortcut"},
    "unit/test_strategy.py": {
        "_take_over": "its caller, setup_environment, starts a process group",
        "_agreement": NO_CUDA,
        "_place_scale": NO_CUDA,
        "_after_run": NO_CUDA,
        "_failed": STATE,
        "_end_engine": STATE,
    },
}
LIGHTNINGS = (
    "_thread",
    "_parameters",
    "_trainer",
    "_lightning_module",
    "_configure_launcher",
    "_get_process_group_backend",
    "_local_tensor",
)
"""Names of Lightning and torch that ours override or set."""
ENDINGS = ("_deepspeed", "_offload", "_launcher")
"""Of public names, written as strings."""


@cache
def ours() -> frozenset[str]:
    """Every private function, class, attribute and constant that the package makes."""
    names = set()
    for path in (ROOT / "lightning_zero").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and not _of_others(path, node):
                names.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return frozenset(name for name in names if _is_private(name)) - {*LIGHTNINGS}


def _of_others(path: Path, node: ast.Attribute) -> bool:
    """Set on another library's object, by the file that holds its private names."""
    holds = path.stem == "private" or path.parent.stem == "private"
    return holds and ast.unparse(node.value) != "self"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("_")


def uses(code: str) -> Iterator[tuple[int, str]]:
    """``(line, name)`` of each private name of ours: read, imported, or named to something that replaces it."""
    tree = ast.parse(code)
    foreign = _foreign(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ours():
            if not (isinstance(node.value, ast.Name) and node.value.id in foreign):
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning_zero"):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in ours())
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in ours() - {*ENDINGS}:
            yield node.lineno, node.value


def _foreign(tree: ast.AST) -> set[str]:
    """Names in front of a dot that are not ours: a test's own objects, and modules of anybody else."""
    names = {"self", "cls"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("lightning_zero"):
            names.update(alias.asname or alias.name for alias in node.names)
    return names


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT / "tests")))
def test_private_names_are_used_where_there_is_no_other_way(path: Path) -> None:
    name = str(path.relative_to(ROOT / "tests"))
    allowed, found = ALLOWED.get(name, {}), list(uses(path.read_text(encoding="utf-8")))
    assert [(line, used) for line, used in found if used not in allowed] == []
    assert set(allowed) - {used for _, used in found} == set(), "no longer used: remove it from ALLOWED"


def test_every_file_that_is_listed_exists() -> None:
    assert {str(path.relative_to(ROOT / "tests")) for path in TESTS} >= set(ALLOWED)


def test_a_use_is_seen_in_every_spelling() -> None:
    name = min(ours() - {*ENDINGS})
    for code in (
        f"x.{name}",
        f"from lightning_zero.config import {name}",
        f"mock.patch.object(x, {name!r})",
        f"monkeypatch.setattr(x, {name!r}, 1)",
    ):
        assert [used for _, used in uses(code)] == [name], code
    assert list(uses(f"import torch\ntorch.{name}, self.{name}")) == []
