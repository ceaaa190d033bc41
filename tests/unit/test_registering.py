"""What is wrong with a name is said, with those that there are."""

from __future__ import annotations

import lightning as L
import pytest

import lightning_zero


@pytest.mark.parametrize("name", ["zer3", "zero4", "zero3-offload", "Zero_3"])
def test_a_misspelled_name_is_met_with_ours(name):
    with pytest.raises(ValueError, match=r"did you mean 'zero.*lightning_zero has 'zero1'"):
        L.Trainer(strategy=name, accelerator="cpu")


def test_other_names_are_lightnings_to_refuse():
    with pytest.raises(ValueError, match="invalid strategy name"):
        L.Trainer(strategy="nothing_like_it", accelerator="cpu")
    assert L.Trainer(strategy="ddp", accelerator="cpu", devices=2, logger=False).strategy is not None


def test_fabric_is_refused_by_name():
    with pytest.raises(ValueError, match=r"Fabric cannot run them. Use lightning.Trainer\(strategy='zero3'\)"):
        L.Fabric(strategy="zero3", accelerator="cpu")
    assert lightning_zero.__version__
