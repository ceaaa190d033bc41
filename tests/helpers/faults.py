"""Breaks a run on purpose, in every way that runs break, and looks at what is left; lets ranks do unlike things, too.

``FAULTS`` is the table; :func:`break_run` starts this very file as a user would start a script (two ranks, stage 3, a
data loader with a worker process, a checkpoint after every step), lets the fault happen on one rank in step 3, and
measures from that moment until the last process is gone.

    python faults.py FAULT [WORD ...]

Words: ``saves`` (callbacks save on exceptions, and only then), ``again`` (the script catches the error and fits once
more), ``logs`` (a file for each rank). Files appear as the run goes on: ``script<rank>``, ``setup<rank>``, ``fault``.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.system.commands import ROOT, started, wait_until

HANG_SECONDS = 15.0
"""``timeout_seconds`` of the runs: what a rank that stops answering may cost. With 5 s a busy machine's ranks, one of
them late with its data loader, ended before the fault."""


@dataclass(frozen=True)
class Fault:
    """One way to break a run."""

    text: str
    rank: int | None
    """``None``: on every rank."""
    shows: tuple[str, ...]
    """What the user must see."""
    hangs: bool = False
    """Whether the end may take ``timeout_seconds`` longer."""
    breaks: bool = True
    """Whether the run ends with it; else it goes on, and ends as if nothing had happened."""


OUT_OF_MEMORY = "killed by SIGKILL, probably out of memory"
FAULTS = {
    "exception-0": Fault("exception on rank 0", 0, ("LookupError: rank 0 is not well", "Traceback")),
    "exception-1": Fault("exception on rank 1", 1, ("rank 1 (process", "LookupError: rank 1 is not well", "Traceback")),
    "kill-0": Fault(
        "kill -9 of rank 0",
        0,
        ("rank 0 (process", OUT_OF_MEMORY, "ended unexpectedly"),
    ),
    "kill-1": Fault("kill -9 of rank 1", 1, ("rank 1 (process", OUT_OF_MEMORY)),
    "stop-0": Fault("rank 0 stops answering (SIGSTOP)", 0, ("rank 0 (process", "did not react"), hangs=True),
    "stop-1": Fault("rank 1 stops answering (SIGSTOP)", 1, ("did not respond within timeout_seconds",), hangs=True),
    "dry-0": Fault(
        'data loader of rank 0 runs dry early, `uneven="error"`',
        0,
        ("rank 0 ends its epoch after 3 training batches",),
    ),
    "dry-1": Fault(
        'data loader of rank 1 runs dry early, `uneven="error"`',
        1,
        ("rank 1 ends its epoch after 3 training batches",),
    ),
    "memory-1": Fault("out of memory on rank 1", 1, ("rank 1 (process", "allocate memory", "Traceback")),
    **{
        f"uneven-{name}": Fault(f"uneven {text}", 0, (f"rank 0 has done {name}",), breaks=False)
        for name, text in (
            ("shortest", '`fit`: 3 and 20 batches, `uneven="shortest"`'),
            ("validate", "validation in `fit`: 1 and 3 batches"),
            ("test", "`test`: 1 and 3 batches"),
            ("predict", "`predict`: 1 and 3 batches"),
        )
    },
    "alone-0": Fault("rank 0 alone runs a forward in a hook", 0, ("rank 0 has done alone",), breaks=False),
    "interrupt": Fault("Ctrl-C", 0, ("Detected KeyboardInterrupt",)),
}
OTHERS = {
    "exception-all": Fault("the same exception on both ranks", None, ()),
    "swallow-0": Fault("rank 0 stands still in code that catches everything, while the run is set up", 0, ()),
}
"""Those that ``benchmarks/faults.py`` has no row for."""


@dataclass
class Outcome:
    """What was seen of a broken run."""

    exit_code: int
    seconds: float
    """From the fault to the end of the last process."""
    output: str
    left_behind: list[str] = field(default_factory=list)
    """Processes, whose ports end with them, files in ``/dev/shm`` and in the temporary folder."""
    checkpoint_step: int = -1
    """``global_step`` of the newest checkpoint, read back."""


def break_run(name: str, folder: Path) -> Outcome:
    """Runs until the fault ``name`` has ended it."""
    # A worker of a data loader has a socket in there, whose path may have 107 bytes: pytest's own folders are too long
    with tempfile.TemporaryDirectory(prefix="lz-", dir="/tmp") as temporary:
        env = {"PYTHONPATH": str(ROOT), "TMPDIR": temporary, "PYTHONUNBUFFERED": "1"}
        with started(__file__, name, fork="first", cwd=folder, **env) as program:
            program.until(lambda: (folder / "fault").exists() or program.has_ended())
            assert (folder / "fault").exists(), "it ended before the fault"
            if name == "interrupt":
                os.killpg(program.pid, signal.SIGINT)  # as a terminal does
            code = program.wait()
            wait_until(lambda: not program.processes(), 10.0)
            ended = time.time()
            left = [f"process {pid}" for pid in program.processes()]
            output = program.output
        outcome = Outcome(code, ended - float((folder / "fault").read_text()), output, left)
        wait_until(lambda: not _files_left(folder, Path(temporary)), 5.0)  # a killed process gives its files back last
        outcome.left_behind += _files_left(folder, Path(temporary))
    outcome.checkpoint_step = _newest_step(folder)
    return outcome


def _files_left(folder: Path, temporary: Path) -> list[str]:
    # torch's cache of compiled code is meant to stay
    left = [f"temporary file {p.name}" for p in temporary.iterdir() if not p.name.startswith("torchinductor_")]
    pids = [path.name.removeprefix("pid") for path in folder.glob("pid*")]
    shared = [path.name for path in Path("/dev/shm").iterdir()]
    left += [f"/dev/shm/{name}" for name in shared if any(f"_{pid}_" in name for pid in pids)]
    return left


def _newest_step(folder: Path) -> int:
    import torch

    (newest,) = (folder / "checkpoints").glob("last.ckpt")
    state = torch.load(newest, weights_only=False)
    assert state["optimizer_states"]
    assert all(value.isfinite().all() for value in state["state_dict"].values())
    return int(state["global_step"])


# ---------------------------------------------------------------------------------------------------------------------
# The program that is broken
# ---------------------------------------------------------------------------------------------------------------------


RANK = int(os.environ.get("LOCAL_RANK", "0"))


def _send(line: str) -> None:
    """In one write: the parts of an unbuffered print get mixed with the other rank's."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _stand_still() -> None:
    while True:
        try:
            time.sleep(300.0)
        except BaseException:
            Path("swallowed").touch()


def _happen(name: str, rank: int) -> None:
    Path("fault").write_text(str(time.time()))
    if name.startswith("exception"):
        raise LookupError("no rank is well" if name == "exception-all" else f"rank {rank} is not well")
    if name.startswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if name.startswith("stop"):
        os.kill(os.getpid(), signal.SIGSTOP)
    if name.startswith("memory"):
        import resource

        import torch

        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, used + 2**26))
        torch.empty(2**34)


def _main(name: str, *words: str) -> None:
    import lightning as L
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
    from torch.utils.data import DataLoader

    from lightning_zero import ZeroStrategy

    fault = {**FAULTS, **OTHERS}[name]

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))

        def setup(self, stage: str) -> None:
            Path(f"setup{RANK}").touch()
            if name.startswith("swallow") and fault.rank == RANK:
                _stand_still()

        def on_train_start(self) -> None:
            _send(f"trains in rank {RANK}")

        def train_dataloader(self) -> Any:
            dry = name.startswith(("dry", "uneven-shortest")) and self.global_rank == fault.rank
            batches = 3 if dry else 10_000 if name == "interrupt" else 20
            return DataLoader(torch.ones(4 * batches, 8), batch_size=4, num_workers=1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2 and fault.rank in (None, RANK):
                _happen(name, RANK)
            return self.net(batch).square().mean()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if name.startswith("alone") and batch_idx == 2 and self.global_rank == fault.rank:
                with torch.no_grad():
                    self.net(batch)

        def val_dataloader(self) -> Any:
            batches = 3 if self.global_rank or not name.startswith("uneven") else 1
            return DataLoader(torch.ones(4 * batches, 8), batch_size=4)

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("loss", self.net(batch).square().mean(), sync_dist=True)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch)

        test_step = validation_step
        test_dataloader = predict_dataloader = val_dataloader

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def make_trainer() -> L.Trainer:
        strategy = ZeroStrategy(
            stage=3,
            timeout_seconds=HANG_SECONDS if fault.hangs else 600.0,
            uneven="shortest" if name == "uneven-shortest" else "error",
            rank_logs="logs" if "logs" in words else None,
            units=["Linear"],
        )
        each_step = [ModelCheckpoint("checkpoints", every_n_train_steps=1, save_last=True)]
        on_exceptions = [OnExceptionCheckpoint("saved"), ModelCheckpoint("monitored", save_on_exception=True)]
        return L.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=2,
            max_epochs=1,
            num_sanity_val_steps=0,
            limit_val_batches=1.0 if name == "uneven-validate" else 0,
            use_distributed_sampler=False,
            callbacks=on_exceptions if "saves" in words else each_step,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    Path(f"pid{os.getpid()}").touch()
    torch.manual_seed(0)
    module, loop, trainer = Module(), name.partition("-")[2], make_trainer()
    try:
        trainer.fit(module)
    except Exception as error:
        if "again" not in words:
            raise
        _send(f"CAUGHT rank {RANK}: {type(error).__name__}: {error}")
        make_trainer().fit(Module())
        _send("FITTED again")
    if loop in ("test", "predict"):
        getattr(trainer, loop)(module)
    if not fault.breaks and trainer.is_global_zero:
        print(f"rank 0 has done {name.removeprefix('uneven-').removesuffix('-0')}", flush=True)


if __name__ == "__main__":
    Path(f"script{RANK}").touch()
    _main(*sys.argv[1:])
