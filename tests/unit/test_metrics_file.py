"""One metrics.csv for a run, however often it is interrupted."""

from __future__ import annotations

import csv

from lightning_zero.app.metrics_file import MetricsFile


def rows(logger: MetricsFile) -> list[dict[str, str]]:
    with open(logger.path, newline="") as file:
        return list(csv.DictReader(file))


def test_rows_columns_and_hyperparameters(tmp_path):
    logger = MetricsFile(tmp_path / "run", flush_every_n_rows=2)
    logger.log_hyperparams({"width": 3})
    logger.log_metrics({"loss": 1.0}, 0)
    logger.log_metrics({"lr": 0.5}, 0)  # the same step, logged apart
    logger.log_metrics({"loss": 2.0}, 1)
    logger.log_metrics({"loss": 3.0, "val": 4.0}, 2)
    logger.finalize("success")
    assert rows(logger) == [
        {"step": "0", "loss": "1.0", "lr": "0.5", "val": ""},
        {"step": "1", "loss": "2.0", "lr": "", "val": ""},
        {"step": "2", "loss": "3.0", "lr": "", "val": "4.0"},
    ]
    assert "width: 3" in (tmp_path / "run" / "hparams.yaml").read_text()
    assert not list(tmp_path.rglob("*.new"))


def test_a_later_life_goes_on_and_drops_what_it_trains_again(tmp_path):
    first = MetricsFile(tmp_path)
    for step in range(6):
        first.log_metrics({"loss": float(step)}, step)
    first.save()
    with open(first.path, "a") as file:
        file.write("6")  # cut off by a kill
    second = MetricsFile(tmp_path)  # from the checkpoint of step 4
    for step in (4, 5, 6):
        second.log_metrics({"loss": 10.0 + step, "new": 1.0}, step)
    second.finalize("success")
    assert [(row["step"], row["loss"], row["new"]) for row in rows(second)] == [
        *((str(step), str(float(step)), "") for step in range(4)),
        *((str(step), str(10.0 + step), "1.0") for step in (4, 5, 6)),
    ]


def test_nothing_logged_leaves_nothing(tmp_path):
    logger = MetricsFile(tmp_path / "run")
    logger.finalize("success")
    assert not (tmp_path / "run").exists()
