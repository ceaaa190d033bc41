"""What a new user types in the first hour, beside what test_readme.py types."""

from __future__ import annotations

import runpy
import subprocess

from tests.system.commands import SMALL, run
from tests.system.test_readme import MY_PACKAGE

WITHOUT_STEPS = [word for word in SMALL if not word.startswith("trainer.max_steps")]


def test_a_module_in_the_working_folder_is_found_in_every_rank(tmp_path):
    """By the console script, whose own folder is what Python puts on sys.path, with a job that changes folder, in a
    package that says ``pytorch_lightning``."""
    package = MY_PACKAGE.replace("import lightning as L", "import pytorch_lightning as L")
    assert package != MY_PACKAGE
    (tmp_path / "my_package.py").write_text(package)
    done = run(
        *("fit", "model=custom", "model._target_=my_package.MyModule"),
        *("data=custom", "data._target_=my_package.MyData", "trainer.devices=2", "trainer.max_steps=3"),
        *("callbacks=none", "trainer.enable_progress_bar=false", "hydra.run.dir=run", "hydra.job.chdir=true"),
        fork="first",
        cwd=tmp_path,
    )
    assert done.returncode == 0
    assert (tmp_path / "run" / "ranks" / "rank1.log").is_file()


def test_callbacks_loggers_name_and_tags(tmp_path):
    done = run(
        *("fit", "callbacks=[default,early_stopping,best_checkpoint,rich_bar,lr_monitor]", "logger=csv"),
        *(*WITHOUT_STEPS, "trainer.max_epochs=2", "trainer.limit_train_batches=4"),
        *("trainer.log_every_n_steps=1", "task_name=mine", "tags=[a,b]", "hydra.run.dir=run"),
        fork="all",
        cwd=tmp_path,
    )
    assert done.returncode == 0
    folder = tmp_path / "run"
    header = (folder / "version_0" / "metrics.csv").read_text().splitlines()[0]
    assert {"step", "loss", "val_loss", "lr-AdamW/pg1"} <= set(header.split(","))
    assert list((folder / "checkpoints").glob("best-*.ckpt"))
    assert (folder / "checkpoints" / "last.ckpt").is_file()
    assert (folder / "mine.log").is_file()
    assert "tags:\n- a\n- b" in (folder / ".hydra" / "config.yaml").read_text()


def test_a_project_made_by_init_passes_its_own_test(tmp_path, monkeypatch):
    folder = tmp_path / "mine"
    assert run("init", str(folder), fork="all", cwd=tmp_path).returncode == 0
    assert subprocess.run(["bash", "-n", str(folder / "train.sbatch")], check=False).returncode == 0
    again = run("init", str(folder), fork="all", cwd=tmp_path)
    assert again.returncode == 2
    assert "give another folder" in again.stdout

    def without_imports(command, *, check, cwd, **options):
        done = run(*command[1:], fork="all", cwd=cwd)
        assert done.returncode == 0 or not check
        return done

    test = runpy.run_path(str(folder / "test_project.py"))["test_zero3_on_two_processes_is_ddp_on_two"]
    monkeypatch.setattr(subprocess, "run", without_imports)
    test(tmp_path)
