"""Private names of other libraries stand in one file each, and nowhere else in the package."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lightning_zero.private.check import Library

PACKAGE = "lightning_zero"
ROOT = Path(__file__).resolve().parents[2] / PACKAGE
PLACES = ("private/", "engines/fsdp2/private.py", "engines/deepspeed/private.py")

DOCUMENTED = {
    # name -> why it may be used under its own name
    "_thread": "documented by Python",
    "os._exit": "documented by Python",
    "hasattr '_fields'": "documented by Python, of named tuples",
    "atexit._run_exitfuncs": "documented in CPython's own module; there is no other way to run them early",
    "sys._getframe": "documented by Python",
    "pickle._Unpickler": "pickle.Unpickler written in Python, whose dispatch can be changed",
    "torch._foreach_copy_": "torch documents torch._foreach_* on its page of operators, as beta",
    "torch._foreach_zero_": "the same",
    "torch._foreach_mul_": "the same",
    "torch._foreach_clamp_min_": "the same",
    "torch._foreach_clamp_max_": "the same",
    "torch._foreach_norm": "the same",
    "getattr '_no_split_modules'": "what transformers' model classes call their blocks; others have none",
}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


@dataclass
class _Class:
    bases: list[str]
    names: set[str] = field(default_factory=set)


def _defined(node: ast.ClassDef) -> set[str]:
    """Names that a class defines, or stores on its instances."""
    found: set[str] = set()
    for each in ast.walk(node):
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(each.name)
        elif isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and _of_itself(each.value):
            found.add(each.attr)
    for statement in node.body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            found |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return found


def _of_itself(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


class Reader:
    """Finds foreign private names in a set of our files."""

    def __init__(self, files: dict[str, str]) -> None:
        self.trees = {path: ast.parse(source) for path, source in files.items()}
        self.classes = {
            (path, node.name): _Class([ast.unparse(base).split("[")[0] for base in node.bases], _defined(node))
            for path, tree in self.trees.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
        }

    def names_of(self, path: str, name: str) -> set[str]:
        """What a class of ours and the bases of ours that it has define; bases of other files are found by name."""
        last = name.split(".")[-1]
        homes = [path] if (path, last) in self.classes and last == name else []
        homes = homes or [home for home, found in self.classes if found == last]
        found: set[str] = set()
        for home in homes:
            cls = self.classes[home, last]
            found |= cls.names.union(*(self.names_of(home, base) for base in cls.bases if base != name))
        return found

    def foreign(self, path: str) -> Iterator[tuple[int, str]]:
        """``(line, name)`` of every private name in a file that is not ours.

        ``self._x`` must be defined in the class or in one of its bases that is ours. ``thing._x`` must be defined by a
        class of the same file (no private name of ours crosses a module), and not be a private name of ``nn.Module``.
        """
        tree = self.trees[path]
        here = set().union(
            *(self.names_of(path, node.name) for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
        )
        self.path = path
        yield from self._walk(tree, "", here - {"_parameters", "_buffers", "_modules"})

    def _walk(self, node: ast.AST, inside: str, here: set[str]) -> Iterator[tuple[int, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Attribute) and _is_private(child.attr):
                own = self.names_of(self.path, inside) if inside and _of_itself(child.value) else here
                if child.attr not in own:
                    yield child.lineno, ast.unparse(child)
            elif isinstance(child, (ast.Import, ast.ImportFrom)):
                base = getattr(child, "module", None) or ""
                names = [f"{base}.{alias.name}".strip(".") for alias in child.names]
                if not base.startswith(PACKAGE):  # ours: see test_rooms
                    yield from ((child.lineno, name) for name in names if any(map(_is_private, name.split("."))))
            elif isinstance(child, ast.Call):
                yield from self._asked(child, here | self.names_of(self.path, inside))
            yield from self._walk(child, child.name if isinstance(child, ast.ClassDef) else inside, here)

    def _asked(self, call: ast.Call, own: set[str]) -> Iterator[tuple[int, str]]:
        """``getattr(thing, "_x")`` and the like, ``vars(thing).get("_x")``."""
        name = getattr(call.func, "id", getattr(call.func, "attr", ""))
        position = {"getattr": 1, "hasattr": 1, "setattr": 1, "delattr": 1, "get": 0, "pop": 0, "attrgetter": 0}.get(
            name
        )
        if position is None or len(call.args) <= position:
            return
        if (
            name in ("get", "pop")
            and "__dict__" not in ast.unparse(call.func)
            and "vars(" not in ast.unparse(call.func)
        ):
            return
        value = call.args[position]
        text = value.value if isinstance(value, ast.Constant) else None
        if isinstance(text, str) and _is_private(text) and text not in own and not text.startswith(f"_{PACKAGE}"):
            yield call.lineno, f"{name} {text!r}"


def _sources() -> dict[str, str]:
    return {str(p.relative_to(ROOT)): p.read_text(encoding="utf-8") for p in sorted(ROOT.rglob("*.py"))}


READER = Reader(_sources())


@pytest.mark.parametrize("path", [path for path in READER.trees if not path.startswith(PLACES)])
def test_private_names_stand_in_their_files(path: str) -> None:
    found = [f"{path}:{line}: {name}" for line, name in READER.foreign(path) if name not in DOCUMENTED]
    assert not found, "private names of other libraries belong in lightning_zero/private:\n" + "\n".join(found)


def test_the_list_of_documented_names_has_no_dead_entries() -> None:
    used = {name for path in READER.trees for _, name in READER.foreign(path)}
    assert not DOCUMENTED.keys() - used


def test_the_reader_sees_every_spelling() -> None:
    source = (
        "from a._b import c\n"
        "import d._e\n"
        "from f import _g\n"
        "class Base:\n"
        "    _mine = 1\n"
        "class Ours(Base, Theirs):\n"
        "    def __init__(self):\n"
        "        self._own = self._mine\n"
        "        self._theirs()\n"
        "        super()._theirs2()\n"
        "        torch._C.x\n"
        "        getattr(self, '_h', None)\n"
        "        vars(self).get('_i')\n"
        "        setattr(self, '_own', 1)\n"
        "        module._parameters\n"
        "def f(ours):\n"
        "    return ours._own, ours._j\n"
    )
    found = {(line, name) for line, name in Reader({"x.py": source}).foreign("x.py")}
    assert {line for line, _ in found} == {1, 2, 3, 9, 10, 11, 12, 13, 15, 17}
    assert (17, "ours._j") in found


LIBRARIES = {
    library
    for file in (
        "private.torch",
        "private.lightning",
        "private.hydra",
        "private.transformers",
        "engines.fsdp2.private",
        "engines.deepspeed.private",
    )
    for library in vars(importlib.import_module(f"{PACKAGE}.{file}")).values()
    if isinstance(library, Library)
}


def test_bounds_are_those_that_are_checked() -> None:
    """One pair of bounds per library: in the file of its private names and in ``pyproject.toml``."""
    required = dict(re.findall(r'^    "([a-z-]+)([><=.,0-9]+)[";]', (ROOT.parent / "pyproject.toml").read_text(), re.M))
    assert all("<" in bounds for bounds in required.values()), required
    optional = {"transformers"}  # whatever is installed: its private parts are checked where they are used
    assert {library.name for library in LIBRARIES} - optional == required.keys() - {"omegaconf"}
    for library in LIBRARIES:
        assert library.name in optional or library.tested == required[library.name]


@pytest.mark.parametrize("path", [path for path in READER.trees if path.startswith(PLACES)])
def test_every_private_name_is_in_a_table(path: str) -> None:
    """So that a name which moves is named at the start."""
    tables = " ".join(f"{needed.name} {needed.stores}" for library in LIBRARIES for needed in library.needed)
    listed = set(re.findall(r"\w+", tables))
    names = {name for _, name in READER.foreign(path) if name not in DOCUMENTED}
    used = {re.findall(r"\w+", name)[-1] for name in names}
    ours = {name for name in used if not _is_private(name) or name.startswith(f"_{PACKAGE}")}
    assert used - ours - listed == NOT_EVERYWHERE.get(path, set())


NOT_EVERYWHERE = {
    "engines/fsdp2/private.py": {"_fsdp_param_groups"},
}
"""Some versions have it under another name."""

OF_NO_TABLE = {
    # attributes that are stored, or asked for with a default -> why no rename would go unnoticed
    "data": "documented by torch",
    "grad": "documented by torch",
    "__torch_function__": "documented by torch",
    "all_gather_single": "public, since torch 2.13",
    "reduce_scatter_single": "public, since torch 2.13",
    "__class__": "documented by Python",
    "__closure__": "documented by Python",
    "__code__": "documented by Python",
    "__func__": "documented by Python",
    "__name__": "documented by Python",
    "fget": "documented by Python",
    "tempdir": "documented by Python",
    "_fields": "documented by Python, of named tuples",
    "_lightning_zero": "ours, on a function of DeepSpeed",
    "_lightning_zero_world": "ours, on DeepSpeed's backend",
    "ds_in_flight": "ours, on parameters",
    "ds_coordinator": "ours, on parameters",
    "ds_names": "ours, on parameters",
    "of_engine": "ours, on hooks",
    "parts_of_outputs": "ours, on groups",
}


def _told_nothing(tree: ast.Module) -> set[str]:
    """Attributes of other objects than ``self`` whose rename would raise nothing: those that are stored or deleted, or
    asked for with a default, also in a loop over their names."""
    return set().union(*map(_told_nothing_in, tree.body))


def _told_nothing_in(function: ast.stmt) -> set[str]:
    texts: dict[str, set[str]] = {}  # variable -> the strings that it may be
    for node in ast.walk(function):
        pairs: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(node, ast.For):
            pairs = [(node.target, node.iter)]
        elif isinstance(node, ast.Assign):
            (target, value) = node.targets[0], node.value
            in_pairs = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            pairs = list(zip(target.elts, value.elts, strict=True)) if in_pairs else [(target, value)]
        for name, value in pairs:
            if isinstance(name, ast.Name):
                texts.setdefault(name.id, set()).update(_texts(value))
    found: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            found |= set() if _of_itself(node.value) else {node.attr}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            with_default = node.func.id == "getattr" and len(node.args) > 2
            if node.func.id in ("setattr", "delattr", "hasattr") or with_default:
                name = node.args[1]
                found |= texts.get(name.id, set()) if isinstance(name, ast.Name) else _texts(name)
    return found


def _texts(node: ast.expr) -> set[str]:
    each = node.elts if isinstance(node, (ast.Tuple, ast.List)) else [node]
    return {e.value for e in each if isinstance(e, ast.Constant) and isinstance(e.value, str)}


@pytest.mark.parametrize("path", [path for path in READER.trees if path.startswith(PLACES)])
def test_what_would_change_nothing_is_in_a_table(path: str) -> None:
    """Assigned to another name, a patch does nothing; asked for with a default, an attribute is never there."""
    tables = " ".join(f"{needed.name} {needed.stores}" for library in LIBRARIES for needed in library.needed)
    found = _told_nothing(READER.trees[path]) - NOT_EVERYWHERE.get(path, set())
    assert not found - OF_NO_TABLE.keys() - set(re.findall(r"\w+", tables))


def test_the_list_of_names_of_no_table_has_no_dead_entries() -> None:
    assert not OF_NO_TABLE.keys() - set().union(*map(_told_nothing, READER.trees.values()))


def test_the_reader_sees_what_would_change_nothing() -> None:
    source = (
        "class Ours:\n"
        "    def __init__(self, group):\n"
        "        self.own = group.read\n"
        "        for word in ('unused',): print(word)\n"
        "        group.a = group.b = 1\n"
        "        del group.c\n"
        "        group.d += 1\n"
        "        zero, name = group, 'e'\n"
        "        setattr(zero, name, 1)\n"
        "        for key in ('f', 'g'):\n"
        "            setattr(group, key, getattr(group, key))\n"
        "        getattr(group, 'h', None), hasattr(group, 'i'), getattr(group, 'raises')\n"
    )
    assert _told_nothing(ast.parse(source)) == set("abcdefghi")


TESTED_BY = {
    "private/check.py": "test_private_check.py",
    "private/hydra.py": "test_hydra_private.py",
    "private/lightning.py": "test_lightning_private.py",
    "private/torch.py": "test_torch_private.py",
    "private/torch_optim.py": "test_torch_optim_private.py",
    "private/transformers.py": "test_transformers_private.py",
    "engines/fsdp2/private.py": "test_fsdp2_private.py",
    "engines/deepspeed/private.py": "test_deepspeed_private.py",
}
ONLY_WORDS = {"TESTED", "ACCELERATORS", "Gather", "Group", "ShardedParam", "Shards", "StepHook"}
"""Bounds, aliases, lists of public names, an abstract class: there is nothing of them to call."""


def test_each_file_of_private_names_has_a_test() -> None:
    assert TESTED_BY.keys() == {path for path in READER.trees if path.startswith(PLACES)} - {"private/__init__.py"}


@pytest.mark.parametrize("path", TESTED_BY)
def test_a_test_uses_every_public_name_over_private_ones(path: str) -> None:
    """As ``private.name``, or imported by its name: a table sees that a name is there, not what it does."""
    source = (Path(__file__).parent / TESTED_BY[path]).read_text(encoding="utf-8")
    used: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "private":
            used.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module == f"{PACKAGE}.private.check":
            used |= {alias.name for alias in node.names}
    assert not _public(READER.trees[path]) - used - ONLY_WORDS


def _public(tree: ast.Module) -> set[str]:
    """Public functions, classes and constants of a module, and private names that it imports under public ones."""
    found: set[str] = set()
    statements = [*tree.body, *(each for node in tree.body if isinstance(node, ast.With) for each in node.body)]
    for node in statements:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                found |= {name.id for name in ast.walk(target) if isinstance(name, ast.Name)}
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname for alias in node.names if alias.asname}
    return {name for name in found if not name.startswith("_")}


OVERRIDDEN = {
    # private methods of other libraries that ours replace, so that the library calls ours; each is in a table
    "Collector._collect_rank_zero_results",
    "ZeroStrategy._configure_launcher",
    "ZeroStrategy._get_process_group_backend",
    "ZeroStrategy._precision_plugin",  # the property over it is public, and ours
}


def test_nothing_of_ours_replaces_a_private_name_by_accident() -> None:
    """A name of ours that a base of another library uses, too, would change what that base does."""
    found = set()
    for path in READER.trees:
        module = importlib.import_module(
            ".".join((PACKAGE, *Path(path).with_suffix("").parts)).removesuffix(".__init__")
        )
        for cls in vars(module).values():
            if inspect.isclass(cls) and cls.__module__ == module.__name__:
                mine = {name for name in READER.classes[path, cls.__name__].names if _is_private(name)}
                found |= {f"{cls.__name__}.{name}" for name in mine & _used_by_foreign_bases(cls)}
    assert found == OVERRIDDEN


def _used_by_foreign_bases(cls: type) -> set[str]:
    used: set[str] = set()
    for base in cls.__mro__[1:]:
        if base.__module__.split(".")[0] in (PACKAGE, "builtins", "typing", "abc", "enum"):
            continue
        for value in vars(base).values():
            value = getattr(value, "fget", None) or getattr(value, "__func__", value)
            code = getattr(value, "__code__", None)
            used |= set(code.co_names) if code is not None else set()
        used |= set(vars(base))
    return used
