"""Published models of transformers train as under DDP; ``make models`` trains many more."""

from __future__ import annotations

import pytest

from tests.helpers import models, zoo

pytest.importorskip("transformers")
FSDP2 = {"stage": 3, **zoo.BLOCKS}


@pytest.mark.parametrize(
    ("key", "strategies"),
    [("transformers/llama", [FSDP2, {"stage": 3, "engine": "deepspeed"}]), ("transformers/t5", [FSDP2])],
)
def test_published_models_equal_ddp(ranks2, key, strategies):
    reference = ranks2(models.train, key, zoo.UNUSED)
    for strategy in strategies:
        assert zoo.difference(ranks2(models.train, key, strategy), reference).largest <= models.ROWS[key].tolerance
