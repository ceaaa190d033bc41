"""Measures sockets, threads, memory, start-up and step of many ranks on one machine, next to Lightning's DDP.

    python benchmarks/ranks.py                       # 2, 4, ... 64 ranks; ten minutes
    python benchmarks/ranks.py --ranks 64            # one number
    python benchmarks/ranks.py docs/scaling.md       # replaces the table in that page
    python benchmarks/ranks.py docs/scaling.md --units Linear        # its other table: each layer a unit
    python benchmarks/ranks.py --open-files 256      # under a limit of open files, as `ulimit -n 256`
    python benchmarks/ranks.py --save sharded        # counted after a save during the run

Ranks are forked after importing, so that they share their imports. The model is tiny, so a step is messages and
waiting. Ranks outnumber the cores, so compare times only within the same number of ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from lightning_zero.comm import tree
from lightning_zero.comm.peer_memory import PeerMemory

END = "<!-- end of table of ranks -->"
RANKS = (2, 4, 8, 16, 32, 64)
STEPS, WARM_UP = 40, 10
DIGITS = {"sockets": 0, "threads": 0, "mb": 0, "of a processor, s": 2}
BESIDE = "messages per step"


class Messages:
    """Counts what this rank sends beside shards and gradients: agreements, told apart by their tags."""

    def __init__(self) -> None:
        self.sent = 0
        isend, send = dist.isend, PeerMemory.send

        def counted(*args: Any, tag: int = 0, **kwargs: Any) -> Any:
            self.sent += tag >= tree.FIRST_TAG
            return isend(*args, tag=tag, **kwargs)

        def counted_on_this_host(peers: PeerMemory, rank: int, kind: int, content: bytes) -> None:
            self.sent += kind >= tree.FIRST_TAG
            send(peers, rank, kind, content)

        dist.isend, PeerMemory.send = counted, counted_on_this_host  # type: ignore[method-assign]


class Tiny(L.LightningModule):
    def __init__(self, folder: str, begun: float) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        self.folder, self.begun, self.at = folder, begun, {}
        self.messages, self.sent = Messages(), 0

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.at[index] = time.monotonic()
        if index == 0:
            self.used = time.process_time()
        if index == WARM_UP:
            self.sent = self.messages.sent
        if index == STEPS - 1:
            Path(self.folder, f"{self.global_rank}.json").write_text(json.dumps(self.seen()))
        return self.net(batch).square().mean()

    def seen(self) -> dict[str, float]:
        open_files = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if _is_open(n)]
        rollup = Path("/proc/self/smaps_rollup").read_text()
        return {
            "sockets": sum(target.startswith("socket:") for target in open_files),
            "threads": len(os.listdir("/proc/self/task")),
            "mb": float(re.findall(r"Private_Dirty:\s+(\d+) kB", rollup)[0]) / 1e3,
            "first step, s": self.at[0] - self.begun,
            "of a processor, s": self.used,
            "ms per step": (self.at[STEPS - 1] - self.at[WARM_UP]) / (STEPS - 1 - WARM_UP) * 1e3,
            BESIDE: (self.messages.sent - self.sent) / (STEPS - 1 - WARM_UP),
        }

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-3)


def _is_open(number: str) -> bool:
    return os.path.exists(f"/proc/self/fd/{number}") or os.path.islink(f"/proc/self/fd/{number}")


def _fit(name: str, ranks: int, folder: str, save: str | None, units: list[str] | None) -> None:
    """Forks the ranks, in a separate process."""
    torch.set_num_threads(1)
    given = {"units": units, "checkpoint": save}
    settings: dict[str, Any] = {"start_method": "fork", **{key: value for key, value in given.items() if value}}
    strategies: dict[str, Any] = {
        "ddp": lambda: DDPStrategy(start_method="fork"),
        "zero1": lambda: ZeroStrategy(stage=1, **settings),
        "zero3": lambda: ZeroStrategy(stage=3, **settings),
        "zero3, torch": lambda: ZeroStrategy(stage=3, transport="torch", **settings),
        "zero3, groups": lambda: ZeroStrategy(stage=3, shard_size=max(ranks // 8, 2), **settings),
    }
    saves = [ModelCheckpoint(f"{folder}/checkpoints", every_n_train_steps=STEPS // 2)] if save else []
    trainer = L.Trainer(
        accelerator="cpu", devices=ranks, strategy=strategies[name](), max_steps=STEPS, logger=False,
        enable_checkpointing=bool(saves), callbacks=saves, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Tiny(folder, time.monotonic()), DataLoader(torch.randn(ranks * STEPS * 4, 16), batch_size=4))


def measure(
    name: str, ranks: int, open_files: int | None = None, save: str | None = None, units: list[str] | None = None
) -> dict[str, float]:
    """The largest of all ranks' figures, and the mean number of messages."""

    def limit() -> None:
        if open_files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--one", name, "--ranks", str(ranks), "--folder", folder]
        command += [*(["--save", save] if save else []), *(["--units", *units] if units else [])]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, preexec_fn=limit, capture_output=True, text=True, timeout=900, check=False, env=env
        )
        seen = [json.loads(each.read_text()) for each in Path(folder).glob("*.json")]
    if done.returncode or len(seen) != ranks:
        raise RuntimeError(
            f"{name} on {ranks} ranks ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
        )
    most = {key: max(each[key] for each in seen) for key in seen[0]}
    return {**most, f"{BESIDE}, mean": sum(each[BESIDE] for each in seen) / ranks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="?", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--strategies", nargs="+", default=["ddp", "zero1", "zero3", "zero3, groups"])
    parser.add_argument("--open-files", type=int)
    parser.add_argument("--save", choices=("file", "sharded"))
    parser.add_argument("--units", nargs="+", help="without: those that the strategies choose, here the root alone")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        _fit(args.one, args.ranks[0], args.folder, args.save, args.units)
        return
    rows: list[str] = []
    for ranks in args.ranks:
        for name in args.strategies:
            if name == "zero3, groups" and ranks < 4:
                continue
            seen = measure(name, ranks, args.open_files, args.save, args.units)
            if not rows:
                rows += [f"| ranks | strategy | {' | '.join(seen)} |", "|---" * (len(seen) + 2) + "|"]
            figures = [
                "–" if name == "ddp" and BESIDE in key else f"{value:.{DIGITS.get(key, 1)}f}"
                for key, value in seen.items()
            ]
            rows.append(f"| {ranks} | {name} | {' | '.join(figures)} |")
            print(rows[-1], flush=True)
    if args.page:
        text = args.page.read_text(encoding="utf-8")
        with_units = f" --units {' '.join(args.units)}" if args.units else ""
        begin = f"<!-- table: python benchmarks/ranks.py docs/scaling.md{with_units} -->"
        table = "\n".join([begin, *rows, END])
        args.page.write_text(re.sub(f"{begin}.*?{END}", lambda _: table, text, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()
