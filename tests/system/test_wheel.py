"""The archives: what they hold, that the command finds it, and that they are the same each time."""

from __future__ import annotations

import sys
import zipfile

import pytest

from tests.system.commands import MODULE, ROOT, run


def _build(folder):
    done = run(sys.executable, "-m", "build", "--no-isolation", "-o", str(folder), str(ROOT), cwd=folder)
    assert done.returncode == 0
    return {path.suffix: path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """Suffix -> path, of the wheel and of the source archive that it was built from."""
    return _build(tmp_path_factory.mktemp("archives"))


@pytest.fixture
def wheel(archives):
    return archives[".whl"]


def test_another_build_makes_the_same_archives(archives, tmp_path):
    again = _build(tmp_path)
    assert {suffix: path.read_bytes() for suffix, path in again.items()} == {
        suffix: path.read_bytes() for suffix, path in archives.items()
    }


def test_each_extra_can_be_installed_into_an_empty_environment(wheel, tmp_path):
    """By pip's resolver; those of `make models` come without their dependencies, which contradict one another."""
    options = "--dry-run", "--ignore-installed", "--disable-pip-version-check", "-q"
    what = "-c", str(ROOT / "constraints.txt"), f"{wheel}[dev,examples,plot,ray]"
    done = run(sys.executable, "-m", "pip", "install", *options, *what, cwd=tmp_path)
    assert done.returncode == 0


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
