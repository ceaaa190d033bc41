"""Counts what makes the package easy or hard to move into: rooms, arrows between them, large classes.

    python benchmarks/rooms.py            # this tree
    python benchmarks/rooms.py FOLDER     # a checkout of another version

A *room* is a module or a folder of ``lightning_zero``, each engine's folder one of its own; an *arrow* says that a room
imports from another, inside functions too; an arrow *back* is part of a circle of rooms; a *floor* is the length of the
longest chain of arrows. ``docs/architecture.md`` shows the rooms.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "lightning_zero"
DOORS = ("", "__main__", "hydra_config", "conf")


def modules_of(root: Path) -> dict[str, ast.Module]:
    """Dotted name inside the package -> its syntax tree."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root / PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if parts[0] != "conf":
            found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def room_of(module: str, folders: set[str]) -> str:
    """The folder that ``module`` lies in, an engine's own folder first; or the module itself."""
    parts = module.split(".")
    inner = ".".join(parts[:2])
    return inner if inner in folders else parts[0]


def arrows_of(modules: dict[str, ast.Module], folders: set[str], doors: set[str]) -> set[tuple[str, str]]:
    """``(room, room it imports from)``."""
    arrows = set()
    for module, tree in modules.items():
        if module in doors:
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
            here = room_of(module, folders)
            arrows |= {(here, there) for t in targets if t and (there := room_of(t, folders)) != here}
    return arrows


def reachable(arrows: set[tuple[str, str]], start: str) -> set[str]:
    """The rooms that ``start`` imports from, directly or not."""
    seen: set[str] = set()
    ahead = [start]
    while ahead:
        here = ahead.pop()
        new = {there for a, there in arrows if a == here} - seen
        seen |= new
        ahead += new
    return seen


@dataclass(frozen=True)
class Figures:
    """Rooms, arrows between them and the largest classes of a package."""

    rooms: int
    floors: int
    arrows: int
    arrows_back: int
    methods: dict[str, int]
    """Of each class, by its dotted name inside the package; those that it inherits left out."""


def count(root: Path) -> Figures:
    """Counts the package below ``root``."""
    modules = modules_of(root)
    folders = {".".join(m.split(".")[:2]) for m in modules if m.startswith("engines.") and m.count(".") == 2}
    doors = {d for d in DOORS if d != "hydra_config" or "app.hydra_config" in modules}
    rooms = {room_of(m, folders) for m in modules if m not in doors}
    arrows = arrows_of(modules, folders, doors)
    back = {(a, b) for a, b in arrows if a in reachable(arrows, b)}

    def floors(room: str) -> int:
        return 1 + max((floors(b) for a, b in arrows - back if a == room), default=0)

    def methods(node: ast.ClassDef) -> int:
        return sum(isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)) for each in node.body)

    named = [(f"{m}.{n.name}", n) for m, t in modules.items() for n in ast.walk(t) if isinstance(n, ast.ClassDef)]
    of_class = {name: methods(node) for name, node in named}
    return Figures(len(rooms), max(map(floors, rooms)), len(arrows), len(back), of_class)


def main(root: Path) -> None:
    found = count(root)
    print(f"rooms {found.rooms}, floors {found.floors}, arrows {found.arrows}, arrows back {found.arrows_back}")
    for name, methods in sorted(found.methods.items(), key=lambda each: (-each[1], each[0]))[:5]:
        print(f"{methods} methods: {name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1])
