"""``convert`` reads what raw DeepSpeed has saved: the weights, at every stage."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lightning_zero
from lightning_zero.checkpoint.convert import convert
from lightning_zero.engines.deepspeed import private
from lightning_zero.errors import CheckpointError

pytest.importorskip("deepspeed")
STEPS = 3


class Net(nn.Module):
    """A frozen parameter, a buffer, odd sizes that two ranks cannot share evenly, two parameter groups."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.frozen = nn.Parameter(torch.ones(7), requires_grad=False)
        self.last = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)) * self.frozen).square().mean()

    def groups(self) -> list[dict[str, Any]]:
        return [
            {"params": list(self.first.parameters()), "lr": 0.01, "weight_decay": 0.1},
            {"params": [*self.norm.parameters(), *self.last.parameters()], "lr": 0.02, "weight_decay": 0.0},
        ]


def _train_and_save(stage: int, folder: str) -> Any:
    """On every rank; rank 0 answers with the weights as DeepSpeed's public accessor has them."""
    torch.manual_seed(1)
    net = Net()
    dist.init_process_group("gloo")
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "overlap_comm": False, "stage3_param_persistence_threshold": 0},
    }
    with private.environment(torch.device("cpu")):
        deepspeed = private.prepare(torch.device("cpu"))
        from deepspeed.utils import safe_get_full_fp32_param

        engine, *_ = deepspeed.initialize(
            model=net, optimizer=torch.optim.AdamW(net.groups()), config=config, dist_init_required=False
        )
        torch.manual_seed(dist.get_rank())
        for _ in range(STEPS):
            engine.backward(engine(torch.randn(4, 5)))
            engine.step()
        engine.save_checkpoint(folder, client_state={"mine": "kept"})
        named = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
        weights = {name: safe_get_full_fp32_param(p).clone() for name, p in named}
        engine.destroy()
    return weights, net.norm.running_mean.clone()


def _reference() -> Net:
    """The same training in one process: gradients are the mean of both ranks'."""
    torch.manual_seed(1)
    net = Net()
    optimizer = torch.optim.AdamW(net.groups())
    batches = []
    for rank in (0, 1):
        torch.manual_seed(rank)
        batches.append([torch.randn(4, 5) for _ in range(STEPS)])
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in (0, 1):
            (net(batches[rank][step]) / 2).backward()
        optimizer.step()
    return net


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_are_those_of_the_run(ranks2: Any, tmp_path: Path, stage: int) -> None:
    want = _reference()
    weights, mean = ranks2(_train_and_save, stage, str(tmp_path / "theirs"))[0]
    for source in (tmp_path / "theirs", tmp_path / "theirs" / f"global_step{STEPS}"):
        target = tmp_path / "ours.ckpt"
        assert convert(str(source), str(target), weights_only=False) == "file"
        content = torch.load(target, weights_only=True)
        target.unlink()
        assert (content["mine"], content["global_step"]) == ("kept", STEPS)
        assert "optimizer_states" not in content
        assert set(content["state_dict"]) == set(Net().state_dict())
        for name, value in weights.items():
            assert torch.equal(content["state_dict"][name], value), name
        assert torch.equal(content["state_dict"]["norm.running_mean"], mean)
        net = Net()
        net.load_state_dict(content["state_dict"])
        for p, q in zip(net.parameters(), want.parameters(), strict=True):
            torch.testing.assert_close(p, q)
    sharded = tmp_path / "sharded"
    assert convert(str(tmp_path / "theirs"), str(sharded), "sharded", weights_only=False) == "sharded"
    loaded = lightning_zero.load_checkpoint(str(sharded))
    assert torch.equal(loaded["state_dict"]["first.weight"], weights["first.weight"])


def test_what_cannot_be_read(ranks2: Any, tmp_path: Path) -> None:
    theirs, target = tmp_path / "theirs", str(tmp_path / "ours.ckpt")
    ranks2(_train_and_save, 2, str(theirs))
    with pytest.raises(CheckpointError, match="--no-weights-only"):
        convert(str(theirs), target)
    next((theirs / f"global_step{STEPS}").glob("*rank_1_*_optim_states.pt")).unlink()
    with pytest.raises(CheckpointError, match="written completely"):
        convert(str(theirs), target, weights_only=False)
    shutil.rmtree(theirs / f"global_step{STEPS}")
    with pytest.raises(CheckpointError, match=r"checkpoint\.json is missing"):
        convert(str(theirs), target, weights_only=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["theirs"]
