"""Ranks that Kubeflow's PyTorchJob and Ray Train have started train as those that we start."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.integration.test_launch import PROGRAM, ROOT, expected, losses_of  # noqa: F401  (expected is a fixture)

pytestmark = pytest.mark.rest


def _in_pods(program: str, folder: Path) -> list[subprocess.CompletedProcess[str]]:
    """``program`` as in the two pods of a PyTorchJob, which differ in the variables that its operator sets."""
    (folder / "train.py").write_text(program)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    pods = []
    for rank in range(2):
        env = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        env |= {"KUBERNETES_PORT": "tcp://10.0.0.1:443", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env |= {"WORLD_SIZE": "2", "RANK": str(rank), "NUM_NODES": "2", "OMP_NUM_THREADS": "1"}
        pods.append(
            subprocess.Popen(
                [sys.executable, "train.py"], cwd=folder, env=env, text=True, stdout=-1, stderr=subprocess.STDOUT
            )
        )
    try:
        return [subprocess.CompletedProcess(pod.args, pod.wait(120), pod.communicate()[0]) for pod in pods]
    finally:
        for pod in pods:
            pod.kill()


IN_A_POD = PROGRAM.replace("num_nodes=nodes)", "num_nodes=nodes, plugins=[KubeflowEnvironment()])").replace(
    "import json", "from lightning.pytorch.plugins.environments import KubeflowEnvironment\nimport json", 1
)


def test_two_pods_of_a_pytorchjob(tmp_path: Path, expected) -> None:  # noqa: F811
    assert IN_A_POD.count("KubeflowEnvironment") == 2
    first, second = _in_pods(IN_A_POD, tmp_path)
    assert first.returncode == second.returncode == 0, first.stdout + second.stdout
    torch.testing.assert_close(losses_of(first.stdout), expected, rtol=1e-5, atol=1e-7)  # order of summation
    assert "LOSSES" not in second.stdout


def test_pods_that_the_trainer_does_not_count_are_refused_on_all_ranks(tmp_path: Path) -> None:
    for pod in _in_pods(IN_A_POD.replace("num_nodes=nodes,", "num_nodes=3,"), tmp_path):
        assert pod.returncode
        assert "KubeflowEnvironment started 2 ranks" in pod.stdout
        assert "use devices=1 and num_nodes=2" in pod.stdout


IN_A_WORKER = f"""
import json
import sys

import lightning as L
import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer


def train(config):
    sys.path.insert(0, {str(ROOT)!r})
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback, prepare_trainer

    from lightning_zero import ZeroStrategy
    from tests.integration.test_launch import InOrder

    class RayZeroStrategy(ZeroStrategy, RayDDPStrategy):
        pass

    module = InOrder()
    trainer = L.Trainer(
        accelerator="cpu", devices="auto", strategy=RayZeroStrategy(stage=3, units=["Linear"]), max_epochs=1,
        plugins=[RayLightningEnvironment()], callbacks=[RayTrainReportCallback()], logger=False,
        enable_checkpointing=False, enable_progress_bar=False,
    )
    prepare_trainer(trainer).fit(module)
    if trainer.is_global_zero:
        print("LOSSES", json.dumps(module.losses), trainer.world_size, flush=True)


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=True)
    result = TorchTrainer(train, scaling_config=ScalingConfig(num_workers=2)).fit()
    print("REPORTED", json.dumps(result.metrics), result.checkpoint is not None)
"""


def test_two_workers_of_ray_train(tmp_path: Path, expected) -> None:  # noqa: F811
    pytest.importorskip("ray.train", reason="ray is not installed: pip install -e '.[ray]'")
    (tmp_path / "train.py").write_text(IN_A_WORKER)
    env = {**os.environ, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0"}
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path, env=env, text=True, stdout=-1, stderr=subprocess.STDOUT, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    line = next(line for line in done.stdout.splitlines() if " LOSSES " in line)
    torch.testing.assert_close(losses_of(line[line.index("LOSSES") :]), expected, rtol=1e-5, atol=1e-7)
    (reported,) = [line for line in done.stdout.splitlines() if line.startswith("REPORTED")]
    assert reported.endswith("True")
    assert json.loads(reported.split(" ", 1)[1].rsplit(" ", 1)[0])["loss"] > 0
