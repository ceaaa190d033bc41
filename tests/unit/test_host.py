"""How much memory there is, as the kernel and control groups say it."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_zero import host

MIB = 2**20


def _group(folder: Path, names: tuple[str, str, str], limit: str, used: int, droppable: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 7\n{names[2]} {droppable}\n")


V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@pytest.mark.parametrize(("line", "kind", "names"), [("0::/job/step", "", V2), ("4:memory,x:/job/step", "memory", V1)])
def test_the_tightest_group_above_this_process_counts(line, kind, names, tmp_path) -> None:
    own = tmp_path / "cgroup"
    own.write_text(f"9:pids:/job/step\n{line}\n")
    root = tmp_path / "mounts" / kind
    _group(root / "job" / "step", names, "max" if not kind else str(2**63 - 4096), 10 * MIB, 0)
    _group(root / "job", names, str(100 * MIB), 80 * MIB, 5 * MIB)
    _group(root / "other", names, str(MIB), MIB, 0)
    found = list(host.cgroup_bytes_left(str(tmp_path / "mounts"), str(own)))
    assert min(found) == 25 * MIB


def test_a_containers_own_group_is_the_root_of_its_mount(tmp_path) -> None:
    """The path in ``/proc/self/cgroup`` may be the host's, of which nothing is to be seen."""
    own = tmp_path / "cgroup"
    own.write_text("0::/docker/0123456789ab\n")
    _group(tmp_path / "mounts", V2, str(64 * MIB), 80 * MIB, 0)
    assert list(host.cgroup_bytes_left(str(tmp_path / "mounts"), str(own))) == [0]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_memory_goes_back() -> None:
    """Blocks of 9 MiB freed between others that stay; glibc alone keeps the gaps once it has freed a large one."""
    code = (
        "import ctypes, sys, lightning_zero.host as host\n"
        "if sys.argv[1] == 'ours': host.return_freed_memory()\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.malloc.restype = ctypes.c_void_p; libc.malloc.argtypes = [ctypes.c_size_t]\n"
        "libc.free.argtypes = [ctypes.c_void_p]\n"
        "libc.free(libc.malloc(30 << 20))\n"
        "held = []\n"
        "for i in range(32):\n"
        "    block, between = libc.malloc(9 << 20), libc.malloc(200 << 10)\n"
        "    ctypes.memset(block, 1, 9 << 20); held.append((block, between))\n"
        "for block, _ in held: libc.free(block)\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('RssAnon')))\n"
    )

    def resident(who: str) -> int:
        done = subprocess.run([sys.executable, "-c", code, who], capture_output=True, text=True, check=True)
        return int(done.stdout) // 1024

    assert resident("ours") + 50 < resident("glibc")


@pytest.mark.parametrize(("wanted", "then"), [(100, 256), (400, 400), (1000, 512)])
def test_the_limit_of_open_files_rises_as_far_as_it_may(wanted, then) -> None:
    code = (
        "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (256, 512))\n"
        f"from lightning_zero.host import allow_open_files\nallow_open_files({wanted})\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"({then}, 512)"


def test_the_interface_of_a_route_is_found():
    if sys.platform != "linux" or "lo" not in [name for _, name in socket.if_nameindex()]:
        pytest.skip("no Linux, or no loopback")
    assert host.interface_to("127.0.0.1", 29500) == "lo"
    assert host.interface_to("no.such.host.invalid", 29500) is None
