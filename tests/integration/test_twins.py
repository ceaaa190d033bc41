"""Scripts and packages that say ``pytorch_lightning`` train as those that say ``lightning`` do."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.integration.commands import console_script, run
from tests.integration.test_readme import MY_PACKAGE

pytestmark = pytest.mark.skipif(find_spec("pytorch_lightning") is None, reason="pytorch-lightning is not installed")

FIRST = {
    "theirs": "import pytorch_lightning, lightning_zero",
    "ours": "import lightning_zero, pytorch_lightning",
    "lightning's": "import lightning, lightning_zero, pytorch_lightning",
    "a class of ours": "from lightning_zero import ZeroStrategy; import pytorch_lightning",
    "their fabric": "import lightning_fabric, lightning_zero, lightning, pytorch_lightning",
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


@pytest.mark.sampled
@pytest.mark.parametrize("first", [pytest.param(words, id=name) for name, words in FIRST.items()])
def test_both_names_mean_the_same_classes(first):
    subprocess.run([sys.executable, "-c", first + SAME], check=True)


def _refusal(before: str) -> str:
    code = f"{before}\nimport pytorch_lightning\npytorch_lightning.Trainer(strategy='zero3', accelerator='cpu')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    return done.stderr.splitlines()[-1]


@pytest.mark.rest
def test_trainers_of_another_lightning_are_refused_by_name():
    said = _refusal("import pytorch_lightning, lightning, lightning_zero")
    assert "pytorch_lightning.Trainer(strategy='zero3'): lightning 2" in said
    assert "Write `import lightning_zero` in front of" in said
    other = "from importlib import metadata\nreal = metadata.version\n"
    other += "metadata.version = lambda name: '2.5.0' if name == 'pytorch-lightning' else real(name)\n"
    for order in (
        "lightning_zero, lightning",
        "lightning_zero, pytorch_lightning",
        "pytorch_lightning, lightning_zero",
    ):
        said = _refusal(f"{other}import {order}")
        assert "and pytorch_lightning 2.5.0 are both imported" in said, order
        assert "pip install pytorch-lightning==2" in said


THEIRS = """
import sys
{imports}
import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.demos.boring_classes import BoringModel

if __name__ == "__main__":
    pl.seed_everything(1, verbose=False)
    strategy, keep = sys.argv[1], ModelCheckpoint(sys.argv[1], filename="last")
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_steps=3, callbacks=[keep], **quiet)
    module = BoringModel()
    trainer.fit(module)
    trainer.test(module, ckpt_path=keep.best_model_path, verbose=False)
    if trainer.is_global_zero:
        print("summed", BoringModel.load_from_checkpoint(keep.best_model_path).layer.weight.sum().item())
"""


@pytest.mark.rest
@pytest.mark.parametrize("imports", ["import pytorch_lightning, lightning_zero", "import lightning_zero"])
def test_their_script_trains_as_under_ddp(imports, tmp_path):
    (tmp_path / "script.py").write_text(THEIRS.format(imports=imports))
    summed = {}
    for strategy in ("ddp", "zero3"):
        done = run("script.py", strategy, cwd=tmp_path)
        assert done.returncode == 0, done.stdout
        (summed[strategy],) = (line for line in done.stdout.splitlines() if line.startswith("summed"))
    assert summed["ddp"] == summed["zero3"]


@pytest.mark.rest
def test_their_module_trains_from_our_command(tmp_path):
    package = MY_PACKAGE.replace("import lightning as L", "import pytorch_lightning as L")
    assert "pytorch_lightning" in package
    (tmp_path / "my_package.py").write_text(package)
    done = run(
        *(console_script(), "fit", "model=custom", "model._target_=my_package.MyModule"),
        *("data=custom", "data._target_=my_package.MyData", "trainer.devices=2", "trainer.max_steps=3"),
        *("callbacks=none", "trainer.enable_progress_bar=false"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout
