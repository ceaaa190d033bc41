"""The wheel: what it holds, and that the command finds its files."""

from __future__ import annotations

import sys
import zipfile

import pytest

from tests.system.commands import MODULE, ROOT, run


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from the source archive."""
    folder = tmp_path_factory.mktemp("archives")
    done = run(sys.executable, "-m", "build", "--no-isolation", "-o", str(folder), str(ROOT), cwd=folder)
    assert done.returncode == 0
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_holds_every_group_file(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {f"lightning_zero/conf/{p.relative_to(ROOT / 'conf')}" for p in (ROOT / "conf").rglob("*.yaml")}
    assert expected
    assert expected <= names
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "lightning_zero").rglob("*.py")}
    assert modules <= names
    assert "lightning_zero/py.typed" in names
    template = ROOT / "lightning_zero" / "app" / "template"
    files = {str(p.relative_to(ROOT)) for p in template.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert len(files) > 7
    assert files <= names


def test_the_command_finds_them_in_the_installed_wheel(wheel, tmp_path):
    site = tmp_path / "site"
    options = "--no-deps", "--no-index", "--disable-pip-version-check", "-q", "--target"
    done = run(sys.executable, "-m", "pip", "install", *options, str(site), str(wheel), cwd=tmp_path)
    assert done.returncode == 0
    where = "import lightning_zero; print(lightning_zero.__file__)"
    assert str(site) in run(sys.executable, "-c", where, cwd=tmp_path, PYTHONPATH=str(site)).stdout
    assert "zero3_offload" in run(*MODULE, "fit", "--help", cwd=tmp_path, PYTHONPATH=str(site)).stdout
    assert run(*MODULE, "init", "mine", cwd=tmp_path, PYTHONPATH=str(site)).returncode == 0
    assert (tmp_path / "mine" / "train.py").is_file()
