"""Every example runs and does what it says."""

from __future__ import annotations

import pytest

from tests.integration.commands import ROOT, run


@pytest.mark.rest
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_quickstart(strategy, tmp_path):
    done = run(str(ROOT / "examples" / "quickstart.py"), strategy, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "class Classifier" in done.stdout
    assert float(done.stdout.split("accuracy ")[1].split(",")[0]) > 0.9


@pytest.mark.rest
def test_gan(tmp_path):
    done = run(str(ROOT / "examples" / "gan.py"), "zero2", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert 0.5 < float(done.stdout.split("mean radius ")[1].split()[0]) < 1.5


@pytest.mark.rest
def test_gpt2_under_stage_2(tmp_path):
    pytest.importorskip("transformers", reason="pip install lightning-zero[examples]")
    done = run(
        *("-m", "lightning_zero", "fit", "experiment=gpt2_zero2", "trainer.max_steps=2", "data.block_size=32"),
        *("+model.config.n_layer=2", "+model.config.n_embd=64", "+model.config.n_head=2"),
        *("data.vocab_size=300", "data.max_characters=20000"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout
    assert "share of DDP's" in done.stdout


@pytest.mark.rest
def test_own_hydra_app(tmp_path):
    app = str(ROOT / "examples" / "hydra_app" / "app.py")
    done = run(app, "strategy=zero2", "trainer.devices=2", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "strategy 2: loss" in done.stdout
