"""Which modules become units: repeated blocks, by name, never at the price of a tied or an unsplittable parameter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_zero.config import ActivationCheckpointingConfig
from lightning_zero.engines.forwards import recomputed_modules
from lightning_zero.engines.units import ROOT, plan_units


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x):
        return x + self.mlp(x)


class Coder(Block):
    def encode(self, x):
        return self.mlp(x)


class Model(nn.Module):
    def __init__(self, block=Block) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 2)})


def _names(plan):
    return [u.name for u in plan.units]


def test_repeated_blocks_are_units_and_alternatives_are_not():
    assert _names(plan_units(Model(), min_unit_numel=10_000)) == [ROOT]  # small ones stay with the root
    plan = plan_units(Model())
    assert _names(plan) == ["blocks.0", "blocks.1", "blocks.2", ROOT]
    assert set(plan.units[-1].parameters) == {
        f"{m}.{p}" for m in ("stem", "heads.a", "heads.b") for p in ("weight", "bias")
    }


class LanguageModel(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(2**14, 2**10)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(2**10)
        self.head = nn.Linear(2**10, 2**14, bias=False)
        self.others = nn.ModuleDict({"a": nn.Linear(2**10, 2**14), "b": nn.Linear(2**10, 2**14)})
        if tied:
            self.head.weight = self.tokens.weight


def test_large_embeddings_and_heads_are_units_and_not_recomputed():
    with torch.device("meta"):
        model, tied = LanguageModel(), LanguageModel(tied=True)
    plan = plan_units(model)
    assert set(_names(plan)) == {"tokens", "blocks.0", "blocks.1", "head", ROOT}
    assert {name.split(".")[0] for name in plan.units[-1].parameters} == {"norm", "others"}
    recomputes = ActivationCheckpointingConfig(target="full")
    assert {*recomputed_modules(recomputes, model, [unit.module for unit in plan.units[:-1]])} == {*model.blocks}
    assert _names(plan_units(tied)) == ["blocks.0", "blocks.1", ROOT]


def test_blocks_with_methods_beside_forward_give_way_to_their_children():
    names = _names(plan_units(Model(Coder)))
    assert "blocks.0" not in names
    assert "blocks.0.mlp.0" in names


def test_tied_parameter_goes_to_the_lowest_module_around_all_users():
    model = Model()
    model.blocks[0].mlp[0].weight = model.blocks[1].mlp[0].weight
    plan = plan_units(model)
    assert _names(plan) == ["blocks.2", ROOT]
    assert "blocks.0.mlp.0.weight" in plan.units[-1].parameters


def test_units_by_class_name_and_by_pattern():
    assert _names(plan_units(Model(), ["Block"]))[:-1] == ["blocks.0", "blocks.1", "blocks.2"]
    assert set(_names(plan_units(Model(), ["blocks.[02]", "stem"]))) == {"blocks.0", "blocks.2", "stem", ROOT}
    assert _names(plan_units(Model(), ["blocks.*"]))[:-1] == ["blocks.0", "blocks.1", "blocks.2"]  # not what is inside
    assert _names(plan_units(Model(), [])) == [ROOT]


@pytest.mark.parametrize("pattern", ["Blok", "layers.*", "blocks"])
def test_a_pattern_that_matches_nothing_names_what_would(pattern):
    with pytest.raises(ValueError, match=rf"units=\['{pattern}'\].*Block"):
        plan_units(Model(), [pattern])


def test_complex_parameters_are_replicated():
    model = nn.Linear(2, 2)
    model.spectrum = nn.Parameter(torch.ones(8, 8, dtype=torch.complex64))  # which NCCL cannot reduce
    assert list(plan_units(model).replicated) == ["spectrum"]


def test_norm_classes_can_be_kept_whole():
    model = Model()
    model.norm = nn.BatchNorm1d(4)
    assert list(plan_units(model, keep_full=[nn.BatchNorm1d]).replicated) == ["norm.weight", "norm.bias"]
