"""``lightning-zero convert``, as typed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import lightning_zero
from tests.integration.commands import ROOT, SMALL, run, run_imported

MODULE = ("-m", "lightning_zero")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A sharded checkpoint of the main job's module after three steps on two ranks."""
    where = tmp_path_factory.mktemp("run")
    done = run(
        *(*MODULE, "fit", "experiment=main_job", *SMALL, "strategy.checkpoint=sharded", "hydra.run.dir=."),
        cwd=where,
    )
    assert done.returncode == 0, done.stdout
    return sorted(where.rglob("checkpoint.json"))[-1].parent


def test_a_plain_file_becomes_a_folder_and_comes_back(tmp_path):
    weights = {"layer.weight": torch.arange(6.0).view(2, 3), "layer.bias": torch.ones(2)}
    plain = {"state_dict": weights, "epoch": 1, "global_step": 7, "pytorch-lightning_version": "2.6.0"}
    torch.save(plain, tmp_path / "plain.ckpt")
    for source, target, form in (("plain.ckpt", "shards.ckpt", "sharded"), ("shards.ckpt", "again.ckpt", "file")):
        done = run_imported("convert", source, target, cwd=tmp_path)
        assert done.returncode == 0, done.stdout
        assert done.stdout.strip().endswith(f"{target} ({form})")
    again = torch.load(tmp_path / "again.ckpt", weights_only=True)
    assert (again["epoch"], again["global_step"]) == (1, 7)
    assert all(torch.equal(again["state_dict"][name], weight) for name, weight in weights.items())


@pytest.mark.rest
def test_there_and_back(folder, tmp_path):
    one, two, three = (str(tmp_path / name) for name in ("one.ckpt", "two.ckpt", "three.ckpt"))
    for source, target, form in ((str(folder), one, "file"), (one, two, "sharded"), (two, three, "file")):
        done = run(*MODULE, "convert", source, target, cwd=tmp_path)
        assert done.returncode == 0, done.stdout
        assert done.stdout.strip().endswith(f"{target} ({form})")
    first, last = (torch.load(path, weights_only=True) for path in (one, three))
    assert list(first) == list(last)
    assert first["state_dict"].keys() == last["state_dict"].keys()
    assert all(torch.equal(first["state_dict"][k], last["state_dict"][k]) for k in first["state_dict"])
    for mine, other in zip(first["optimizer_states"], last["optimizer_states"], strict=True):
        for index, state in mine["state"].items():
            assert all(torch.equal(state[k], other["state"][index][k]) for k in state)
    assert sorted(os.listdir(tmp_path)) == ["one.ckpt", "three.ckpt", "two.ckpt"]  # no scratch is left
    assert os.path.getsize(one) == os.path.getsize(three)


@pytest.mark.rest
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere.ckpt", "x.ckpt"), "Checkpoint file not found: "),
        (("{folder}", "{folder}"), "already exists"),
        (("{folder}", "x.ckpt", "--format", "zip"), "invalid choice: 'zip'"),
        (("{folder}/..", "x.ckpt"), "checkpoint.json is missing, so it is no sharded checkpoint"),
        (("{folder}", "x", "--format", "safetensors", "--prefix", "nothing"), "does not begin with it"),
        (("{folder}",), "the following arguments are required: target"),
    ],
)
def test_wrong_arguments_end_with_one_message(arguments, said, folder, tmp_path):
    done = run_imported("convert", *(a.format(folder=folder) for a in arguments), cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stdout
    assert "Traceback" not in done.stdout
    assert os.listdir(tmp_path) == []


@pytest.mark.rest
def test_converting_takes_one_tensor_of_memory(tmp_path):
    """206 MiB in 6 tensors, both ways: as read and in its place, and a bit for the buffers of files."""
    state = {f"w{i}": torch.full((3000, 3000), float(i)) for i in range(6)}
    bound = 2 * state["w0"].nbytes / 2**20 + 8
    torch.save({"state_dict": state, "pytorch-lightning_version": "2.6.6"}, tmp_path / "one.ckpt")
    script = (
        "import sys\n"
        "from lightning_zero.checkpoint.convert import convert\n"
        "from tests.helpers.saving import Peak\n"
        "with Peak() as peak: convert(sys.argv[1], sys.argv[2])\n"
        "print(peak.extra_mib)\n"
    )
    for source, target in (("one.ckpt", "two.ckpt"), ("two.ckpt", "three.ckpt")):
        done = run("-c", script, source, target, cwd=tmp_path, PYTHONPATH=str(ROOT))
        assert done.returncode == 0, done.stdout
        assert float(done.stdout.split()[-1]) < bound
    assert torch.equal(torch.load(tmp_path / "three.ckpt", mmap=True)["state_dict"]["w5"], state["w5"])


@pytest.mark.rest
def test_a_gpt2_goes_to_from_pretrained(tmp_path):
    transformers = pytest.importorskip("transformers", reason="pip install lightning-zero[examples]")
    done = run(
        *(*MODULE, "fit", "experiment=gpt2_zero2", "trainer.max_steps=2", "data.block_size=32", "hydra.run.dir=."),
        *("+model.config.n_layer=2", "+model.config.n_embd=64", "+model.config.n_head=2"),
        *("data.vocab_size=300", "data.max_characters=20000"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout
    path = sorted(tmp_path.rglob("*.ckpt"))[-1]
    done = run(*MODULE, "convert", str(path), "out", "--format", "safetensors", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "gpt2"
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    saved = lightning_zero.load_checkpoint(path)["state_dict"]
    assert {name.removeprefix("model.") for name in saved} == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, saved[f"model.{name}"].clone()), name
    assert model.lm_head.weight is model.transformer.wte.weight
