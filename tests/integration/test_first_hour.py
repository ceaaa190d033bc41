"""What a new user types in the first hour, from the shell."""

from __future__ import annotations

import csv
import json
import subprocess
import sys

import pytest

from tests.integration.commands import SMALL, console_script, run, run_imported
from tests.integration.test_readme import MY_PACKAGE

pytestmark = pytest.mark.rest

MODULE = "-m", "lightning_zero"
ONE_RUN = "trainer.log_every_n_steps=1", "hydra.run.dir=run"


def test_a_module_in_the_working_folder_is_found_in_every_rank(tmp_path):
    """By the console script, whose own folder is what Python puts on sys.path, and with a job that changes folder."""
    (tmp_path / "my_package.py").write_text(MY_PACKAGE)
    done = run(
        *(console_script(), "fit", "model=custom", "model._target_=my_package.MyModule"),
        *("data=custom", "data._target_=my_package.MyData", "trainer.devices=2", "trainer.max_steps=3"),
        *("callbacks=none", "trainer.enable_progress_bar=false", "hydra.run.dir=run", "hydra.job.chdir=true"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout
    assert "ModuleNotFoundError" not in done.stdout
    assert json.loads((tmp_path / "run" / "result.json").read_text())["ranks"] == 2


def test_an_import_error_behind_a_target_is_named(tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    done = run_imported("fit", "model=custom", "model._target_=broken.MyModule", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout.count("No module named 'nothing_of_that_name'") == 1
    assert "HYDRA_FULL_ERROR" not in done.stdout
    assert "Traceback" not in done.stdout


OWN_APP = """
import hydra

@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg):
    if cfg.get("fails"):
        raise SystemExit(3)
    print("stage", cfg.strategy.get("stage"))
    return 1.5

main()
"""


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            '{"zero_optimizaton": {"stage": 2}}',
            "zero_optimizaton in ds.json is not a setting of DeepSpeed's; did you mean",
        ),
        ('{"zero_optimization": {"stage": 2, "offload_optimizer": {"devic": "cpu"}}}', "did you mean device?"),
    ],
)
def test_a_misspelled_key_of_a_deepspeed_file_is_one_message(content, said, tmp_path):
    pytest.importorskip("deepspeed")
    (tmp_path / "ds.json").write_text(content)
    words = "strategy/engine=deepspeed", "strategy.deepspeed_config=ds.json", "trainer.devices=2"
    done = run_imported("fit", *words, cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert said in done.stdout
    assert "Traceback" not in done.stdout
    assert len(done.stdout.splitlines()) <= 8, done.stdout


def test_switches_of_the_trainer_leave_out_what_they_switch_off(tmp_path):
    """The default callbacks hold a progress bar and checkpoints; beside the switches Lightning refuses them."""
    switches = "trainer.enable_progress_bar=false", "trainer.enable_checkpointing=false", "trainer.logger=false"
    callbacks = "callbacks=[default,rich_bar,best_checkpoint,lr_monitor]"
    done = run(*MODULE, "fit", callbacks, *switches, *SMALL, *ONE_RUN, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    for switch in switches:
        assert done.stdout.count(f"{switch}: left out ") == 1, done.stdout
    folder = tmp_path / "run"
    assert (folder / "result.json").is_file()
    assert not list(folder.rglob("*.ckpt"))
    assert not (folder / "metrics.csv").exists()


@pytest.mark.parametrize("asks", [False, True])
def test_a_sweep_of_an_own_app_ends_with_a_table_only_if_asked(asks, tmp_path):
    """The app builds no Trainer: a job is finished because it has returned."""
    (tmp_path / "app.py").write_text(OWN_APP)
    (tmp_path / "conf").mkdir()
    asked = "  - override hydra/callbacks: compare_runs\n" if asks else ""
    config = f"defaults:\n  - strategy: zero3\n  - _self_\n{asked}hydra:\n  searchpath: [pkg://lightning_zero.conf]\n"
    (tmp_path / "conf" / "config.yaml").write_text(config)
    done = run("app.py", "-m", "strategy=zero1,zero2", "hydra.sweep.dir=sweep", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "stage 2" in done.stdout
    assert "did not finish" not in done.stdout
    assert ("\njob " in done.stdout) == asks
    if asks:
        table = done.stdout.split("\njob ")[-1].splitlines()
        assert table[0].split()[-1] == "returned"
        assert [line.split()[-1] for line in table[2:4]] == ["1.5", "1.5"]
    assert (tmp_path / "sweep" / "comparison.txt").exists() == asks


def test_a_job_that_ended_badly_after_its_fit_did_not_finish(tmp_path):
    from lightning_zero.app.sweep import RESULT, compare

    for name, record in (("0", {"metrics": {"loss": 1.0}}), ("1", {"metrics": {}, "finished": True})):
        (tmp_path / name / ".hydra").mkdir(parents=True)
        (tmp_path / name / ".hydra" / "overrides.yaml").write_text(f"- a={name}\n")
        facts = {"ranks": 2, "steps": 3, "seconds": 1.0} if name == "0" else {}
        (tmp_path / name / RESULT).write_text(json.dumps({**record, **facts}))
    lines = compare(tmp_path).splitlines()
    assert "did not finish" in lines[2]
    assert "did not finish" not in lines[3]


def test_a_missing_package_names_its_extra(tmp_path):
    """With the brackets quoted, or zsh takes them for a pattern."""
    overrides = "model=llama_70b", "data=none", "trainer=gpu", "plan.device_memory_gib=80", "plan.batch=[1,9]"
    without = "import lightning, runpy, sys; sys.modules['transformers'] = None; "  # which lightning imports itself
    done = run(
        "-c", f"{without}runpy.run_module('lightning_zero', run_name='__main__')", "plan", *overrides, cwd=tmp_path
    )
    assert done.returncode == 2, done.stdout
    assert "pip install 'lightning-zero[examples]'" in done.stdout
    assert "Traceback" not in done.stdout


def test_help_through_a_pipe_that_closes(tmp_path):
    command = f"{sys.executable} -m lightning_zero fit --help | head -n 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 141)
    assert "BrokenPipe" not in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.parametrize(
    ("launcher", "wanted"),
    [
        ([], "launcher.tasks_per_node=2"),
        (["launcher.gpus_per_node=4"], "launcher.gpus_per_node=2"),
    ],
)
def test_slurm_names_the_launchers_setting(launcher, wanted, tmp_path):
    done = run_imported("submit", "--dry-run", "launcher=slurm", *launcher, "trainer.devices=2", cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert wanted in done.stdout
    nodes = run_imported("submit", "--dry-run", "launcher=slurm", "trainer.num_nodes=3", cwd=tmp_path)
    assert "launcher.nodes=3" in nodes.stdout


def test_callbacks_loggers_name_and_tags(tmp_path):
    done = run(
        *(*MODULE, "fit", "callbacks=[default,early_stopping,best_checkpoint,rich_bar,lr_monitor]", "logger=csv"),
        *(*(s for s in SMALL if "max_steps" not in s), "trainer.max_epochs=2", "trainer.limit_train_batches=4"),
        *("trainer.log_every_n_steps=1", "task_name=mine", "tags=[a,b]", "hydra.run.dir=run"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout
    folder = tmp_path / "run"
    header = (folder / "metrics.csv").read_text().splitlines()[0]
    assert {"step", "loss", "val_loss", "lr-AdamW/pg1"} <= set(header.split(","))
    assert list((folder / "checkpoints").glob("best-*.ckpt"))
    assert (folder / "checkpoints" / "last.ckpt").is_file()
    assert (folder / "mine.log").is_file()
    assert "tags:\n- a\n- b" in (folder / "config.yaml").read_text()


def test_an_interrupted_runs_metrics_stay_in_one_file(tmp_path):
    """Two lives of a run in one folder, the second from a checkpoint that lies before the first one's end."""
    small = [
        *(s for s in SMALL if "max_steps" not in s),
        "callbacks.progress=null",
        "trainer.enable_progress_bar=false",
    ]
    small += ["trainer.log_every_n_steps=1", "hydra.run.dir=run", "+callbacks.checkpoint.every_n_train_steps=2"]
    first = run(*MODULE, "fit", *small, "trainer.max_steps=5", "callbacks.checkpoint.save_last=null", cwd=tmp_path)
    assert first.returncode == 0, first.stdout
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("*step=4.ckpt")
    done = run(*MODULE, "fit", *small, "trainer.max_steps=7", f"ckpt_path='{checkpoint}'", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert not list((tmp_path / "run").rglob("version_*"))
    with open(tmp_path / "run" / "metrics.csv", newline="") as file:
        steps = [row["step"] for row in csv.DictReader(file) if row["loss"]]
    assert steps == [str(step) for step in range(7)]


@pytest.mark.parametrize("logger", ["none", pytest.param("csv", marks=pytest.mark.full)])
def test_the_last_metrics_are_there_with_any_logger(logger, tmp_path):
    done = run(*MODULE, "fit", f"logger={logger}", *SMALL, "callbacks=none", *ONE_RUN, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert json.loads((tmp_path / "run" / "result.json").read_text())["metrics"]["loss"] > 0
    assert (tmp_path / "run" / "metrics.csv").exists() == (logger == "csv")


@pytest.mark.parametrize(
    ("logger", "package", "more", "file"),
    [
        ("tensorboard", "tensorboard", (), "tensorboard/events.out.tfevents.*"),
        ("many", "tensorboard", (), "metrics.csv"),
        ("wandb", "wandb", ("logger.wandb.offline=true",), "wandb/offline-run-*/run-*.wandb"),
        ("mlflow", "mlflow", (), "mlflow.db"),
    ],
)
def test_loggers_of_other_packages_write_into_the_run_folder(logger, package, more, file, tmp_path):
    pytest.importorskip(package, reason=f"{package} is not installed")
    words = f"logger={logger}", "trainer.devices=2", "callbacks=none", "trainer.enable_progress_bar=false"
    done = run(*MODULE, "fit", *words, *more, *SMALL, *ONE_RUN, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert len(list((tmp_path / "run").glob(file))) == 1, done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("fast", "Running in `fast_dev_run` mode"),
        ("profile", "FIT Profiler Report"),
        pytest.param("limit", "`Trainer.fit` stopped", marks=pytest.mark.full),
        pytest.param("overfit", "`Trainer.fit` stopped", marks=pytest.mark.full),
    ],
)
def test_debugging(choice, said, tmp_path):
    small = [s for s in SMALL if "max_steps" not in s]
    done = run(*MODULE, "fit", f"debug={choice}", *small, "trainer.max_epochs=1", "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert said in done.stdout


def test_a_search_returns_its_metric(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="hydra-optuna-sweeper is not installed")
    done = run(
        *(*MODULE, "fit", "hparams_search=optuna", "hydra.sweeper.n_trials=2", "hydra.sweep.dir=sweep"),
        *(*(s for s in SMALL if "max_steps" not in s), "trainer.max_epochs=1", "trainer.limit_train_batches=2"),
        "callbacks=none",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout
    found = (tmp_path / "sweep" / "optimization_results.yaml").read_text()
    value = float(found.split("best_value: ")[1].split()[0])
    records = [json.loads((tmp_path / "sweep" / str(i) / "result.json").read_text()) for i in range(2)]
    assert value == pytest.approx(min(record["metrics"]["val_loss"] for record in records))


def test_an_unknown_metric_is_named(tmp_path):
    done = run(*MODULE, "fit", "optimized_metric=vall", *SMALL, "callbacks=none", "logger=none", cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert "optimized_metric='vall'" in done.stdout
    assert "loss" in done.stdout.split("it has logged")[1]


@pytest.mark.timeout(600)
def test_init_makes_a_project_that_trains_and_tests_itself(tmp_path):
    folder = tmp_path / "mine"
    done = run_imported("init", str(folder), cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    done = run("train.py", "trainer.max_epochs=1", "hydra.run.dir=run", cwd=folder)
    assert done.returncode == 0, done.stdout
    record = json.loads((folder / "run" / "result.json").read_text())
    assert record["ranks"] == 2
    assert record["metrics"]["val_accuracy"] > 0.6
    assert (folder / "run" / "metrics.csv").is_file()
    wrong = run("train.py", "strategy.stage=4", cwd=folder)
    assert "strategy: stage=4: use one of 1, 2, 3." in wrong.stdout
    assert "Traceback" not in wrong.stdout
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_project.py", cwd=folder, timeout_seconds=400)
    assert done.returncode == 0, done.stdout
    assert subprocess.run(["bash", "-n", str(folder / "train.sbatch")], check=False).returncode == 0
    again = run_imported("init", str(folder), cwd=tmp_path)
    assert again.returncode == 2
    assert "give a new folder's name" in again.stdout


def test_an_interrupted_runs_checkpoint_goes_when_the_run_is_done(tmp_path, monkeypatch):
    from lightning_zero.launch import restart

    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JOB_NAME", "mine")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.chdir(tmp_path)
    paths = [tmp_path / "checkpoints" / name for name in ("last.ckpt", restart.PREEMPTED)]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
        restart.note({"optimizer_states": [], "global_step": 1}, path)
    restart.forget()
    assert [path.exists() for path in paths] == [True, False]
    assert not (tmp_path / restart.FOLDER).exists()
