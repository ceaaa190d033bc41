"""Measures the tables of docs/offload.md: where each tensor is stored, and how many bytes are copied.

    python benchmarks/offload.py docs/offload.md              # fills in the page's tables, about 5 minutes

It uses two CPU ranks; ``lightning_zero.engines.model_state`` defines which tensors count as on the device there. Copies
are counted on a simulated accelerator (``tests/helpers/pretend.py``), operator by operator.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.helpers import whereabouts
from tests.helpers.ranks import RankPool, run_ranks

BEGIN, END = "<!-- measured -->", "<!-- /measured -->"
OFFLOADS = {"fsdp2": ("none", "cpu", "nvme"), "deepspeed": ("none", "cpu")}
PLACES = ("device", "host", "disk")


def cases(engines: tuple[str, ...] = ("fsdp2", "deepspeed")) -> list[tuple[str, int, str]]:
    """``(engine, stage, offload)`` of every row."""
    return [(engine, stage, offload) for engine in engines for offload in OFFLOADS[engine] for stage in (1, 2, 3)]


def measure(pool: RankPool, engine: str, stage: int, offload: str) -> dict[str, Any]:
    """The rank that holds most."""
    from lightning_zero.config import OffloadConfig

    with tempfile.TemporaryDirectory() as folder:
        moved: Any = OffloadConfig(target="nvme", path=folder) if offload == "nvme" else offload
        settings = {"stage": stage, "engine": engine, "offload": moved}
        if engine == "fsdp2":
            settings["min_unit_numel"] = 1
        results = pool.run(whereabouts.held, settings, world_size=2, timeout_seconds=600)
    return max(results, key=lambda r: sum(sum(r[kind].values()) for kind in whereabouts.KINDS))


def where_table(engines: tuple[str, ...]) -> str:
    lines = [
        "| engine | stage | offload | parameters | gradients | optimizer states | device, inside a forward |",
        "|---|---|---|---|---|---|---|",
    ]
    with RankPool() as pool:
        for engine, stage, offload in cases(engines):
            found = measure(pool, engine, stage, offload)
            cells = [" / ".join(_figure(found[kind][place]) for place in PLACES) for kind in whereabouts.KINDS]
            lines.append(f"| {engine} | {stage} | {offload} | {' | '.join(cells)} | {_figure(found['inside'])} |")
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def copies_table() -> str:
    from tests.unit.test_host_shards import copied

    lines = [
        "| stage | precision | micro-batches | up | down |",
        "|---|---|---|---|---|",
    ]
    for (stage, mixed, micro_batches), (up, down) in run_ranks(copied, 1)[0].items():
        precision = "bf16-mixed" if mixed else "32-true"
        lines.append(f"| {stage} | {precision} | {micro_batches} | {_figure(up)} | {_figure(down)} |")
    return "\n".join(lines)


def _figure(value: float) -> str:
    return f"{value:.2f}" if value >= 0.005 else "–"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="?", type=Path, help="the page to fill in; printed without it")
    parser.add_argument("--engines", nargs="+", choices=list(OFFLOADS), default=list(OFFLOADS))
    options = parser.parse_args()
    versions = f"torch {version('torch')}" + (
        f", deepspeed {version('deepspeed')}" if "deepspeed" in options.engines else ""
    )
    text = f"""Bytes per parameter on a rank of two, `device / host / disk`, between a backward and the step, for
{whereabouts.account.Stack.NUM_UNITS} equal units in fp32 with AdamW:

{where_table(tuple(options.engines))}

Bytes copied between host and device per parameter of a rank's share and optimizer step, engine `fsdp2`, `offload=cpu`:

{copies_table()}

{versions}, Python {platform.python_version()}, CPU, gloo."""
    if options.page is None:
        print(text)
        return
    page = options.page.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    options.page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
