"""``lightning-zero check``: verifies on this machine what the tests verify elsewhere.

    same   losses, weights and a resumed checkpoint of stages 1 to 3 match DDP, in fp32 and in the given precision
    fits   bytes of parameters, gradients, optimizer states and messages match the plan; on CUDA the peak does, too
    fast   the time of a step is within a factor of DDP's and of raw ``fully_shard``'s, measured alternately; on several
           GPUs the line also has the share of a step in which the device only communicates
    safe   if one rank raises, all processes end within seconds

Each part runs in separate processes (:mod:`lightning_zero.app.check_ranks`), so a part that crashes becomes a failed
line. If torchrun, srun or mpirun has started this command once per rank, each of these processes starts one rank of
each part. Otherwise this process starts rank 0, whose Trainer starts the other ranks as in any run. All processes of a
part write into one pipe, which ends when the last of them has ended.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments import MPIEnvironment, SLURMEnvironment, TorchElasticEnvironment

from lightning_zero.app.check_ranks import LINE, ON_PURPOSE, PARTS, Job, command
from lightning_zero.app.doctor import hardware, versions
from lightning_zero.config import ZeroConfig
from lightning_zero.planner.study import precision_name

PASS, FAIL, NOT_HERE = "pass", "FAIL", "not on this machine"
SAFE_SECONDS = 30.0
"""Upper bound of the time from one rank's error to the end of the last process."""
GONE_SECONDS = 15.0
"""Time for the other processes of a part to end after its rank 0 was killed. The supervisor gives them 3 s."""
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
    """Runs the check, prints the lines of each part when it has ended, and writes ``check.json`` and ``check.md``.

    Args:
        module: An untrained ``LightningModule``; ``None`` uses a small GPT. Other processes unpickle it. Classes that
            the script itself defines need ``cloudpickle`` for that.
        data: Its ``LightningDataModule`` or training ``DataLoader``, with twelve micro-batches per rank that are the
            same in each run.
        precision: As for ``Trainer(precision=...)``. fp32 is always checked as well.
        devices: Ranks on this host; ``None`` is one per GPU, or two on CPUs. A single GPU is shared by two ranks. Ranks
            that another launcher has started are those that are used.
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
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # otherwise is_available() takes device memory
    on_gpu, settings = accelerator != "cpu" and torch.cuda.is_available(), dict(settings or {})
    if accelerator not in ("auto", "cpu", "gpu" if on_gpu else "auto"):
        raise ValueError(f"accelerator={accelerator!r}: use auto, cpu, or gpu where torch finds one.")
    ZeroConfig.from_kwargs(stage=3, **settings)
    precision = precision_name(precision)
    if precision.startswith("16") and not on_gpu:
        raise ValueError(f"precision={precision!r}: on CPUs use bf16-mixed or 32-true.")
    environment = _environment()
    num_devices, num_nodes = _ranks(environment, devices, on_gpu)
    is_first = environment is None or environment.global_rank() == 0
    report = Report()
    with _scratch(Path(folder), environment, is_first) as scratch:
        job = Job(
            folder=str(scratch),
            accelerator="gpu" if on_gpu else "cpu",
            devices=num_devices,
            num_nodes=num_nodes,
            precision=precision,
            settings=settings,
            own=module is not None,
            shares_gpu=on_gpu and environment is None and torch.cuda.device_count() == 1,
        )
        if job.own and is_first:
            torch.save((module, data), scratch / "module.pt", pickle_module=_pickle())
        report.about["run"] = asdict(replace(job, folder=os.fspath(folder)))
        for part in (part for part in PARTS if part in parts):
            began = time.time()
            rows, output = _run(part, job, environment, timeout_seconds)
            report.about["run"][f"seconds of {part}"] = round(time.time() - began)
            report.rows += rows
            if any(row.outcome == FAIL for row in rows):
                report.logs[part] = output[-6000:]
            if is_first:
                print(*rows, sep="\n", flush=True)
            elif rows:  # this rank has failed; the report, which only rank 0 writes, does not have its output
                print(output, file=sys.stderr, flush=True)
    if is_first:
        report.about |= {"versions": versions(), "hardware": hardware()}
        report.write(Path(folder))
        verdict = "all passed" if report.ok else "not all passed"
        print(f"{verdict}: see {Path(folder, 'check.md')}, {Path(folder, 'check.json')}", flush=True)
    return report


# -- settings --------------------------------------------------------------------------------------------------------


def _pickle() -> Any:
    try:
        import cloudpickle  # optional: only classes that the script itself defines need it
    except ModuleNotFoundError:
        return pickle
    return cloudpickle


def _environment() -> Any:
    """Returns Lightning's environment if torchrun, srun or mpirun has started this command per rank, else ``None``."""
    if TorchElasticEnvironment.detect():
        return TorchElasticEnvironment()
    if int(os.environ.get("SLURM_NTASKS", "1")) > 1:
        return SLURMEnvironment(auto_requeue=False)
    return MPIEnvironment() if MPIEnvironment.detect() else None


def _ranks(environment: Any, asked: int | None, on_gpu: bool) -> tuple[int, int]:
    """Returns the number of ranks on each host, and the number of hosts."""
    if environment is not None:
        found = environment.world_size()
        env, here = os.environ, asked or found // int(os.environ.get("SLURM_NNODES", "1"))
        here = int(env.get("LOCAL_WORLD_SIZE") or env.get("SLURM_NTASKS_PER_NODE") or here)
        if asked not in (None, here):
            raise ValueError(f"devices={asked}: the launcher has started {here} ranks here; leave devices out.")
        return here, found // here
    gpus = torch.cuda.device_count() if on_gpu else 0
    if asked is not None and not 1 <= asked <= (gpus or asked):
        raise ValueError(f"devices={asked}: use 1 to {gpus}." if gpus else f"devices={asked}: use 1 or more.")
    return 2 if gpus == 1 else asked or gpus or 2, 1


@contextmanager
def _scratch(folder: Path, environment: Any, is_first: bool) -> Iterator[Path]:
    """Provides a folder for the user's module and for checkpoints, and removes it afterwards."""
    name = os.getpid() if environment is None else environment.main_port  # ranks must choose the same name
    made = folder.resolve() / f".lightning-zero-check-{name}"
    if is_first:
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir()
    try:
        yield made
    finally:
        if is_first:
            shutil.rmtree(made, ignore_errors=True)


# -- processes -------------------------------------------------------------------------------------------------------


def _run(part: str, job: Job, environment: Any, timeout_seconds: float) -> tuple[list[Row], str]:
    """Runs one part, and returns its lines and its output. Other ranks than 0 return a line only if they fail."""
    if part == "fast" and job.shares_gpu:  # times of ranks that share a GPU say nothing
        job = replace(job, devices=1, shares_gpu=False)
    if part == "safe" and (environment is not None or job.world_size == 1):
        why = "one rank waits for no other" if environment is None else "the launcher of the ranks also ends them"
        return [Row(part, "zero3", NOT_HERE, why)], ""
    failure, output = _processes(command(part, job), environment, timeout_seconds)
    if part == "safe":
        return [_safe(job, failure, output, time.time())], output
    outcomes = {True: PASS, False: FAIL, None: NOT_HERE}
    lines = [json.loads(line) for line in re.findall(f"{LINE}(.*)", output)]
    rows = [Row(part, what, outcomes[passes], figures) for what, passes, figures in lines]
    is_first = environment is None or environment.global_rank() == 0
    if failure or (is_first and not rows):
        rows.append(Row(part, "end", FAIL, f"{failure or 'no result'}: {_last_error(output)}"))
    return rows, output


def _processes(words: Sequence[str], environment: Any, timeout_seconds: float) -> tuple[str, str]:
    """Runs a command until its last process has ended. Returns the failure, or ``""``, and the output."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if environment is None:  # a batch job's variables would describe other ranks
        env = {name: value for name, value in env.items() if not name.startswith(_OF_LAUNCHERS)}
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=env,
        start_new_session=True,  # only this process gets Ctrl-C
        text=True,
        errors="replace",
    )
    failure, output = f"not done after {timeout_seconds:g} s", "the other ranks did not end"
    try:
        output, _ = process.communicate(timeout=timeout_seconds)
        failure = f"ended with code {process.returncode}" if process.returncode else ""
    except subprocess.TimeoutExpired:
        pass
    finally:
        if process.poll() is None:  # the supervisor of rank 0 then ends the other ranks
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                output, _ = process.communicate(timeout=GONE_SECONDS)
    return failure, output


def _last_error(output: str) -> str:
    """Returns the last line of ``output`` that names an error, or else the last line."""
    named = re.findall(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Lost)\b.*", output, re.MULTILINE)
    return (named or output.strip().splitlines() or ["no output"])[-1][:300]


def _safe(job: Job, failure: str, output: str, ended: float) -> Row:
    raised = re.search(ON_PURPOSE + r" at ([\d.]+)", output)
    if raised is None or not failure.startswith("ended with code"):
        return Row("safe", "zero3", FAIL, f"{failure or 'no rank failed'}: {_last_error(output)}")
    seconds = ended - float(raised[1])
    text = f"all {job.world_size} ranks ended {seconds:.1f} s after one had raised (<= {SAFE_SECONDS:g})"
    return Row("safe", "zero3", PASS if seconds <= SAFE_SECONDS else FAIL, text)
