"""Measures ``offload="nvme"`` on one disk: time, memory, and bytes read and written.

    python benchmarks/offload_files.py docs/offload.md        # fills in the page's table, about 5 minutes

Two CPU ranks train the same linear layers with AdamW in fp32 at stage 3; the contenders take turns in each round. Files
also run *short of memory*: their pages are dropped from memory before each forward, backward and optimizer step, so
that every part of a step reads the disk.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.helpers import disk
from tests.helpers.ranks import RankPool

BEGIN, END = "<!-- measured on a disk -->", "<!-- /measured on a disk -->"
RANKS = 2


def contenders() -> dict[str, dict[str, Any]]:
    """Name -> keywords of :func:`tests.helpers.disk.steps`."""
    fsdp2 = {"stage": 3, "min_unit_numel": 1}
    files = {"target": "nvme"}
    return {
        "fsdp2, cpu": {"settings": {**fsdp2, "offload": {"target": "cpu"}}},
        "fsdp2, nvme": {"settings": {**fsdp2, "offload": files}},
        "fsdp2, nvme, short of memory": {"settings": {**fsdp2, "offload": files}, "short": True},
    }


def measure(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Name -> medians over the rounds, of the rank that needed most."""
    found: dict[str, list[dict[str, float]]] = {}
    with RankPool() as pool:
        for _ in range(options.rounds):
            for name, job in contenders().items():
                if options.only and not any(word in name for word in options.only):
                    continue
                with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                    sizes = options.blocks, options.width, options.steps
                    args = job["settings"], *sizes, folder, job.get("short", False)
                    ranks = pool.run(disk.steps, *args, world_size=RANKS, timeout_seconds=600)
                pool.close()  # the next one begins in new processes, without memory that this one has left
                keys = [key for key in ranks[0] if isinstance(ranks[0][key], (int, float))]
                found.setdefault(name, []).append({key: max(rank[key] for rank in ranks) for key in keys})
                print(name, {k: round(v, 3) for k, v in found[name][-1].items()}, file=sys.stderr, flush=True)
    return {
        name: {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        for name, rounds in found.items()
    }


def table(options: argparse.Namespace) -> str:
    numel = options.blocks * options.width * (options.width + 1)
    lines = [
        f"{numel / 1e6:.0f} M parameters in {options.blocks} equal layers, fp32, AdamW, stage 3, two ranks on one disk,"
        f" medians of {options.rounds} × {options.steps} steps,",
        "the rank that needed most; MiB beyond what a process had before the run, read and written per step:",
        "",
        "| engine, offload | step, s | its optimizer, s | anonymous memory | pages of files | read | written |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in measure(options).items():
        sizes = " | ".join(f"{row[key] / 2**20:,.0f}" for key in ("anonymous", "files", "read", "written"))
        lines.append(f"| {name} | {row['step']:.2f} | {row['optimizer']:.2f} | {sizes} |")
    return "\n".join([*lines, "", f"torch {version('torch')}, CPU, gloo."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="?", type=Path, help="the page to fill in; printed without it")
    parser.add_argument("--only", nargs="+", default=[], help="contenders whose name has one of these words")
    parser.add_argument("--folder", help="on the disk; by default that of temporary files")
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    text = table(options)
    if options.page is None:
        print(text)
        return
    page = options.page.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    options.page.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
