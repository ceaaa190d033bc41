"""``lightning-zero doctor``: reports what this machine has for training under ZeRO, and what is missing.

An answer that begins with ``no:`` names what is missing.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata

import torch
import torch.distributed as dist

GIB = 2**30
PACKAGES = ("lightning-zero", "torch", "lightning", "deepspeed", "hydra-core", "numpy", "transformers")
SMALL_SHARED_MEMORY_GIB = 1.0
"""Dataloader workers and NCCL pass tensors through shared memory; containers get 64 MiB by default."""
TIMEOUT_SECONDS = 120.0
"""Time limit of two processes that exchange tensors."""

_RANK = """
import sys, torch, torch.distributed as dist

backend, store, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
device = torch.device("cpu" if backend == "gloo" else f"cuda:{rank}")
if device.type == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2)
value = torch.full((1024,), rank + 1.0, device=device)
dist.all_reduce(value)
assert value.eq(3.0).all().item(), value
print("works", flush=True)
dist.destroy_process_group()  # at interpreter exit it may end in std::terminate
"""
"""The program of one of two ranks: it all-reduces 1 and 2."""

Section = dict[str, str]


def run(as_json: bool) -> int:
    """Prints the findings; returns 0 if two processes on this machine can exchange tensors, else 1."""
    backends = ["gloo"] if torch.cuda.device_count() < 2 else ["gloo", "nccl"]
    exchanges = {backend: two_processes(backend) for backend in backends}
    found = {"versions": versions(), "hardware": hardware(), "two processes": exchanges}
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        for name, section in found.items():
            print(f"{name}:", *(f"  {key:<28}  {value}" for key, value in section.items()), sep="\n")
    return 0 if exchanges["gloo"] == "works" else 1


def versions() -> Section:
    """Of Python, the system and packages."""
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
    """Processors, memory and GPUs of this host; takes some memory of the GPUs."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    made = {
        "cpus": f"{usable} of {os.cpu_count()}",
        "memory": f"{pages / GIB:.1f} GiB",
        "shared memory": _shared_memory(),
    }
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        capability = f"compute capability {gpu.major}.{gpu.minor}"
        made[f"cuda:{index}"] = f"{gpu.name}, {gpu.total_memory / GIB:.1f} GiB, {capability}"
    if not torch.cuda.device_count():
        missing = "finds no device (check whether nvidia-smi does)" if torch.version.cuda else "is built for the CPU"
        made["cuda"] = f"no: torch {missing}"
    return made


def _shared_memory(folder: str = "/dev/shm") -> str:
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return f"no: {folder} ({error.strerror})"
    text = f"{usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB free in {folder}"
    if usage.total < SMALL_SHARED_MEMORY_GIB * GIB:
        return f"no: {text}, too little for dataloader workers and NCCL; in a container: docker run --shm-size=8g"
    return text


def two_processes(backend: str, timeout_seconds: float = TIMEOUT_SECONDS) -> str:
    """Lets two processes of this machine all-reduce a tensor. Returns ``"works"``, or ``"no: "`` and the reason."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", _RANK, backend, f"{folder}/store", str(rank)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            for rank in (0, 1)
        ]
        try:
            outputs = [process.communicate(timeout=timeout_seconds)[0].strip().splitlines() for process in ranks]
        except subprocess.TimeoutExpired:
            why = "a firewall, or GLOO_SOCKET_IFNAME/NCCL_SOCKET_IFNAME"
            return f"no: not done after {timeout_seconds:g} s ({why})"
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    for process, lines in zip(ranks, outputs, strict=True):
        if "works" not in lines:  # the exit status does not count: a process may crash while it ends
            return f"no: {lines[-1] if lines else f'exit code {process.returncode}'}"
    return "works"
