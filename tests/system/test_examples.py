"""Every example runs and does what it says; test_wheel.py has the app, test_cli.py GPT-2."""

from __future__ import annotations

from tests.system.commands import ROOT, run_imported


def test_quickstart(tmp_path):
    done = run_imported(str(ROOT / "examples" / "quickstart.py"), "zero3", cwd=tmp_path)
    assert done.returncode == 0
    assert "class Classifier" in done.stdout
    assert float(done.stdout.split("accuracy ")[1].split(",")[0]) > 0.9


def test_gan(tmp_path):
    done = run_imported(str(ROOT / "examples" / "gan.py"), "zero2", cwd=tmp_path)
    assert done.returncode == 0
    assert 0.5 < float(done.stdout.split("mean radius ")[1].split()[0]) < 1.5
