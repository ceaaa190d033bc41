"""The wheel ships the groups and the type marker, and an app of one's own finds them there."""

from __future__ import annotations

import zipfile
from importlib.metadata import version

import pytest

from tests.system.commands import ROOT, run


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    if int(version("setuptools").split(".")[0]) < 77:
        pytest.skip("setuptools>=77 is not installed, and building without isolation needs it")
    folder = tmp_path_factory.mktemp("wheel")
    options = "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "-q"
    done = run("-m", "pip", "wheel", *options, "-w", str(folder), str(ROOT), cwd=folder)
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


def test_own_app_runs_from_the_installed_wheel(wheel, tmp_path):
    site = tmp_path / "site"
    options = "--no-deps", "--no-index", "--disable-pip-version-check", "-q", "--target"
    done = run("-m", "pip", "install", *options, str(site), str(wheel), cwd=tmp_path)
    assert done.returncode == 0
    where = run("-c", "import lightning_zero; print(lightning_zero.__file__)", cwd=tmp_path, PYTHONPATH=str(site))
    assert str(site) in where.stdout
    app = str(ROOT / "examples" / "hydra_app" / "app.py")
    done = run(app, "strategy=zero1", cwd=tmp_path, PYTHONPATH=str(site))
    assert done.returncode == 0
    assert "strategy 1: loss" in done.stdout
