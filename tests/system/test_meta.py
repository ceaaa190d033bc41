"""Memory of a rank that materializes a module on the meta device, of which it keeps a part."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.helpers import materialized
from tests.helpers.ranks import ROOT


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_rank_holds_its_shards_and_one_unit():
    """One rank of eight, whose others are not there. The last unit is the largest: the head."""
    pytest.importorskip("transformers")
    sizes = {**materialized.SEVEN_BILLION, "hidden_size": 1024, "num_hidden_layers": 6, "vocab_size": 32000}
    sizes |= {"intermediate_size": 2752, "num_attention_heads": 8, "num_key_value_heads": 8}
    job = json.dumps({"world_size": 8, "sizes": sizes, "room_gib": 4})
    command = [sys.executable, "-m", "tests.helpers.materialized", job]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["peak"] == pytest.approx(found["parameters"] / 8 + found["largest"], rel=0.1)  # the allocator's gaps
