"""The command ``lightning-zero``.

The first word is the command; Hydra parses the rest. :mod:`lightning_zero.launch.launcher` starts the other ranks of a
run.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import lightning_zero
from lightning_zero.checkpoint import FORMATS
from lightning_zero.errors import CheckpointError

COMMANDS = {
    "fit": "train a LightningModule",
    "validate": "run the validation loop",
    "test": "run the test loop",
    "predict": "run the predict loop and store the results, one file per rank",
    "plan": "show what each stage would store and send, and which one fits",
    "submit": "write a batch script that runs fit and submit it to SLURM (--dry-run only writes it)",
}


def main() -> None:
    """Entry point; the exit status is 0, 2 after a mistake on the command line or in the config, or 1 after a failed
    run.

    ``--help`` and ``--version`` do not import PyTorch or Lightning.
    """
    arguments = sys.argv[1:]
    if arguments and arguments[0] in COMMANDS:
        _run_hydra(arguments[0], arguments[1:])
        return
    parsed = _parser().parse_args(arguments)
    try:
        parsed.run(parsed)
    except BrokenPipeError:  # the reader has closed its end, as `... | head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes into it when it ends
    except (OSError, ValueError, CheckpointError) as error:
        _exit_with(str(error))


# -- commands with ordinary arguments --------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-zero",
        description="Trains any LightningModule under ZeRO stage 1, 2 or 3.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  lightning-zero fit experiment=main_job\n"
        "  lightning-zero fit strategy=zero2 trainer.devices=2 trainer.max_steps=100\n"
        "  lightning-zero plan trainer.devices=8 trainer.precision=bf16-mixed plan.device_memory_gib=80\n"
        "  lightning-zero fit --help        every group and its choices\n"
        "  lightning-zero fit --cfg job     only the config",
    )
    parser.add_argument("--version", action="version", version=f"lightning-zero {lightning_zero.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)

    def tool(name: str, run: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=run.__doc__)
        made.set_defaults(run=run)
        return made

    convert = tool("convert", _convert, "convert a checkpoint to another form")
    convert.add_argument("source", help="a checkpoint: file, sharded folder, or fsspec URL")
    convert.add_argument("target", help="path to write; must not exist yet")
    convert.add_argument("--format", choices=FORMATS, help="default: the form that SOURCE does not have")
    convert.add_argument("--prefix", help="safetensors: prefix to remove from names (default: that of an only child)")
    trust = "unpickle anything SOURCE holds; only if you trust its origin"
    convert.add_argument("--no-weights-only", action="store_true", help=trust)

    doctor = tool("doctor", _doctor, "show what this machine has for training, and what is missing")
    doctor.add_argument("--json", action="store_true", help="print JSON")

    check = tool("check", _check, "prove on this machine that stages 1 to 3 train as DDP, fit the plan, and are fast")
    number = "ranks here (default: the GPUs, or 2 processes on CPUs)"
    check.add_argument("--devices", type=int, metavar="N", help=number)
    check.add_argument("--accelerator", default="auto", choices=["auto", "cpu", "gpu"], help="default: auto")
    check.add_argument("--precision", default="bf16-mixed", help="besides fp32 (default: bf16-mixed)")
    check.add_argument("--only", default="same,fits,fast,safe", metavar="PARTS", help="of same,fits,fast,safe")
    check.add_argument("--out", default=".", metavar="FOLDER", help="for check.json and check.md (default: here)")
    check.add_argument("--timeout", type=float, default=180.0, metavar="SECONDS", help="for each part (default: 180)")

    init = tool("init", _init, "create a folder with a small project that trains at once")
    init.add_argument("folder", help="folder to create; must be empty if it exists")
    return parser


def _convert(arguments: argparse.Namespace) -> None:
    """Converts a checkpoint to another form, without an accelerator and with one tensor in memory at a time."""
    from lightning_zero.checkpoint.convert import convert

    form = convert(
        arguments.source,
        arguments.target,
        arguments.format,
        weights_only=not arguments.no_weights_only,
        prefix=arguments.prefix,
    )
    print(f"{arguments.target} ({form})")


def _doctor(arguments: argparse.Namespace) -> None:
    """Prints versions, hardware, shared memory and whether two processes can exchange tensors; exits with 1 if they
    cannot."""
    from lightning_zero.app.doctor import run

    sys.exit(run(arguments.json))


def _check(arguments: argparse.Namespace) -> None:
    """Trains a small GPT under DDP and stages 1 to 3 on what is here, in about three minutes. Prints whether losses,
    weights and a resumed checkpoint are the same, memory is as planned, steps are as fast, and a failing rank ends all;
    writes check.json and check.md; exits with 1 where one of them fails."""
    from lightning_zero.app.check import check

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: nothing may remain
    try:
        report = check(
            parts=[part for part in arguments.only.split(",") if part],
            devices=arguments.devices,
            accelerator=arguments.accelerator,
            precision=arguments.precision,
            folder=arguments.out,
            timeout_seconds=arguments.timeout,
        )
    except KeyboardInterrupt:
        _exit_with("interrupted; no report was written", 130)
    sys.exit(0 if report.ok else 1)


def _init(arguments: argparse.Namespace) -> None:
    """Creates a small project: a module, its data, a Hydra app with its own config, a test and a batch script."""
    from lightning_zero.app.project import make_project

    print(make_project(Path(arguments.folder)))


# -- commands with Hydra's arguments ---------------------------------------------------------------------------------


def _run_hydra(command: str, arguments: list[str]) -> None:
    import hydra  # takes half a second, which the tools do not need
    from hydra.errors import HydraException
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from omegaconf.errors import OmegaConfBaseException

    from lightning_zero.launch import session

    dry_run = command == "submit" and "--dry-run" in arguments

    @hydra.main(version_base="1.3", config_path="pkg://lightning_zero.conf", config_name="config")
    def app(cfg: Any) -> float | None:
        return run_command(command, cfg, dry_run)

    sys.argv = [sys.argv[0], *(item for item in arguments if not (dry_run and item == "--dry-run"))]
    session.program_arguments = [command]  # the other ranks get it before Hydra's arguments
    # Without this Hydra prints a shortened traceback and exits; with it Hydra raises, and we print the message.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    try:
        app()
    except (HydraException, OmegaConfBaseException) as error:  # ConfigError among them
        from lightning_zero.app.hydra_config import explain

        _exit_with(explain(error))
    except MisconfigurationException as error:
        _exit_with(str(error))
    except (CheckpointError, FileNotFoundError) as error:
        if not (isinstance(error, CheckpointError) or str(error).startswith("Checkpoint file not found")):
            raise
        _exit_with(str(error), 1)


def run_command(command: str, cfg: Any, dry_run: bool = False) -> float | None:
    """Runs ``command`` (a name in :data:`COMMANDS`) with ``cfg``, inside a Hydra job.

    Returns:
        The value of the metric ``optimized_metric``, for the sweeper; ``None`` if that is not set.
    """
    from hydra.core.hydra_config import HydraConfig
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from lightning.pytorch import seed_everything

    from lightning_zero.app.hydra_config import ConfigError, check_launcher, make_object, make_trainer
    from lightning_zero.launch.launcher import end_session

    # Import modules from the folder of the command, as `python -m` does, in other ranks and sweep workers too.
    if (started_in := HydraConfig.get().runtime.cwd) not in sys.path:
        sys.path.insert(0, started_in)
    if command == "plan":
        from lightning_zero.app.plan_command import run_plan

        run_plan(cfg)
        return None
    run_folder = Path(HydraConfig.get().runtime.output_dir)
    if command == "submit":
        submit(cfg, run_folder, dry_run)
        return None
    check_launcher(cfg, "local")
    profiler = trace_profiler(cfg, run_folder) if cfg.profile else None
    trainer = make_trainer(cfg, default_root_dir=str(run_folder), profiler=profiler)
    for callback in trainer.checkpoint_callbacks:
        if getattr(callback, "dirpath", "") is None:
            vars(callback)["dirpath"] = str(run_folder / "checkpoints")
    if cfg.seed is not None:
        seed_everything(cfg.seed, workers=True, verbose=False)
    module = make_object(cfg, "model")
    data = make_object(cfg, "data")
    if module is None:
        raise ConfigError("model is empty: set it, such as model=gpt or model=custom model._target_=my_module.MyClass")
    show = rank_zero_only(print)
    try:
        # Lightning refuses it for ranks that are spawned or forked, which return no predictions
        options = {"return_predictions": True} if command == "predict" else {}
        results = getattr(trainer, command)(module, data, ckpt_path=cfg.ckpt_path, **options)
        if command == "predict":
            import torch

            path = run_folder / f"predictions-rank{trainer.global_rank}.pt"
            torch.save(results, path)
            print(f"predictions: {path}", flush=True)
        if command == "fit":  # Lightning prints the metrics of the other commands
            metrics = (f"{name} {float(value):.4g}" for name, value in trainer.callback_metrics.items())
            show(", ".join(metrics), flush=True)
        show(f"run folder: {run_folder}", flush=True)
    except BaseException:
        end_session(failed=True)
        raise
    if cause := end_session():  # the next job of a sweep starts clean
        raise RuntimeError(f"The run is done on rank 0, but {cause}.")
    if (name := cfg.optimized_metric) is None:
        return None
    if name not in trainer.callback_metrics:
        known = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
        raise ConfigError(f"optimized_metric={name!r}: the module has not logged it; it has logged {known}.")
    return float(trainer.callback_metrics[name])


def trace_profiler(cfg: Any, run_folder: Path) -> Any:
    """Lightning's profiler, set to write a Chrome trace of three batches per rank after two warm-up batches."""
    import torch
    from lightning.pytorch.profilers import PyTorchProfiler

    from lightning_zero.app.hydra_config import ConfigError

    if cfg.trainer.get("profiler") is not None:
        raise ConfigError(f"profile=true with trainer.profiler={cfg.trainer.profiler}: remove one of them")
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1)
    return PyTorchProfiler(dirpath=run_folder, filename="trace", schedule=schedule)


def submit(cfg: Any, run_folder: Path, dry_run: bool) -> None:
    """Writes ``job.sbatch`` into the run folder, which the job will use as well, and submits it to SLURM."""
    from hydra.core.hydra_config import HydraConfig

    from lightning_zero.app.hydra_config import ConfigError, make_slurm_job, make_strategy
    from lightning_zero.launch.hydra_job import config_flags

    job = make_slurm_job(cfg)
    make_strategy(**cfg.strategy)  # finds mistakes now, not after hours in a queue
    given = [item for item in HydraConfig.get().overrides.task if not item.lstrip("+~").startswith("launcher")]
    if twice := [item for item in given if item.lstrip("+").startswith(("trainer.devices=", "trainer.num_nodes="))]:
        instead = "launcher.gpus_per_node (or tasks_per_node) and launcher.nodes"
        raise ConfigError(f"{', '.join(twice)}: the launcher sets these; use {instead}.")
    if job.gpus_per_node and not any(item.startswith("trainer=") for item in given):
        given.append("trainer=gpu")
    given += [f"trainer.devices={job.devices}", f"trainer.num_nodes={job.nodes}"]
    given.append(f"hydra.run.dir='{run_folder}'")
    start = Path(HydraConfig.get().runtime.cwd)
    command = [sys.executable, "-m", "lightning_zero", "fit", *config_flags(sys.argv[1:]), *given]
    path = run_folder / "job.sbatch"
    path.write_text(job.script(command, run_folder, start), encoding="utf-8")
    (run_folder / "ranks").mkdir(exist_ok=True)
    print(f"batch script: {path}", flush=True)
    if dry_run:
        return
    try:
        done = subprocess.run(["sbatch", str(path)], capture_output=True, text=True, check=False, cwd=start)
    except FileNotFoundError:
        raise ConfigError(f"sbatch is not installed on this machine: submit {path} on one that has SLURM.") from None
    if done.returncode:
        raise ConfigError(f"sbatch refused {path}: {done.stderr.strip()}")
    print(done.stdout.strip(), flush=True)


def _exit_with(message: str, status: int = 2) -> NoReturn:
    sys.stderr.write(f"lightning-zero: error: {message.strip()}\n")
    sys.stderr.flush()
    sys.exit(status)
