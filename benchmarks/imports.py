"""Counts packages, imports between them, import cycles and the largest classes of ``lightning_zero``.

    python benchmarks/imports.py            # this tree
    python benchmarks/imports.py FOLDER     # a checkout of another version

A *package* is a module or a folder of ``lightning_zero``; each engine's folder counts as one. An *import* between two
packages counts once, inside functions too; it is *cyclic* if it is part of an import cycle. *Layers* is the length of
the longest chain of imports. ``docs/architecture.md`` lists the packages.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "lightning_zero"
ENTRY_POINTS = ("", "__main__", "hydra_config", "conf")


def modules_of(root: Path) -> dict[str, ast.Module]:
    """Dotted name inside the package -> its syntax tree."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root / PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if parts[0] != "conf":
            found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def package_of(module: str, folders: set[str]) -> str:
    """The folder of ``module``, for an engine its own folder; or the module itself at the top level."""
    parts = module.split(".")
    inner = ".".join(parts[:2])
    return inner if inner in folders else parts[0]


def imports_of(modules: dict[str, ast.Module], folders: set[str], entry_points: set[str]) -> set[tuple[str, str]]:
    """All pairs ``(package, package it imports from)``."""
    imports = set()
    for module, tree in modules.items():
        if module in entry_points:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
                base = (node.module or "")[len(PACKAGE) + 1 :]
                names = [f"{base}.{alias.name}".strip(".") for alias in node.names]
                targets = [name if name in modules else base for name in names]
            elif isinstance(node, ast.Import):
                found = [alias.name for alias in node.names if alias.name.startswith(f"{PACKAGE}.")]
                targets = [name[len(PACKAGE) + 1 :] for name in found]
            else:
                continue
            here = package_of(module, folders)
            imports |= {(here, there) for t in targets if t and (there := package_of(t, folders)) != here}
    return imports


def reachable(imports: set[tuple[str, str]], start: str) -> set[str]:
    """The packages that ``start`` imports from, directly or through others."""
    seen: set[str] = set()
    ahead = [start]
    while ahead:
        here = ahead.pop()
        new = {there for a, there in imports if a == here} - seen
        seen |= new
        ahead += new
    return seen


@dataclass(frozen=True)
class Figures:
    """Packages, imports between them, and the methods of each class."""

    packages: int
    layers: int
    imports: int
    cyclic: int
    methods: dict[str, int]
    """Dotted name of a class -> number of its own methods, without inherited ones."""


def count(root: Path) -> Figures:
    """Counts the package below ``root``."""
    modules = modules_of(root)
    folders = {".".join(m.split(".")[:2]) for m in modules if m.startswith("engines.") and m.count(".") == 2}
    entry_points = {d for d in ENTRY_POINTS if d != "hydra_config" or "app.hydra_config" in modules}
    packages = {package_of(m, folders) for m in modules if m not in entry_points}
    imports = imports_of(modules, folders, entry_points)
    back = {(a, b) for a, b in imports if a in reachable(imports, b)}

    def layers(package: str) -> int:
        return 1 + max((layers(b) for a, b in imports - back if a == package), default=0)

    def methods(node: ast.ClassDef) -> int:
        return sum(isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)) for each in node.body)

    named = [(f"{m}.{n.name}", n) for m, t in modules.items() for n in ast.walk(t) if isinstance(n, ast.ClassDef)]
    of_class = {name: methods(node) for name, node in named}
    return Figures(len(packages), max(map(layers, packages)), len(imports), len(back), of_class)


def main(root: Path) -> None:
    found = count(root)
    print(f"packages {found.packages}, layers {found.layers}, imports {found.imports}, cyclic {found.cyclic}")
    for name, methods in sorted(found.methods.items(), key=lambda each: (-each[1], each[0]))[:5]:
        print(f"{methods} methods: {name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1])
