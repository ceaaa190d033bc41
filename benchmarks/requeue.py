"""Makes docs/requeue.txt and docs/requeue.svg: a SLURM job that is requeued twice, and the run that it must equal.

    python benchmarks/requeue.py docs    # needs root and Debian's slurm-wlm and munge; about 3 minutes

``scontrol requeue`` interrupts the job first, then SLURM's signal before the time limit. The exit status is 1 unless
every step was trained once and every loss equals that of the uninterrupted run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.helpers import requeued
from tests.helpers.slurm import running_slurm, why_not

ROOT = Path(__file__).resolve().parents[1]
STEPS = 600
COLOURS = ("#d1495b", "#edae49", "#00798c")
WIDTH, HEIGHT, MARGIN = 720, 360, 50


def main() -> int:
    if reason := why_not():
        raise SystemExit(f"no SLURM here: {reason}")
    out = Path(sys.argv[1])
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder, running_slurm() as slurm:
        job = requeued.run_interrupted(slurm, Path(folder) / "job", env, STEPS, by_signal=True)
        reference = _uninterrupted(Path(folder) / "reference", env)
    same = [entry["loss"] == reference[entry["step"]] for entry in job.losses]
    once = [entry["step"] for entry in job.losses] == list(range(STEPS))
    (out / "requeue.svg").write_text(_plot(job.losses, reference), encoding="utf-8")
    summary = [
        f"job {job.state['JobId']}: {job.state['JobState']}, Restarts={job.state['Restarts']}",
        f"{len(job.losses)} steps, each once: {once}; losses equal to the last bit: {sum(same)} of {len(same)}",
        "",
    ]
    (out / "requeue.txt").write_text("\n".join([*summary, _shortened(job.log, Path(folder))]), encoding="utf-8")
    print("\n".join(summary))
    return int(not (all(same) and once))


def _uninterrupted(folder: Path, env: dict[str, str]) -> dict[int, float]:
    folder.mkdir()
    losses = folder / "losses.jsonl"
    command = [sys.executable, "-m", "lightning_zero", "fit", "trainer.devices=2", *requeued.settings(STEPS, 0.0)]
    subprocess.run(
        command, cwd=folder, env={**os.environ, **env, "LOSSES": str(losses)}, check=True, stdout=subprocess.DEVNULL
    )
    return {entry["step"]: entry["loss"] for entry in requeued.read_losses(losses)}


def _shortened(log: str, folder: Path) -> str:
    """The relevant lines of the log, without this machine's folders."""
    kept = [line for line in log.splitlines() if re.match(r"==|lightning_zero:|slurmstepd|srun|Restor|.Trainer", line)]
    text = "\n".join(kept).replace(f"{folder}/job/", "").replace(str(folder), "")
    return re.sub(r"\bvm\b|(?<=ON )\S+(?= CANCELLED)", "node", text) + "\n"


def _plot(losses: list[dict[str, Any]], reference: dict[int, float]) -> str:
    top = max(reference.values())

    def x(step: int) -> float:
        return MARGIN + step / STEPS * (WIDTH - 2 * MARGIN)

    def y(loss: float) -> float:
        return HEIGHT - MARGIN - loss / top * (HEIGHT - 2 * MARGIN)

    def line(points: list[tuple[int, float]], style: str) -> str:
        path = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in points)
        return f'<polyline points="{path}" fill="none" {style}/>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
        ' font-size="13"><rect width="100%" height="100%" fill="white"/>',
        line(sorted(reference.items()), 'stroke="#cccccc" stroke-width="7"'),
    ]
    for life, colour in enumerate(COLOURS):
        points = [(entry["step"], entry["loss"]) for entry in losses if entry["life"] == life]
        parts.append(line(points, f'stroke="{colour}" stroke-width="1.5"'))
        parts.append(f'<text x="{WIDTH - 270}" y="{MARGIN + 40 + 18 * life}" fill="{colour}">life {life + 1} of the')
        parts.append(f" job: steps {points[0][0]} to {points[-1][0]}</text>")
    parts.append(f'<text x="{WIDTH - 270}" y="{MARGIN + 22}" fill="#999999">uninterrupted run (broad line)</text>')
    parts.append(f'<text x="{WIDTH / 2 - 15}" y="{HEIGHT - 14}">step</text><text x="8" y="{MARGIN - 20}">loss</text>')
    for step in range(0, STEPS + 1, 100):
        parts.append(f'<text x="{x(step) - 10:.0f}" y="{HEIGHT - MARGIN + 18}">{step}</text>')
    for part in range(5):
        value = top * part / 4
        parts.append(f'<text x="8" y="{y(value) + 4:.0f}">{value:.2f}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
