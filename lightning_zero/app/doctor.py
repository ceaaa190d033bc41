"""``lightning-zero doctor``: reports what this machine has for training under ZeRO, and what is missing.

No probe can hang: probes that need several processes run in child processes with a time limit.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata

import torch
import torch.distributed as dist

GIB = 2**30
PACKAGES = ("lightning-zero", "torch", "lightning", "deepspeed", "hydra-core", "numpy", "transformers")
SMALL_SHARED_MEMORY_GIB = 1.0
"""Dataloader workers and NCCL pass tensors through shared memory; containers get 64 MiB by default."""

_RANK = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
from lightning_zero.comm.peer_memory import PeerMemory

backend, store, rank, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
device = torch.device("cpu" if backend == "gloo" else f"cuda:{rank}")
if device.type == "cuda":
    torch.cuda.set_device(device)
limit = timedelta(seconds=seconds)
dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)
value = torch.full((1024,), rank + 1.0, device=device)
dist.all_reduce(value)
assert value.eq(3.0).all().item(), value
print("works", flush=True)
if backend == "gloo":
    memory = PeerMemory(dist.group.WORLD, seconds)
    print("can read" if memory.ranks else "cannot read", flush=True)
    memory.close()
dist.destroy_process_group()  # at interpreter exit it may end in std::terminate
"""
"""The program of one of two ranks: it all-reduces 1 and 2. CPU ranks also exchange shards by reading the other's
memory."""

Section = dict[str, str]


def examine(timeout_seconds: float = 120.0) -> dict[str, Section]:
    """Runs all probes: section -> question -> answer. An answer that begins with ``no:`` names what is missing.

    Args:
        timeout_seconds: Time limit of each probe that starts processes.
    """
    probes: dict[str, Callable[[], Section]] = {
        "versions": versions,
        "hardware": hardware,
        "accelerators": accelerators,
        "two processes": lambda: _collectives(timeout_seconds),
    }
    found = {}
    for name, probe in probes.items():
        try:
            found[name] = probe()
        except Exception as error:  # one probe that fails must not hide the others
            found[name] = {"probe": f"no: {type(error).__name__}: {error}"}
    return found


def run(timeout_seconds: float, as_json: bool) -> int:
    """Prints the findings; returns 0 if two processes on this machine can exchange tensors, else 1."""
    found = examine(timeout_seconds)
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        for name, section in found.items():
            print(f"{name}:", *(f"  {key:<28}  {value}" for key, value in section.items()), sep="\n")
    return 0 if found["two processes"].get("gloo", "").startswith("works") else 1


# -- probes ----------------------------------------------------------------------------------------------------------


def versions() -> Section:
    """Of Python, the system and packages; the path of the compiler."""
    made = {"python": f"{platform.python_version()} ({sys.executable})", "system": platform.platform()}
    for package in PACKAGES:
        try:
            made[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            made[package] = "no: not installed"
    nccl = f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if dist.is_nccl_available() else ""
    made["torch built for"] = f"CUDA {torch.version.cuda}{nccl}" if torch.version.cuda else "CPU"
    compiler = os.environ.get("CXX", "c++")
    made[f"{compiler} (torch.compile)"] = shutil.which(compiler) or "no: not found"
    return made


def hardware() -> Section:
    """Processors and memory of this host."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpus": f"{usable} of {os.cpu_count()}",
        "memory": f"{pages / GIB:.1f} GiB",
        "shared memory": _shared_memory(),
    }


def _shared_memory(folder: str = "/dev/shm") -> str:
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return f"no: {folder} ({error.strerror})"
    text = f"{usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB free in {folder}"
    if usage.total < SMALL_SHARED_MEMORY_GIB * GIB:
        return f"no: {text}, too little for dataloader workers and NCCL; in a container: docker run --shm-size=8g"
    return text


def accelerators() -> Section:
    """Name and memory of each GPU; takes some memory of them."""
    made = {}
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        capability = f"compute capability {gpu.major}.{gpu.minor}"
        made[f"cuda:{index}"] = f"{gpu.name}, {gpu.total_memory / GIB:.1f} GiB, {capability}"
    missing = "finds no device (check whether nvidia-smi does)" if torch.version.cuda else "is built for the CPU"
    return made or {"cuda": f"no: torch {missing}"}


def _collectives(timeout_seconds: float) -> Section:
    outputs, error = two_processes("gloo", timeout_seconds)
    reads = "works" if all("can read" in lines for lines in outputs) else "no: the system forbids it"
    if reads != "works":
        reads += " (a container's seccomp profile, kernel.yama.ptrace_scope), so ranks use gloo"
    made = {"gloo": error or "works", "each other's memory": error or reads}
    if not dist.is_nccl_available():
        made["nccl"] = "not tried: not in this build of torch"
    elif torch.cuda.device_count() < 2:
        made["nccl"] = f"not tried: needs two GPUs, this machine has {torch.cuda.device_count()}"
    else:
        made["nccl"] = two_processes("nccl", timeout_seconds)[1] or "works"
    return made


def two_processes(backend: str, timeout_seconds: float) -> tuple[list[list[str]], str]:
    """Lets two processes of this machine all-reduce a tensor. Returns the lines that each has printed, and ``"no: "``
    with the reason if they could not in time, or else ``""``."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [[backend, f"{folder}/store", str(rank), str(timeout_seconds)] for rank in (0, 1)]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", _RANK, *each],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            for each in arguments
        ]
        try:
            outputs = [process.communicate(timeout=timeout_seconds)[0].strip().splitlines() for process in ranks]
        except subprocess.TimeoutExpired:
            why = "a firewall, or GLOO_SOCKET_IFNAME/NCCL_SOCKET_IFNAME"
            return [], f"no: not done after {timeout_seconds:g} s ({why})"
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    for process, lines in zip(ranks, outputs, strict=True):
        if "works" not in lines:  # the exit status does not count: a process may crash while it ends
            return outputs, f"no: {lines[-1] if lines else f'exit code {process.returncode}'}"
    return outputs, ""
