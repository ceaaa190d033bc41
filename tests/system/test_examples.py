"""Every example runs and does what it says; test_cli.py has GPT-2."""

from __future__ import annotations

from tests.system.commands import ROOT, run


def test_quickstart(tmp_path):
    done = run(str(ROOT / "examples" / "quickstart.py"), "zero3", fork="all", cwd=tmp_path)
    assert done.returncode == 0
    assert "class Classifier" in done.stdout
    assert float(done.stdout.split("accuracy ")[1].split(",")[0]) > 0.9


def test_gan(tmp_path):
    done = run(str(ROOT / "examples" / "gan.py"), "zero2", fork="all", cwd=tmp_path)
    assert done.returncode == 0
    assert 0.5 < float(done.stdout.split("mean radius ")[1].split()[0]) < 1.5


def test_own_hydra_app(tmp_path):
    app = str(ROOT / "examples" / "hydra_app" / "app.py")
    done = run(app, "strategy=zero2", "trainer.devices=2", fork="all", cwd=tmp_path)
    assert done.returncode == 0
    assert "strategy 2: loss" in done.stdout
