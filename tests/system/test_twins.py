"""Scripts and packages that say ``pytorch_lightning`` train as those that say ``lightning`` do."""

from __future__ import annotations

import subprocess
import sys

import pytest

FIRST = {
    "theirs": "import pytorch_lightning, lightning_zero",
    "ours": "import lightning_zero, pytorch_lightning",
}
SAME = """
import importlib, pkgutil, pickle, sys
import lightning as L
import lightning.fabric, lightning.pytorch as one
import lightning_fabric, pytorch_lightning as two
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from pytorch_lightning.strategies import ddp
from lightning_zero import ZeroStrategy
assert one is two and lightning_fabric is lightning.fabric
assert two.Trainer is L.Trainer and ddp.DDPStrategy is DDPStrategy and issubclass(ZeroStrategy, DDPStrategy)
assert "zero3" in StrategyRegistry.available_strategies()
for name in ("callbacks.lr_monitor", "cli", "demos.boring_classes", "loops.fit_loop", "utilities.rank_zero"):
    assert importlib.import_module(f"lightning.pytorch.{name}") is importlib.import_module(f"pytorch_lightning.{name}")
assert two.__spec__.name == two.__name__, two.__spec__
assert importlib.util.find_spec("pytorch_lightning.nothing_of_that_name") is None
assert pickle.loads(pickle.dumps(two.LightningModule)) is L.LightningModule
strategy = two.Trainer(strategy="zero3", accelerator="cpu", devices=2, logger=False).strategy
assert isinstance(strategy, ZeroStrategy), strategy
"""


@pytest.mark.parametrize("first", [pytest.param(words, id=name) for name, words in FIRST.items()])
def test_both_names_mean_the_same_classes(first):
    subprocess.run([sys.executable, "-c", first + SAME], check=True)


def test_trainers_of_another_lightning_are_refused_by_name():
    code = "import pytorch_lightning, lightning, lightning_zero\n"
    code += "pytorch_lightning.Trainer(strategy='zero3', accelerator='cpu')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert "pytorch_lightning.Trainer(strategy='zero3'): lightning 2" in said
    assert "Write `import lightning_zero` in front of" in said
