"""Two hosts, each a network namespace with its own address, joined by a cable (a veth pair), train as one host does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.commands import started
from tests.system.test_launch import PROGRAM, expected, losses_of  # noqa: F401  (expected is a fixture)

ADDRESSES = ("10.213.7.1", "10.213.7.2")


def _ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


def _why_not() -> str | None:
    if shutil.which("ip") is None:
        return "ip is not installed (Debian: iproute2)"
    name = f"lz-probe-{os.getpid()}"
    made = _ip("netns", "add", name)
    _ip("netns", "del", name)
    return f"no network namespaces: {made.stderr.strip()}" if made.returncode else None


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    if reason := _why_not():
        pytest.skip(reason)
    names = [f"lz{os.getpid()}-{i}" for i in range(2)]
    try:
        for name in names:
            assert _ip("netns", "add", name).returncode == 0
        made = _ip(
            "link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1]
        )
        if made.returncode:
            pytest.skip(f"no veth pair: {made.stderr.strip()}")
        for name, address in zip(names, ADDRESSES, strict=True):
            for words in (["addr", "add", f"{address}/24", "dev", "cable"], ["link", "set", "cable", "up"]):
                assert _ip("-n", name, *words).returncode == 0
            _ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            _ip("netns", "del", name)


def test_two_hosts_give_the_losses_of_one(hosts, tmp_path: Path, expected) -> None:  # noqa: F811
    (tmp_path / "train.py").write_text(PROGRAM)
    env = {"NUM_NODES": "2", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29511"}
    env |= {"RES_OPTIONS": "timeout:1 attempts:1"}  # no name server can be reached from there: do not wait for it
    first, second = (["ip", "netns", "exec", host, sys.executable, "train.py"] for host in hosts)
    with (
        started(*first, cwd=tmp_path, NODE_RANK="0", **env) as one,
        started(*second, cwd=tmp_path, NODE_RANK="1", **env) as other,
    ):
        assert (one.wait(), other.wait()) == (0, 0)
        assert losses_of(one.output) == pytest.approx(expected, rel=1e-5)
        assert "LOSSES" not in other.output
