"""Measures the speed of a training step under each strategy: the tables of docs/speed.md.

    python benchmarks/bench.py                          # everything docs/speed.md shows, about 80 minutes
    python benchmarks/bench.py many --about units       # one table, to the terminal
    python benchmarks/bench.py gpt --only ddp zero3     # some contenders (floor and fully_shard always run)
    python benchmarks/bench.py --page                   # docs/speed.md from the stored results
    python benchmarks/bench.py --check                  # exits with 1 if the stored results exceed a bound
    python benchmarks/bench.py --bounds                 # as --check, but measured again in 40 minutes; not stored

Contenders run on the same machine, with one process per rank and one thread per process. As many as fit into memory are
alive at once. They take turns of a few steps while the others are stopped, so that a slow minute of the machine affects
all. This is a round; the floor, DDP and ``fully_shard`` take part in every round. Ratios are taken within a round, and
their median over the rounds counts. A contender whose losses differ from DDP's is marked, because it did different
work. Results are stored under benchmarks/results/ with the hardware and the versions.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Generator
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import bounds
from benchmarks.contenders import CONTENDERS, SHAPES

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "speed.md"
ANCHORS = ("floor", "ddp", "fully_shard")
LOSS_TOLERANCE = 2e-4
"""Relative, after :data:`COMPARED_LOSSES` steps of Adam in fp32: ranks add gradients in another order."""
COMPARED_LOSSES = 10
OURS = [*(f"{kind}{stage}" for kind in ("engine-", "zero") for stage in (1, 2, 3)), "lightning-ddp"]
BETWEEN_HOSTS = [f"zero{stage}-sockets" for stage in (1, 2, 3)]
COMPILED = ["ddp-compiled", "fully_shard-compiled", *(f"zero{stage}-compiled" for stage in (1, 2, 3)), "zero1", "zero3"]
UNITS = ["lightning-ddp", *(f"zero{stage}-units" for stage in (1, 2, 3)), "zero1", "zero2", "zero3"]
ALL = [name for name in CONTENDERS if not name.endswith(("-compiled", "-units"))]


def _table(shape: str, of: list[str], **settings: Any) -> dict[str, Any]:
    """``of`` are the contenders besides the anchors."""
    usual = {"ranks": 2, "accumulate": 1, "steps": 12, "turn_steps": 3, "rounds": 1}
    return {"shape": shape, **usual, **settings, "of": of}


TABLES = [
    _table("gpt", ALL, steps=18, rounds=3),
    _table("gpt", [*OURS, *BETWEEN_HOSTS], accumulate=8, steps=3, turn_steps=1),
    _table("many", [*OURS, "fully_shard-2", "lightning-3"]),
    _table("embedding", [*OURS, "fully_shard-2"]),
    _table("tiny", ALL, steps=300, turn_steps=20, rounds=2),
    _table("gpt", COMPILED, rounds=2, about="compiled"),
    _table("many", COMPILED, rounds=2, about="compiled"),
    _table("many", UNITS, rounds=2, about="units"),
]
ABOUT = {"compiled": "eager and compiled", "units": "automatic units and units by hand"}
"""Subject of a table besides its shape -> its title."""
PROCESSES = 20
"""Processes alive at once: they fit into 24 GiB, because the largest needs 1.3 GB."""
NAMES = {
    "gpt": "GPT of 26 M parameters, 8 blocks of 512",
    "many": "many small tensors, 200 blocks of 64, clipped by norm",
    "embedding": "a huge embedding, 64,000 x 256 and its head",
    "tiny": "a model so small that only overhead is left",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", choices=[[], *SHAPES], metavar="SHAPE", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--accumulate", type=int, nargs="*", default=None, help="micro-batches per step")
    parser.add_argument("--about", nargs="*", default=None, choices=["", *ABOUT], help="tables of this subject only")
    parser.add_argument("--rounds", type=int, help="turns per contender (default: the table's own number)")
    parser.add_argument("--only", nargs="*", default=None, choices=[*CONTENDERS], metavar="CONTENDER")
    parser.add_argument("--page", action="store_true", help="only write docs/speed.md from what is stored")
    parser.add_argument("--check", action="store_true", help="only compare what is stored with its bounds")
    parser.add_argument("--bounds", action="store_true", help="measure what bounds are about, and compare it with them")
    options = parser.parse_args()
    if options.check:
        return check(_stored())
    tables = [
        table
        for table in TABLES
        if (not options.shapes or table["shape"] in options.shapes)
        and (options.accumulate is None or table["accumulate"] in options.accumulate)
        and (options.about is None or table.get("about", "") in options.about)
    ]
    if not tables:
        parser.error("no table has this shape, subject and number of micro-batches")
    if options.bounds:
        needed = [(table, [name for name in CONTENDERS if name in bounds.contenders(table)]) for table in tables]
        return check([measure(table, names, options.rounds or 3) for table, names in needed if names])
    for table in tables if not options.page else ():
        names = [name for name in CONTENDERS if name in ANCHORS or name in (options.only or table["of"])]
        measured = measure(table, names, options.rounds or table["rounds"])
        RESULTS.mkdir(exist_ok=True)
        _path(table).write_text(json.dumps(measured, indent=1) + "\n")
        print(render(measured))
    if options.page or not (options.shapes or options.only):
        PAGE.write_text(page())
    return 0


def check(measured: list[dict[str, Any]]) -> int:
    """The bounds, and 1 if one is not met."""
    print(bounds.render(measured))
    return int(not all(bound.holds(values) for bound, _, values in bounds.judged(measured)))


def _stored() -> list[dict[str, Any]]:
    return [json.loads(_path(table).read_text()) for table in TABLES if _path(table).exists()]


def measure(table: dict[str, Any], names: list[str], rounds: int) -> dict[str, Any]:
    """Every contender of ``names`` in so many rounds, the anchors in more where not all fit into one."""
    ran: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    groups = _groups(names, table["ranks"])
    for number in range(rounds):
        for group in groups:
            begun = time.perf_counter()
            found = run(table, [name for name in group if name not in failed])
            failed |= {name: each for name, each in found.items() if isinstance(each, str)}
            ran.append({name: _summary(each) for name, each in found.items() if not isinstance(each, str)})
            said = ", ".join(f"{name}: {each}" if isinstance(each, str) else name for name, each in found.items())
            print(
                f"round {number + 1}/{rounds} {said}: {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True
            )
    return {"table": table, "machine": machine(), "imports": imports(), "rounds": ran, "failed": failed}


def _groups(names: list[str], ranks: int) -> list[list[str]]:
    """The anchors with as many others as :data:`PROCESSES` allows, at least one."""
    others = [name for name in names if name not in ANCHORS]
    room = max(PROCESSES // ranks - len(ANCHORS), 1)
    return [[*ANCHORS, *others[i : i + room]] for i in range(0, max(len(others), 1), room)]


def run(table: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Each contender's results by rank, or why it has none. Only one runs at a time."""
    found: dict[str, Any] = {}
    waiting = deque((name, _turns({**table, "contender": name})) for name in names)
    while waiting:
        name, turns = waiting.popleft()
        try:
            next(turns)
            waiting.append((name, turns))
        except StopIteration as end:
            found[name] = end.value
    return found


def _turns(settings: dict[str, Any]) -> Generator[None, None, list[dict[str, Any]] | str]:
    """One contender's run, which yields whenever it has stopped itself (:attr:`contenders.Job.turn_steps`)."""
    with TemporaryFile("w+") as output, TemporaryFile("w+") as errors:
        job = {key: value for key, value in settings.items() if key not in ("about", "rounds", "of")}
        command = [sys.executable, str(ROOT / "benchmarks" / "contenders.py"), json.dumps(job)]
        process = subprocess.Popen(command, stdout=output, stderr=errors, text=True, start_new_session=True)
        try:
            while os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT).si_code == os.CLD_STOPPED:  # type: ignore[union-attr]
                yield
                os.killpg(process.pid, signal.SIGCONT)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        errors.seek(0)
        return json.load(output) if process.returncode == 0 else errors.read().strip().splitlines()[-1][:200]


def _summary(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Rank 0's times, whose clock excludes the turns of others, and the memory of the largest rank."""
    return {
        "step_seconds": statistics.median(ranks[0]["seconds"]),
        "cpu_seconds": statistics.mean(r["cpu_seconds_per_step"] for r in ranks),
        "update_seconds": statistics.median(ranks[0]["update_seconds"] or [math.nan]),
        "peak_bytes": max(r["peak_bytes"] for r in ranks),
        "life_peak_bytes": max(r["life_peak_bytes"] for r in ranks),
        "imported_bytes": max(r["imported_bytes"] for r in ranks),
        "wire_bytes": ranks[0]["wire_bytes_per_step"],
        "start_up_seconds": ranks[0]["start_up_seconds"],  # it may have stopped the others before their first step
        "losses": [statistics.mean(each) for each in zip(*(r["losses"][:COMPARED_LOSSES] for r in ranks), strict=True)],
    }


def imports(times: int = 5) -> dict[str, float]:
    """Median seconds that a fresh process takes to ``import lightning.pytorch``, and then ``lightning_zero``."""
    code = """if True:
        from time import perf_counter
        begun = perf_counter()
        import lightning.pytorch
        between = perf_counter()
        import lightning_zero
        print(between - begun, perf_counter() - between)
    """
    command = [sys.executable, "-c", code]
    runs = [subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(times)]
    seconds = [[float(each) for each in run.stdout.split()[-2:]] for run in runs]
    lightning, added = (statistics.median(each) for each in zip(*seconds, strict=True))
    return {"lightning": lightning, "lightning_zero_adds": added}


# -- pages ---------------------------------------------------------------------------------------------------------


def render(measured: dict[str, Any]) -> str:
    """One table as Markdown."""
    table = measured["table"]
    lines = [
        f"### {NAMES[table['shape']]}: {table['ranks']} ranks, {_micro_batches(table['accumulate'])}"
        + (f"; {ABOUT[table['about']]}" if "about" in table else ""),
        "",
        "| | step, ms | to the floor | to fully_shard | clip and update, ms | CPU per rank, ms | peak memory, MB"
        " | to fully_shard | in its whole life, MB | imported, MB | sent per rank, MB | start-up, s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in CONTENDERS:
        found = [run for (run,) in bounds.rounds(measured, name)]
        if not found:
            continue
        note = "" if name == "floor" or _same_losses(measured, name) else " (**other losses**)"
        middle = {key: statistics.median(run[key] for run in found) for key in found[0] if key != "losses"}
        update = middle["update_seconds"]
        cells = [
            f"{middle['step_seconds'] * 1e3:.1f}"
            if table["shape"] == "tiny"
            else f"{middle['step_seconds'] * 1e3:.0f}",
            _ratio(measured, name, "floor", "step_seconds"),
            _ratio(measured, name, "fully_shard", "step_seconds"),
            "" if math.isnan(update) else f"{update * 1e3:.1f}",
            f"{middle['cpu_seconds'] * 1e3:.1f}",
            f"{middle['peak_bytes'] / 1e6:.0f}",
            _ratio(measured, name, "fully_shard", "peak_bytes"),
            f"{middle['life_peak_bytes'] / 1e6:.0f}"
            if "life_peak_bytes" in middle
            else "",  # stored before it was seen
            f"{middle['imported_bytes'] / 1e6:.0f}",
            f"{middle['wire_bytes'] / 1e6:.1f}",
            f"{middle['start_up_seconds']:.1f}",
        ]
        lines.append(f"| {CONTENDERS[name][0]}{note} | {' | '.join(cells)} |")
    lines += [f"| {CONTENDERS[name][0]} | failed: {reason} |" for name, reason in measured["failed"].items()]
    return "\n".join(lines) + "\n"


def _ratio(measured: dict[str, Any], name: str, anchor: str, key: str) -> str:
    """Median over the rounds, of steps with the smallest and the largest."""
    ratios = [mine[key] / other[key] for mine, other in bounds.rounds(measured, name, anchor) if other[key]]
    if not ratios:
        return ""
    return bounds.with_range(ratios) if key == "step_seconds" else f"{statistics.median(ratios):.2f}"


def _same_losses(measured: dict[str, Any], name: str) -> bool:
    return all(
        math.isclose(a, b, rel_tol=LOSS_TOLERANCE)
        for run, other in bounds.rounds(measured, name, "ddp")
        for a, b in zip(run["losses"], other["losses"], strict=False)
    )


def page() -> str:
    """docs/speed.md, from the stored results."""
    from benchmarks import per_unit, view  # which import this module

    stored = _stored()
    head = PAGE.read_text().split("<!-- tables -->")[0] if PAGE.exists() else "# Speed\n\n"
    parts = [head.rstrip(), "<!-- tables -->", bounds.render(stored)]
    for measured in stored:
        machine, added = measured["machine"], measured["imports"]
        parts += [
            render(measured).rstrip(),
            f"{machine['date']}, {machine['processor']}, {machine['cores']} cores, {machine['versions']};"
            f" rounds: {_times(measured)}."
            f" `import lightning_zero` took {added['lightning_zero_adds'] * 1e3:.0f} ms more than `import"
            f" lightning.pytorch` ({added['lightning'] * 1e3:.0f} ms).",
        ]
    parts += [
        each.render(json.loads(each.RESULT.read_text())).rstrip() for each in (per_unit, view) if each.RESULT.exists()
    ]
    return "\n\n".join(parts) + "\n"


def _times(measured: dict[str, Any]) -> int:
    """Number of measurements of each contender, without the anchors."""
    return min(Counter(name for ran in measured["rounds"] for name in ran).values())


def _micro_batches(number: int) -> str:
    return "no accumulation" if number == 1 else f"{number} micro-batches per step"


def _path(table: dict[str, Any]) -> Path:
    about = f"-{table['about']}" if "about" in table else ""
    return RESULTS / f"speed-{table['shape']}-{table['ranks']}ranks-{table['accumulate']}x{about}.json"


def machine() -> dict[str, Any]:
    """The hardware and the versions of a measurement."""
    names = ["torch", "lightning", "deepspeed", "accelerate"]
    return {
        "date": date.today().isoformat(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": ", ".join(f"{name} {_version(name)}" for name in names),
    }


def _processor() -> str:
    try:
        import torch

        if torch.cuda.is_available():
            return torch.cuda.get_device_name()
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


if __name__ == "__main__":
    sys.exit(main())
