"""Ranks meet at a store, also at one where others, who are dead, have met before."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from lightning_zero.launch import rendezvous


@pytest.fixture
def agents_store(monkeypatch):
    """One that torchrun's agent keeps, and which outlives the ranks."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    rendezvous.forget()
    yield server
    rendezvous.forget()


class _Rank(threading.Thread):
    def __init__(self, port, rank, size):
        super().__init__(daemon=True)
        self.place = "127.0.0.1", port, rank, size
        self.store = None
        self.start()

    def run(self):
        self.store = rendezvous.meet(*self.place, "devices=1")

    def met(self, seconds):
        self.join(seconds)
        return self.store is not None


def _meet(port, size):
    ranks = [_Rank(port, rank, size) for rank in range(size)]
    assert all(rank.met(10) for rank in ranks)
    ranks[0].store.set("seen", "by all")
    assert all(rank.store.get("seen") == b"by all" for rank in ranks)
    return ranks


def test_a_rank_that_comes_back_early_waits_for_the_others_of_its_restart(agents_store, monkeypatch):
    """torchrun counts restarts on each node for itself: a node that only hears of another's failure counts none."""
    _meet(agents_store.port, 2)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    rendezvous.forget()  # as new processes
    early = _Rank(agents_store.port, 1, 2)
    assert not early.met(0.5)
    late = _Rank(agents_store.port, 0, 2)
    assert late.met(10)
    assert early.met(10)
    assert not early.store.check(["seen"])  # nothing of the ended ranks
    late.store.set("seen", "again")
    assert early.store.get("seen") == b"again"


def test_ranks_that_meet_get_one_store_and_the_missing_is_named(monkeypatch, capsys):
    monkeypatch.setenv(rendezvous.START_SECONDS, "0.6")
    monkeypatch.setattr(rendezvous, "PATIENCE_SECONDS", 0.2)
    rendezvous.forget()
    port = rendezvous.serve("127.0.0.1")
    with pytest.raises(
        TimeoutError, match=r"rank 0 has waited 1 s .* for rank 1, 2 of 3 ranks \(devices=3, num_nodes=1\)"
    ):
        rendezvous.meet("127.0.0.1", port, 0, 3, "devices=3, num_nodes=1")
    assert "it keeps waiting" in capsys.readouterr().err
    assert rendezvous.meet("127.0.0.1", port, 0, 1, "devices=1, num_nodes=1") is not None
    rendezvous.forget()
