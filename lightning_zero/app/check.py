"""``lightning-zero check``: verifies on this machine what the tests verify elsewhere.

    same   losses, weights and a resumed checkpoint of stages 1 to 3 match DDP, in fp32 and in the given precision
    fits   bytes of parameters, gradients, optimizer states and messages match the plan; on CUDA the peak does, too
    fast   the time of a step is within a factor of DDP's and of raw ``fully_shard``'s, measured alternately
    safe   if one rank raises, all processes end within seconds

Each part runs in separate processes (:mod:`lightning_zero.app.check_ranks`), so a part that crashes becomes a failed
line. If torchrun, srun or mpirun has started this command once per rank, each of these processes starts one rank of
each part. Otherwise this process starts rank 0, whose Trainer starts the other ranks as in any run.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments import MPIEnvironment, SLURMEnvironment, TorchElasticEnvironment
from torch import Tensor

from lightning_zero.app.check_ranks import FP32, ON_PURPOSE, PARTS, STAGES, Job, command, strategy_name
from lightning_zero.app.doctor import accelerators, hardware, versions
from lightning_zero.checkpoint.store import load_checkpoint
from lightning_zero.config import ZeroConfig
from lightning_zero.launch import rendezvous
from lightning_zero.launch.environment import check_world
from lightning_zero.planner.study import precision_name

PASS, FAIL, NOT_HERE = "pass", "FAIL", "not on this machine"
MIB = 2**20
LOSS_TOLERANCE, WEIGHT_TOLERANCE = 1e-4, 1e-3
"""In full precision. Losses: largest relative difference. Weights: norm of the difference over the norm of the change
since initialization. Sums over ranks round in another order (1e-7), which AdamW amplifies if gradients are near 0."""
LOW_LOSS_TOLERANCE, LOW_WEIGHT_TOLERANCE = 3e-2, 0.2
"""In low precision. Each gather rounds the sharded weights once, and their gradients are rounded as well. Autocast
rounds weights in each operator and keeps gradients in fp32. A missing reduction makes a larger difference."""
TOLERANCES = {"parameters": 0.01, "gradients": 0.01, "optimizer": 0.01, "sent per step": 0.02, "peak": 0.1}
"""Relative difference of bytes from the plan, which does not count the ranks' agreements."""
PEAK_SLACK_BYTES = 64 * MIB
"""cuBLAS keeps workspaces (32 MiB on Hopper), and the allocator rounds blocks up."""
BOUNDS = {"ddp": 3.0, "fully_shard": 2.0}
"""Upper bounds of a stage's step time over that of each reference. They should find a mistake, not a slow network."""
SLACK_SECONDS = {"cpu": 0.02, "gpu": 0.002}
"""Allowed in addition: the step of a tiny module is mostly Python, and CPUs are shared with other programs."""
SAFE_SECONDS = 30.0
"""Upper bound of the time from one rank's error to the end of the last process."""
GONE_SECONDS = 15.0
"""Time for the other processes of a part to end after its rank 0. The supervisor gives them 3 s."""
_OF_LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "PMI_", "PMIX_", "OMPI_", "MASTER_", "RANK", "LOCAL_RANK", "WORLD_SIZE")


@dataclass(frozen=True)
class Row:
    """One line of the report."""

    part: str
    what: str
    outcome: str
    figures: str

    def __str__(self) -> str:
        return f"{self.part:<5} {self.what:<18} {self.outcome:<{len(NOT_HERE)}}  {self.figures}"


@dataclass
class Report:
    """All lines, and a description of the run and the machine."""

    rows: list[Row] = field(default_factory=list)
    about: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Section -> name -> value: the run, versions, hardware."""
    logs: dict[str, str] = field(default_factory=dict)
    """Failed part -> end of its output."""

    @property
    def ok(self) -> bool:
        """Returns whether no line failed."""
        return not any(row.outcome == FAIL for row in self.rows)

    def __str__(self) -> str:
        return "\n".join(map(str, self.rows))

    def write(self, folder: Path) -> None:
        """Writes ``check.json`` and ``check.md``."""
        (folder / "check.json").write_text(json.dumps({"ok": self.ok, **asdict(self)}, indent=1) + "\n", "utf-8")
        lines = ["# lightning-zero check", "", "| part | what | outcome | figures |", "|---|---|---|---|"]
        lines += [f"| {row.part} | {row.what} | {row.outcome} | {row.figures.replace('|', '/')} |" for row in self.rows]
        for name, section in self.about.items():
            lines += ["", f"## {name}", "", *(f"- {key}: {value}" for key, value in section.items())]
        for part, log in self.logs.items():
            lines += ["", f"## Output of {part}", "", *(f"    {line}" for line in log.splitlines())]
        (folder / "check.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def check(
    module: Any = None,
    data: Any = None,
    *,
    precision: Any = "bf16-mixed",
    devices: int | None = None,
    accelerator: str = "auto",
    parts: Sequence[str] = tuple(PARTS),
    settings: Mapping[str, Any] | None = None,
    folder: str | os.PathLike[str] = ".",
    timeout_seconds: float = 180.0,
) -> Report:
    """Runs the check, prints each line as soon as it is known, and writes ``check.json`` and ``check.md``.

    Args:
        module: An untrained ``LightningModule``; ``None`` uses a small GPT. Other processes unpickle it. Classes that
            the script itself defines need ``cloudpickle`` for that.
        data: Its ``LightningDataModule`` or training ``DataLoader``, with twelve micro-batches per rank that are the
            same in each run.
        precision: As for ``Trainer(precision=...)``. fp32 is always checked as well.
        devices: Ranks on this host; ``None`` is one per GPU, or two on CPUs. A single GPU is shared by two ranks.
        accelerator: ``"auto"``, ``"cpu"`` or ``"gpu"``.
        parts: Any of ``same``, ``fits``, ``fast`` and ``safe``.
        settings: Keyword arguments of ``ZeroStrategy`` except the stage.
        folder: Folder for the two files, which ranks on all hosts can see.
        timeout_seconds: Time limit of each part.

    Raises:
        ValueError: A setting is invalid. The message names it, its value and the repair.
        OSError: The folder is not writable.
    """
    for part in parts or [""]:
        if part not in PARTS:
            raise ValueError(f"{part!r} is not a part of the check: use {', '.join(PARTS)}.")
    if not timeout_seconds > 0:
        raise ValueError(f"timeout_seconds={timeout_seconds:g}: use more than 0.")
    on_gpu, settings = _on_gpu(accelerator), dict(settings or {})
    ZeroConfig(stage=3, **settings)
    precision = _precision(precision, on_gpu)
    environment = _environment()
    num_devices, num_nodes = _ranks(environment, devices, on_gpu)
    is_first = environment is None or environment.global_rank() == 0
    report = Report()
    with _scratch(Path(folder), environment) as scratch:
        job = Job(
            folder=scratch,
            accelerator="gpu" if on_gpu else "cpu",
            devices=num_devices,
            num_nodes=num_nodes,
            one_gpu=on_gpu and num_devices == num_nodes == 1,
            precision=precision,
            settings=settings,
            own=module is not None,
        )
        if job.own and is_first:
            torch.save((module, data), job.path("module.pt"), pickle_module=_pickle())
        report.about["run"] = {name: value for name, value in asdict(job).items() if name not in ("folder", "name")}
        for part in (part for part in PARTS if part in parts):
            began = time.time()
            rows, log = _run(job.part(part), environment, timeout_seconds)
            if any(row.outcome == FAIL for row in rows):
                report.logs[part] = log[-6000:]
            report.about["run"][f"seconds of {part}"] = round(time.time() - began)
            report.rows += rows
            if is_first:
                print(*rows, sep="\n", flush=True)
    if is_first:
        report.about |= {"versions": versions(), "hardware": hardware(), "accelerators": accelerators()}
        report.write(Path(folder))
    return report


def run(parts: str, devices: int | None, accelerator: str, precision: str, folder: str, timeout_seconds: float) -> int:
    """Runs the command, and returns its exit code: 0, 1 if a line failed, 130 after Ctrl-C."""
    try:
        report = check(
            parts=[part for part in parts.split(",") if part],
            devices=devices,
            accelerator=accelerator,
            precision=precision,
            folder=folder,
            timeout_seconds=timeout_seconds,
        )
    except KeyboardInterrupt:
        print("lightning-zero: interrupted; no report was written", file=sys.stderr)
        return 130
    if report.about.get("versions"):  # only on rank 0
        outcomes = [row.outcome for row in report.rows]
        counts = ", ".join(f"{outcomes.count(each)} {each}" for each in (PASS, FAIL, NOT_HERE) if each in outcomes)
        print(f"{counts}; {Path(folder, 'check.md')}, {Path(folder, 'check.json')}", flush=True)
    return 0 if report.ok else 1


# -- settings --------------------------------------------------------------------------------------------------------


def _on_gpu(accelerator: str) -> bool:
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # otherwise is_available() takes device memory
    if accelerator not in ("auto", "cpu", "gpu"):
        raise ValueError(f"accelerator={accelerator!r}: use auto, cpu or gpu.")
    if accelerator == "gpu" and not torch.cuda.is_available():
        raise ValueError("accelerator='gpu': torch finds no GPU here (lightning-zero doctor); use cpu.")
    return accelerator != "cpu" and torch.cuda.is_available()


def _precision(precision: Any, on_gpu: bool) -> str:
    name = precision_name(precision)
    if name.startswith("16") and not on_gpu:
        raise ValueError(f"precision={name!r}: on CPUs use bf16-mixed or 32-true.")
    return name


def _pickle() -> Any:
    try:
        import cloudpickle  # optional: only classes that the script itself defines need it
    except ModuleNotFoundError:
        return pickle
    return cloudpickle


# -- processes -------------------------------------------------------------------------------------------------------


def _environment() -> Any:
    """Returns Lightning's environment if torchrun, srun or mpirun has started this command per rank, else ``None``."""
    if TorchElasticEnvironment.detect():
        return TorchElasticEnvironment()
    if int(os.environ.get("SLURM_NTASKS", "1")) > 1:
        return SLURMEnvironment(auto_requeue=False)
    return MPIEnvironment() if MPIEnvironment.detect() else None


def _ranks(environment: Any, asked: int | None, on_gpu: bool) -> tuple[int, int]:
    """Returns the number of ranks on each host, and the number of hosts.

    Raises:
        ValueError: The number differs from what was asked for.
    """
    if environment is None:
        gpus = torch.cuda.device_count() if on_gpu else 0
        found = asked if asked is not None else gpus or 2
        if found < 1 or found > (gpus or found):
            raise ValueError(f"devices={found}: use 1 to {gpus}." if gpus else f"devices={found}: use 1 or more.")
        return found, 1
    tasks = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))  # "8", "8(x2)"
    local = re.match(r"\d+", tasks)
    found = asked or int(getattr(environment, "local_size", local[0] if local else environment.world_size()))
    num_nodes = max(environment.world_size() // found, 1)
    check_world(environment, found, num_nodes)
    return found, num_nodes


@contextmanager
def _scratch(folder: Path, environment: Any) -> Iterator[str]:
    """Provides a folder for results and checkpoints and removes it afterwards, also after SIGTERM or Ctrl-C."""

    def interrupt(*unused: Any) -> None:
        raise KeyboardInterrupt

    prefix, is_first = ".lightning-zero-check-", environment is None or environment.global_rank() == 0
    try:
        if environment is None:
            made = tempfile.mkdtemp(prefix=prefix, dir=folder.resolve())
        else:  # all ranks must choose the same name
            made = str(folder.resolve() / f"{prefix}{environment.main_port}")
            if is_first:
                shutil.rmtree(made, ignore_errors=True)
                Path(made).mkdir()
    except OSError as error:
        raise OSError(f"{folder} is not writable ({error.strerror}): choose another folder (--out).") from None
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield made
    finally:
        signal.signal(signal.SIGTERM, before)
        if is_first:
            shutil.rmtree(made, ignore_errors=True)


def _run(job: Job, environment: Any, timeout_seconds: float) -> tuple[list[Row], str]:
    """Runs one part, and returns its lines and its output. Only rank 0 has an output."""
    if job.name == "safe" and (environment is not None or job.world_size == 1):
        why = "one rank waits for no other" if environment is None else "the launcher of the ranks also ends them"
        return [Row(job.name, "zero3", NOT_HERE, why)], ""
    error = _processes(job, environment, timeout_seconds)
    ended = time.time()
    if environment is not None and environment.global_rank():
        return [Row(job.name, f"rank {environment.global_rank()}", FAIL, error)] if error else [], ""
    log = Path(job.path(f"{job.name}.log")).read_text(encoding="utf-8", errors="replace")
    if job.name == "safe":
        return [_safe(job, error, log, ended)], log
    while environment is not None and not error and _num_done(job) < job.world_size:
        time.sleep(0.05)
        if time.time() > ended + GONE_SECONDS:
            error = "another rank did not finish"
    found = [_read(job, rank) for rank in range(job.world_size)]
    judge = {"same": _same, "fits": _fits, "fast": _fast}[job.name]
    return list(judge(job, found, error and f"{error}: {_last_error(log)}")), log


def _num_done(job: Job) -> int:
    """Counts the ranks that have stored all of their results. Other ranks may finish shortly after rank 0."""
    return len(list(Path(job.folder).glob(f"{job.name}-*.done")))


def _processes(job: Job, environment: Any, timeout_seconds: float) -> str:
    """Runs ``job`` until its last process has ended. Returns the failure, or ``""``."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if environment is None:  # a batch job's variables would describe other ranks
        env = {name: value for name, value in env.items() if not name.startswith(_OF_LAUNCHERS)}
    env.setdefault(rendezvous.START_SECONDS, str(timeout_seconds))
    is_first = environment is None or environment.global_rank() == 0
    with open(job.path(f"{job.name}.log") if is_first else os.devnull, "wb") as log:
        process = subprocess.Popen(
            command(job),
            stdin=subprocess.PIPE,  # closes when this process ends, which ends the child
            stdout=log,
            stderr=log if is_first else None,
            env=env,
            start_new_session=True,  # only this process gets Ctrl-C
        )
    try:
        process.wait(timeout_seconds)
    except subprocess.TimeoutExpired:
        return f"not done after {timeout_seconds:g} s"
    finally:  # also after Ctrl-C: no process may outlive the check
        process.kill()
        code = process.wait()
        left = _kill_left(job) if environment is None else 0
    if left:
        return f"{left} processes had to be killed"
    return f"ended with code {code}" if code else ""


def _kill_left(job: Job) -> int:
    """Waits for the other ranks, which a supervisor ends. Kills those that are late, and returns their number."""
    deadline = time.monotonic() + GONE_SECONDS
    while (left := list(_alive(job))) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return len(left)


def _alive(job: Job) -> Iterator[int]:
    for path in Path(job.folder).glob(f"{job.name}-*.pid"):
        pid = int(path.stem.rpartition("-")[2])
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if job.folder.encode() in words:  # otherwise another process has got this id
            yield pid


def _read(job: Job, rank: int) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(Path(job.path(f"{job.name}-{rank}.json")).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return found


def _last_error(log: str) -> str:
    """Returns the last line of ``log`` that names an error, or else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception|Interrupt|Lost)\b", line)]
    return (named or lines or ["no output"])[-1][:300]


# -- results to lines ------------------------------------------------------------------------------------------------


def _same(job: Job, found: list[dict[str, Any]], error: str) -> Iterator[Row]:
    for precision in dict.fromkeys((FP32, job.precision)):
        for stage in STAGES:
            name, reference = f"{strategy_name(stage)} {precision}", f"ddp {precision}"
            try:
                for each in (reference, name):
                    for rank, of_rank in enumerate(found):
                        if why := of_rank.get(each, {"error": error or "no result"}).get("error"):
                            raise ValueError(f"{each}, rank {rank}: {why}")
                yield _same_row(job, name, [(of_rank[name], of_rank[reference]["end"]) for of_rank in found])
            except (ValueError, OSError) as failure:
                yield Row("same", name, FAIL, " ".join(str(failure).split())[:300])


def _same_row(job: Job, name: str, of_ranks: list[tuple[dict[str, Any], list[float]]]) -> Row:
    _, precision = name.split()
    is_full = precision in (FP32, "64-true")
    most, most_moved = (LOSS_TOLERANCE, WEIGHT_TOLERANCE) if is_full else (LOW_LOSS_TOLERANCE, LOW_WEIGHT_TOLERANCE)
    initial, expected = _weights(job, "initial"), _weights(job, f"ddp {precision} end")
    texts, outcome = [], PASS
    for run in ("end", "resumed"):
        off, where = 0.0, ""
        for rank, (found, losses) in enumerate(of_ranks):
            begins = found[f"{run} begins"]
            difference, batch = _difference(found[run], losses[begins:], most)
            if difference > off:
                off, where = difference, f" (rank {rank}, from batch {begins + batch} on)"
        moved = _distance(_weights(job, f"{name} {run}"), expected, initial)
        if off > most or moved > most_moved:
            outcome = FAIL
        begin = "resumed: " if run == "resumed" else ""
        texts.append(f"{begin}losses off by {off:.1e}{where if off > most else ''}, weights by {moved:.1e}")
    return Row("same", name, outcome, f"{'; '.join(texts)} (<= {most:g}, {most_moved:g})")


def _difference(losses: list[float], expected: list[float], most: float) -> tuple[float, int]:
    """Returns the largest relative difference, and the index of the first one above ``most``."""
    if len(losses) != len(expected):
        return math.inf, min(len(losses), len(expected))
    off = [abs(a - b) / max(abs(b), 1e-6) for a, b in zip(losses, expected, strict=True)]
    off = [each if math.isfinite(each) else math.inf for each in off]
    return max(off, default=0.0), next((i for i, each in enumerate(off) if each > most), 0)


def _weights(job: Job, name: str) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = load_checkpoint(job.path(f"{name}.ckpt"), weights_only=False)["state_dict"]
    return {name: t.clone().double() for name, t in weights.items() if t.is_floating_point()}


def _distance(weights: dict[str, Tensor], expected: dict[str, Tensor], initial: dict[str, Tensor]) -> float:
    """Returns the norm of the difference over the norm of ``expected - initial``."""
    if weights.keys() != expected.keys():
        return math.inf
    off = sum(float((weights[name] - t).square().sum()) for name, t in expected.items())
    way = sum(float((t - initial.get(name, 0.0)).square().sum()) for name, t in expected.items())
    return math.sqrt(off / way) if way and math.isfinite(off) else math.inf if off else 0.0


def _fits(job: Job, found: list[dict[str, Any]], error: str) -> Iterator[Row]:
    for name in map(strategy_name, STAGES):
        of_ranks = [of_rank[name] for of_rank in found if name in of_rank]
        if len(of_ranks) < len(found):
            yield Row("fits", name, FAIL, error or "no result")
        elif any("planned" not in each for each in of_ranks):
            yield Row("fits", name, NOT_HERE, of_ranks[0]["why"])
        else:
            yield _fits_row(name, of_ranks)


def _fits_row(name: str, of_ranks: list[dict[str, Any]]) -> Row:
    texts, outcome = [], PASS
    planned = of_ranks[0]["planned"]
    for kind, tolerance in TOLERANCES.items():
        if kind not in planned:
            texts.append("peak: not counted by the CPU's allocator")
            continue
        measured = max(each["measured"][kind] for each in of_ranks)
        slack = PEAK_SLACK_BYTES if kind == "peak" else 1024
        fits = abs(measured - planned[kind]) <= tolerance * planned[kind] + slack
        outcome = outcome if fits else FAIL
        wrong = "" if fits else f", not within {tolerance:.0%}"
        texts.append(f"{kind} {measured / MIB:.2f} MiB (plan {planned[kind] / MIB:.2f}{wrong})")
    return Row("fits", name, outcome, ", ".join(texts))


def _fast(job: Job, found: list[dict[str, Any]], error: str) -> Iterator[Row]:
    seconds, precision = found[0].get("seconds", {}), found[0].get("precision", "")
    exposed = {name: share for name, share in found[0].get("exposed", {}).items() if share is not None}
    for name in map(strategy_name, STAGES):
        if error or name not in seconds:
            yield Row("fast", name, FAIL, error or "no result")
            continue
        text, outcome = f"{1e3 * statistics.median(seconds[name]):.1f} ms a step in {precision}", PASS
        for other, bound in BOUNDS.items():
            if other in seconds:
                rounds = list(zip(seconds[name], seconds[other], strict=True))
                ratio = statistics.median(mine / its for mine, its in rounds)
                late = statistics.median(mine - bound * its for mine, its in rounds)
                outcome = outcome if late <= SLACK_SECONDS[job.accelerator] else FAIL
                text += f", {ratio:.2f} x {other} (<= {bound:g})"
        if {name, "ddp"} <= exposed.keys():
            text += f", {exposed[name]:.0%} of it only communication (ddp {exposed['ddp']:.0%})"
        yield Row("fast", name, outcome, text)


def _safe(job: Job, error: str, log: str, ended: float) -> Row:
    raised = Path(job.path("raised"))
    if not raised.exists() or not error.startswith("ended with code"):
        return Row("safe", "zero3", FAIL, f"{error or 'no rank failed'}: {_last_error(log)}")
    seconds = ended - float(raised.read_text(encoding="utf-8"))
    text = f"all {job.world_size} ranks ended {seconds:.1f} s after one had raised (<= {SAFE_SECONDS:g})"
    if ON_PURPOSE not in log:
        return Row("safe", "zero3", FAIL, f"{text}, but its error is not shown")
    return Row("safe", "zero3", PASS if seconds <= SAFE_SECONDS else FAIL, text)
