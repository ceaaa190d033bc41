"""The floors of ``docs/architecture.md``: a module imports from lower floors, or from its own without a circle."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "lightning_zero"
ROOT = Path(__file__).resolve().parents[2] / PACKAGE

FLOORS = {
    "config": 0,
    "guard": 0,
    "continuation": 1,
    "slurm": 1,
    "scaling": 1,
    "memory": 1,
    "neighbours": 1,
    "checkpoint.layout": 1,
    "checkpoint.lazy": 1,
    "precision": 1,
    "units": 1,
    "engines": 2,  # the package's own __init__
    "engines.base": 2,
    "engines.view": 2,
    "collectives": 2,
    "exchange": 2,
    "model_state": 2,
    "optim": 2,
    "tracing": 2,
    "traffic": 2,
    "engines.fsdp2": 3,
    "engines.fsdp2_private": 3,
    "engines.deepspeed": 3,
    "engines.deepspeed_activations": 3,
    "engines.deepspeed_build": 3,
    "engines.deepspeed_checkpoint": 3,
    "engines.deepspeed_config": 3,
    "engines.deepspeed_ops": 3,
    "engines.deepspeed_folder": 3,
    "engines.deepspeed_optim": 3,
    "engines.deepspeed_optimizer": 3,
    "engines.deepspeed_private": 3,
    "engines.deepspeed_state": 3,
    "engines.deepspeed_view": 3,
    "checkpoint": 3,
    "environment": 4,
    "hydra_job": 4,
    "launcher": 4,
    "resume": 4,
    "watch": 4,
    "deepspeed_run": 4,
    "strategy": 4,
    "auto": 5,
    "plan_command": 5,
    "registry": 5,
    "hydra_config": 5,
    "callbacks": 5,
    "planner": 5,
    "sweep": 5,
    "doctor": 5,
    "cli": 5,
    "zoo": 5,
    "__main__": 5,
    "": 5,
}
"""Module or package (then everything in it that is not listed itself) -> floor."""

LIGHTNING = ("lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "torchmetrics")
HYDRA = ("hydra", "omegaconf")


def _files(root: Path = ROOT) -> dict[str, Path]:
    """Module name without the package (``""`` is the package itself) -> file."""
    files = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root).with_suffix("")
        if relative.parts[0] == "conf":
            continue
        parts = relative.parts[:-1] if relative.name == "__init__" else relative.parts
        files[".".join(parts)] = path
    return files


FILES = _files()


def _floor(module: str) -> int | None:
    """The longest listed prefix decides; a top-level module has to be listed itself."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in FLOORS:
            # engines/ has no floor of its own for modules that nobody has placed
            if parts[:length] == ["engines"] and length < len(parts):
                return None
            return FLOORS[".".join(parts[:length])]
    return FLOORS[""] if module == "" else None


def _imports(tree: ast.Module, module: str, is_package: bool) -> Iterator[tuple[str, int, bool]]:
    """``(absolute dotted name, line, inside a function)`` of every import, wherever it stands."""

    def walk(node: ast.AST, in_function: bool) -> Iterator[tuple[str, int, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, child.lineno, in_function) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    here = [PACKAGE, *filter(None, module.split("."))]
                    here = here[: len(here) - child.level + (1 if is_package else 0)]
                    base = ".".join([*here, *filter(None, [base])])
                yield base, child.lineno, in_function
                yield from ((f"{base}.{alias.name}", child.lineno, in_function) for alias in child.names)
            elif isinstance(child, ast.Call) and getattr(child.func, "id", getattr(child.func, "attr", "")) in (
                "import_module",
                "__import__",
            ):
                if child.args and isinstance(child.args[0], ast.Constant):
                    yield str(child.args[0].value), child.lineno, in_function
                yield from walk(child, in_function)
            else:
                function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from walk(child, in_function or function)

    return walk(tree, False)


def _imports_of(module: str) -> list[tuple[str, int, bool]]:
    path = FILES[module]
    return list(_imports(ast.parse(path.read_text(encoding="utf-8")), module, path.name == "__init__.py"))


def _own(name: str) -> str | None:
    """The module of ours that ``name`` (a module, or something in one) refers to."""
    if name != PACKAGE and not name.startswith(f"{PACKAGE}."):
        return None
    inner = name[len(PACKAGE) + 1 :]
    if inner in FILES:
        return inner
    parent = inner.rpartition(".")[0]
    return parent if parent in FILES else None


def _is(name: str, packages: tuple[str, ...]) -> bool:
    return name.split(".")[0] in packages


@pytest.mark.parametrize("module", FILES)
def test_every_module_has_a_floor(module: str) -> None:
    assert _floor(module) is not None, f"{PACKAGE}/{module}: give it a floor in FLOORS and in docs/architecture.md"
    docstring = ast.get_docstring(ast.parse(FILES[module].read_text(encoding="utf-8"))) or ""
    said = re.search(r"\bFloor (\d)\b", docstring)
    assert said is None or int(said.group(1)) == _floor(module), f"{module} says floor {said and said.group(1)}"


@pytest.mark.parametrize("module", FILES)
def test_imports_go_down(module: str) -> None:
    for name, line, _ in _imports_of(module):
        target = _own(name)
        if target in (None, "", module):  # the package's lazy attributes are nobody's import
            continue
        here, there = _floor(module), _floor(target)
        assert here is not None
        assert there is None or there <= here, f"{module}:{line}: floor {here} imports {target} of floor {there}"


def test_no_circles() -> None:
    edges = {
        module: {
            target
            for name, _, in_function in _imports_of(module)
            if not in_function and (target := _own(name)) not in (None, "", module)
        }
        for module in FILES
    }
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, "circle: " + " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for target in edges[module]:
                # a package's __init__ that imports its own modules is not a circle
                if target and not module.startswith(f"{target}."):
                    visit(target, (*path, module))
            done.add(module)

    for module in FILES:
        visit(module, ())


@pytest.mark.parametrize("module", FILES)
def test_outside_packages_stay_on_their_floors(module: str) -> None:
    floor = _floor(module)
    assert floor is not None
    for name, line, in_function in _imports_of(module):
        where = f"{module}:{line} imports {name}"
        if floor == 0:
            assert not _is(name, (*LIGHTNING, *HYDRA, "torch", "numpy", "deepspeed")), f"{where}; floor 0: stdlib"
        if _is(name, LIGHTNING):
            assert floor in (4, 5) or module == "precision", f"{where}; lightning is for precision and floors 4 and 5"
        if _is(name, HYDRA):
            assert floor == 5 or (module == "hydra_job" and in_function), f"{where}; hydra is for floor 5"
        if _is(name, ("deepspeed",)):
            assert module.startswith("engines.deepspeed"), f"{where}; deepspeed is for engines/deepspeed"
            assert in_function, f"{where}; import deepspeed inside functions only"


def test_engines_never_import_each_other() -> None:
    engines = ("engines.fsdp2", "engines.deepspeed")
    for module in FILES:
        for mine, other in (engines, engines[::-1]):
            if module.startswith(mine):
                for name, line, _ in _imports_of(module):
                    assert not (_own(name) or "").startswith(other), f"{module}:{line} imports {name}"


def test_the_reader_of_imports_sees_every_spelling() -> None:
    source = (
        "import a.b\n"
        "from c import d\n"
        "from . import e\n"
        "from ..config import f\n"
        "def g():\n"
        "    import h\n"
        "    import_module('i.j')\n"
        "if TYPE_CHECKING:\n"
        "    from k import l\n"
    )
    found = set(_imports(ast.parse(source), "engines.base", False))
    assert {("a.b", 1, False), ("c.d", 2, False), ("lightning_zero.engines.e", 3, False)} <= found
    assert {("lightning_zero.config", 4, False), ("h", 6, True), ("i.j", 7, True), ("k", 9, False)} <= found
    assert _own("lightning_zero.config.ZeroConfig") == "config"
    assert _own("lightning_zero.config") == "config"
    assert _own("lightning.pytorch") is None
    assert _floor("callbacks.anything") == 5
    assert _floor("engines.fsdp2_private") == 3
    assert _floor("checkpoint.layout") == 1
    assert _floor("nobody_placed_this") is None
    assert _floor("engines.nobody_placed_this") is None
