"""``lightning-zero init FOLDER``: creates a small project, copied from ``template/``. Standard library only."""

from __future__ import annotations

import shutil
from pathlib import Path

TEMPLATE = Path(__file__).parent / "template"
_RENAMED = {"gitignore": ".gitignore"}
"""Files that package builders would omit under their proper names."""


def make_project(folder: Path) -> str:
    """Creates the project in ``folder``.

    Returns:
        A message for the user.

    Raises:
        FileExistsError: If ``folder`` exists and is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not empty: give another folder.")
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(TEMPLATE, folder, ignore=ignored, dirs_exist_ok=True)
    for name, proper in _RENAMED.items():
        (folder / name).rename(folder / proper)
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return f"{folder}: {', '.join(files)}\ntrain it: cd {folder} && python train.py"
