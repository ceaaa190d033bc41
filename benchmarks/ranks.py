"""Host sockets, threads, memory, start and step of many ranks on one machine, beside Lightning's DDP.

    python benchmarks/ranks.py                       # 2, 4, ... 64 ranks; ten minutes
    python benchmarks/ranks.py --ranks 64            # one number
    python benchmarks/ranks.py docs/scaling.md       # replaces the table in that page
    python benchmarks/ranks.py --open-files 256      # under a limit of open files, as `ulimit -n 256`

The ranks are forked after importing, so that they share their imports. The model is tiny: a step is what ranks say to
each other and wait for. Ranks outnumber the cores, so times are only to be compared with those beside them.
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
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy

BEGIN, END = "<!-- table: python benchmarks/ranks.py docs/scaling.md -->", "<!-- end of table of ranks -->"
RANKS = (2, 4, 8, 16, 32, 64)
STEPS, WARM_UP = 40, 10
DIGITS = {"sockets": 0, "threads": 0, "mb": 0, "of a processor, s": 2}


class Tiny(L.LightningModule):
    def __init__(self, folder: str, begun: float) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        self.folder, self.begun, self.at = folder, begun, {}

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.at[index] = time.monotonic()
        if index == 0:
            self.used = time.process_time()
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
        }

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-3)


def _is_open(number: str) -> bool:
    return os.path.exists(f"/proc/self/fd/{number}") or os.path.islink(f"/proc/self/fd/{number}")


def _fit(name: str, ranks: int, folder: str) -> None:
    """In a process of its own: forks the ranks."""
    torch.set_num_threads(1)
    strategies: dict[str, Any] = {
        "ddp": lambda: DDPStrategy(start_method="fork"),
        "zero1": lambda: ZeroStrategy(stage=1, start_method="fork"),
        "zero3": lambda: ZeroStrategy(stage=3, start_method="fork"),
        "zero3, torch": lambda: ZeroStrategy(stage=3, transport="torch", start_method="fork"),
        "zero3, groups": lambda: ZeroStrategy(stage=3, shard_size=max(ranks // 8, 2), start_method="fork"),
    }
    trainer = L.Trainer(
        accelerator="cpu", devices=ranks, strategy=strategies[name](), max_steps=STEPS, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Tiny(folder, time.monotonic()), DataLoader(torch.randn(ranks * STEPS * 4, 16), batch_size=4))


def measure(name: str, ranks: int, open_files: int | None) -> dict[str, float]:
    """The largest of all ranks' figures."""

    def limit() -> None:
        if open_files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--one", name, "--ranks", str(ranks), "--folder", folder]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, preexec_fn=limit, capture_output=True, text=True, timeout=900, check=False, env=env
        )
        seen = [json.loads(each.read_text()) for each in Path(folder).glob("*.json")]
    if done.returncode or len(seen) != ranks:
        raise RuntimeError(
            f"{name} on {ranks} ranks ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
        )
    return {key: max(each[key] for each in seen) for key in seen[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="?", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--strategies", nargs="+", default=["ddp", "zero1", "zero3", "zero3, groups"])
    parser.add_argument("--open-files", type=int)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        _fit(args.one, args.ranks[0], args.folder)
        return
    rows: list[str] = []
    for ranks in args.ranks:
        for name in args.strategies:
            if name == "zero3, groups" and ranks < 4:
                continue
            seen = measure(name, ranks, args.open_files)
            if not rows:
                rows += [f"| ranks | strategy | {' | '.join(seen)} |", "|---" * (len(seen) + 2) + "|"]
            figures = (f"{value:.{DIGITS.get(key, 1)}f}" for key, value in seen.items())
            rows.append(f"| {ranks} | {name} | {' | '.join(figures)} |")
            print(rows[-1], flush=True)
    if args.page:
        text = args.page.read_text(encoding="utf-8")
        table = "\n".join([BEGIN, *rows, END])
        args.page.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: table, text, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()
