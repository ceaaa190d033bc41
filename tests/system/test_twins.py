"""Scripts and packages that say ``pytorch_lightning`` train as those that say ``lightning`` do."""

from __future__ import annotations

import sys

from tests.system.commands import run

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


def test_both_names_mean_the_same_classes_whichever_is_first(tmp_path):
    theirs, ours = "import pytorch_lightning, lightning_zero", "import lightning_zero, pytorch_lightning"
    assert run(sys.executable, "-c", theirs + SAME, cwd=tmp_path).returncode == 0
    assert run("-c", ours + SAME, fork="all", cwd=tmp_path).returncode == 0


def test_trainers_of_another_lightning_are_refused_by_name(tmp_path):
    code = "import pytorch_lightning, lightning, lightning_zero\n"
    code += "pytorch_lightning.Trainer(strategy='zero3', accelerator='cpu')"
    done = run(sys.executable, "-c", code, cwd=tmp_path)
    assert done.returncode == 1
    assert "pytorch_lightning.Trainer(strategy='zero3'): " in done.stdout.splitlines()[-1]
