"""Tells when a private part of transformers that we touch has moved: each is used here as the package uses it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_zero.checkpoint.lazy import LazyTensor
from lightning_zero.private import transformers as private
from lightning_zero.private.check import check

pytest.importorskip("transformers")


def test_the_table() -> None:
    pytest.importorskip("transformers.core_model_loading")
    check(private.TRANSFORMERS)


def test_modules_of_others_are_left_alone() -> None:
    linear = nn.Linear(2, 2)
    assert private.converted(linear, {"weight": linear.weight}, {"weight": linear.weight}, LazyTensor) is None
    assert private.without_ignored(linear, ["a"], ["b"]) == (["a"], ["b"])


def test_a_model_initializes_what_is_in_it() -> None:
    """Buffers that its constructor computes, too."""
    pytest.importorskip("transformers.core_model_loading")
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 6, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=5, num_hidden_layers=1, initializer_range=1e-4, **sizes))
    assert private.is_model(model)
    assert not private.is_model(model.lm_head)
    linear, norm = model.model.layers[0].mlp.up_proj, model.model.norm
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(3.0)
    for module in (linear, norm):
        private.initialize(model, module)
    assert linear.weight.abs().max() < 0.01
    assert norm.weight.unique().tolist() == [1.0]
    rotary = model.model.rotary_emb
    expected = rotary.inv_freq.clone()
    rotary.inv_freq.zero_()
    private.initialize(model, rotary)
    torch.testing.assert_close(rotary.inv_freq, expected)


def test_experts_become_one_tensor_when_it_is_read() -> None:
    pytest.importorskip("transformers.core_model_loading")
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 4, "intermediate_size": 6, "num_attention_heads": 2, "num_key_value_heads": 2}
    with torch.device("meta"):
        model = MixtralForCausalLM(MixtralConfig(vocab_size=5, num_hidden_layers=1, num_local_experts=2, **sizes))
    targets = dict(model.named_parameters())
    mlp = "model.layers.0.block_sparse_moe"
    files = {
        f"{mlp}.experts.{i}.{w}.weight": torch.full((6, 4), 10.0 * i + j)
        for i in (0, 1)
        for j, w in ((1, "w1"), (3, "w3"))
    }
    files["model.norm.weight"] = torch.ones(4)
    found = private.converted(model, {**files, "nobody": torch.ones(1)}, targets, LazyTensor)
    assert isinstance(found, private.Converted)
    assert found.unexpected == ["nobody"]
    (name,) = [name for name in found.by_name if "gate_up" in name]
    tensor, sources = found.by_name[name]
    assert tensor.shape == targets[name].shape == (2, 12, 4)
    assert sorted(sources) == sorted(files)[:4]
    assert tensor[1:].clone().mean(-1).tolist() == [[11.0] * 6 + [13.0] * 6]


def test_rows_of_stacked_experts_read_no_others() -> None:
    """Else each rank reads all experts, to keep its own."""
    pytest.importorskip("transformers.core_model_loading")
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 4, "intermediate_size": 6, "num_attention_heads": 2, "num_key_value_heads": 2}
    with torch.device("meta"):
        model = MixtralForCausalLM(MixtralConfig(vocab_size=5, num_hidden_layers=1, num_local_experts=12, **sizes))
    read: list[tuple[int, str]] = []

    def file(i: int, w: str) -> LazyTensor:
        def rows(start: int, stop: int) -> torch.Tensor:
            read.append((i, w))
            return torch.full((stop - start, 4 if w != "w2" else 6), float(i))

        return LazyTensor((6, 4) if w != "w2" else (4, 6), torch.float32, rows)

    mlp = "model.layers.0.block_sparse_moe"
    files = {f"{mlp}.experts.{i}.{w}.weight": file(i, w) for i in range(12) for w in ("w1", "w2", "w3")}
    found = private.converted(model, files, dict(model.named_parameters()), LazyTensor)
    assert found is not None
    for part, weights in (("gate_up_proj", ["w1", "w3"]), ("down_proj", ["w2"])):
        (tensor,) = [tensor for name, (tensor, _) in found.by_name.items() if part in name]
        read.clear()
        assert tensor[9:11].clone().mean((1, 2)).tolist() == [9.0, 10.0]
        assert sorted(read) == [(i, w) for i in (9, 10) for w in weights]
