"""The rooms of ``docs/architecture.md``: folder rules on who imports whom; imports inside functions count."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.rooms import Figures, count

PACKAGE = "lightning_zero"
ROOT = Path(__file__).resolve().parents[2] / PACKAGE

ROOMS: dict[str, tuple[str, ...]] = {
    # room -> the rooms below it that it may import from, in the order of their floors
    "config": (),
    "errors": (),
    "host": (),
    "twins": (),
    "private": ("errors",),
    "comm": ("errors", "private"),
    "checkpoint": ("errors", "host", "private", "comm"),
    "engines": ("config", "errors", "host", "private", "comm", "checkpoint"),
    "engines.fsdp2": ("config", "errors", "host", "private", "comm", "checkpoint", "engines"),
    "engines.deepspeed": ("config", "errors", "host", "private", "comm", "checkpoint", "engines"),
    "launch": ("errors", "host", "private", "comm", "checkpoint"),
    "planner": ("config", "errors", "host", "twins", "private", "comm", "checkpoint", "engines"),
    "strategy": (
        *("config", "errors", "host", "private", "comm", "checkpoint"),
        *("engines", "engines.fsdp2", "engines.deepspeed", "launch", "planner"),
    ),
    "callbacks": ("private", "comm", "engines", "planner"),
    "auto": ("config", "host", "private", "planner", "strategy"),
    "registry": ("config", "auto", "twins"),
    "recipes": (),
    "app": (
        *("config", "errors", "host", "private", "checkpoint", "engines.deepspeed", "launch", "strategy"),
        *("planner", "callbacks", "auto", "registry"),
    ),
}
"""A module or a folder, with all that lies in it unless that is listed itself. It imports from its own room, too."""

FRONT = ("", "__main__", "conf", "hydra_config")
"""Doors, which only lead to rooms: nobody inside imports them."""

LIBRARIES: dict[str, tuple[str, ...]] = {
    # library -> the rooms and modules that may import it
    "lightning": (
        *(
            "private.lightning",
            "engines.precision",
            "engines.hooks",
            "engines.refusals",
            "engines.deepspeed.run",
            "checkpoint.resume",
            "checkpoint.saving",
            "checkpoint.global_batch",
        ),
        *("launch", "strategy", "planner", "callbacks", "auto", "registry", "recipes", "app"),
    ),
    "hydra": ("private.hydra", "app", "launch.hydra_job", "launch.restart"),
    "deepspeed": ("engines.deepspeed", "checkpoint.deepspeed"),
}
ALIASES = {
    "lightning_fabric": "lightning",
    "lightning_utilities": "lightning",
    "pytorch_lightning": "lightning",
    "torchmetrics": "lightning",
    "omegaconf": "hydra",
    f"{PACKAGE}.private.lightning": "lightning",  # the private parts of a library are for the same rooms
    f"{PACKAGE}.private.hydra": "hydra",
}
STANDARD_LIBRARY_ONLY = ("config", "errors", "host", "twins", "private.check", "launch.supervisor")
INSIDE_FUNCTIONS = ("deepspeed",)
"""Libraries that take seconds to import, or are not installed everywhere."""


def _files(root: Path = ROOT) -> dict[str, Path]:
    """Module name without the package (``""`` is the package itself) -> file."""
    files = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root).with_suffix("")
        if "template" in relative.parts:  # what `lightning-zero init` copies is the user's
            continue
        parts = relative.parts[:-1] if relative.name == "__init__" else relative.parts
        files[".".join(parts)] = path
    return files


FILES = _files()


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


def _within(module: str, place: str) -> bool:
    return module == place or module.startswith(f"{place}.")


def _room(module: str) -> str | None:
    """The longest entry of :data:`ROOMS` or :data:`FRONT` that ``module`` lies in."""
    found = [place for place in (*ROOMS, *FRONT) if place and _within(module, place)]
    return max(found, key=len) if found else "" if module == "" else None


@pytest.mark.parametrize("module", FILES)
def test_every_module_has_a_room(module: str) -> None:
    assert _room(module) is not None, f"{PACKAGE}/{module}: give it a room in ROOMS and in docs/architecture.md"


def test_rooms_have_floors() -> None:
    """Each room imports from rooms that stand before it: so there is no circle between rooms."""
    seen: list[str] = []
    for room, below in ROOMS.items():
        assert set(below) <= set(seen), f"{room} imports from {set(below) - set(seen)}, which stand above it"
        seen.append(room)


@pytest.mark.parametrize("module", [m for m in FILES if _room(m) not in FRONT])
def test_imports_stay_within_the_rooms(module: str) -> None:
    room = _room(module)
    assert room is not None
    for name, line, _ in _imports_of(module):
        target = _own(name)
        if target in (None, "", module):  # the package's lazy attributes are nobody's import
            continue
        assert target is not None
        there = _room(target)
        assert there not in FRONT, f"{module}:{line} imports {target}, which is a door"
        assert there == room or there in ROOMS[room], f"{module}:{line} ({room}) imports {target} ({there})"


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


def _library(name: str) -> str:
    if name.startswith(f"{PACKAGE}.private."):
        return ALIASES.get(".".join(name.split(".")[:3]), PACKAGE)
    top = name.split(".")[0]
    return ALIASES.get(top, top)


@pytest.mark.parametrize("module", FILES)
def test_libraries_stay_in_their_rooms(module: str) -> None:
    for name, line, in_function in _imports_of(module):
        library = _library(name)
        where = f"{module}:{line} imports {name}"
        if library in LIBRARIES:
            assert any(_within(module, place) for place in LIBRARIES[library]), f"{where}: {LIBRARIES[library]} only"
        if module in STANDARD_LIBRARY_ONLY:
            assert library not in (*LIBRARIES, "torch", "numpy"), f"{where}: standard library only"
        if library in INSIDE_FUNCTIONS:
            assert in_function, f"{where}: inside functions only"


@pytest.mark.parametrize("module", FILES)
def test_no_private_name_crosses_a_module(module: str) -> None:
    """``from ours import _name``, and ``module._name`` of a module of ours."""
    tree = ast.parse(FILES[module].read_text(encoding="utf-8"))
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            for alias in node.names:
                assert not alias.name.startswith("_"), f"{module}:{node.lineno} imports {alias.name} of {node.module}"
                if _own(f"{node.module}.{alias.name}") == f"{node.module}.{alias.name}"[len(PACKAGE) + 1 :]:
                    modules[alias.asname or alias.name] = alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            private = node.attr.startswith("_") and not node.attr.startswith("__")
            assert not private, f"{module}:{node.lineno} uses {node.value.id}.{node.attr}"


@pytest.fixture(scope="module")
def figures() -> Figures:
    return count(ROOT.parent)


def test_the_engine_can_be_read(figures: Figures) -> None:
    """What only CPU processes do, and what has a state of its own, are objects beside it."""
    assert figures.methods["engines.fsdp2.engine.Fsdp2Engine"] <= 35


def test_the_decision_states_the_figures_of_today(figures: Figures) -> None:
    text = (ROOT.parent / "docs" / "decisions" / "31-rooms.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    stated = {row[0]: [int(number) for number in re.findall(r"\d+", row[-1])] for row in rows}
    engine, other, strategy = (
        figures.methods[name]
        for name in (
            "engines.fsdp2.engine.Fsdp2Engine",
            "engines.deepspeed.engine.DeepSpeedEngine",
            "strategy.ZeroStrategy",
        )
    )
    assert stated["rooms, floors"] == [figures.rooms, figures.floors]
    assert stated["arrows between rooms, of these in circles"] == [figures.arrows, figures.arrows_back]
    assert stated["methods of `Fsdp2Engine`"] == [engine]
    assert stated["methods of `DeepSpeedEngine`, of `ZeroStrategy`"] == [other, strategy]
    assert stated["methods of the largest class"] == [max(figures.methods.values())]
    assert max(figures.methods, key=figures.methods.__getitem__) == "strategy.ZeroStrategy"


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
    assert _library("lightning_zero.private.lightning.Launcher") == "lightning"
    assert _library("lightning_zero.private.torch") == PACKAGE
    assert _room("callbacks.anything") == "callbacks"
    assert _room("engines.fsdp2.private") == "engines.fsdp2"
    assert _room("engines.units") == "engines"
    assert _room("nobody_placed_this") is None


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    """A clause ("What is held ...") has to be read to its end before it names anything."""
    clause = re.compile(r'"""(What|Where|Whatever|Wherever|Who|Whose|Whoever|Which|How|When) .*')
    found = {p.relative_to(ROOT): clause.findall(p.read_text(encoding="utf-8")) for p in ROOT.rglob("*.py")}
    assert not {path: words for path, words in found.items() if words}
