"""Makes docs/memory.md: what a rank stores and sends, with every figure computed or measured here.

    python benchmarks/memory.py > docs/memory.md              # measures again, about 15 minutes and 8 GiB
    python benchmarks/memory.py --keep docs/memory.md         # prints the page with that file's measurements

Planned figures that differ from measured ones by more than 10 % are listed on stderr, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

STAGE_NAMES = {0: "DDP", 1: "stage 1", 2: "stage 2", 3: "stage 3"}
PSI, RANKS = 7.5e9, 64
POPULAR = {1: "12 + 4/N", 2: "8 + 8/N", 3: "16/N"}
RIGHT = {1: "4 + 12/N", 2: "2 + 14/N", 3: "16/N"}
RIGHT_FP32 = {1: "8 + 8/N", 2: "4 + 12/N", 3: "16/N"}
FSDP2 = (
    # stage, mixed, accumulating, formula, when
    (1, True, False, "2Ψ + 16Ψ/N", "bf16-mixed, stage 1 without accumulation"),
    (2, True, False, "2Ψ + 16Ψ/N", "bf16-mixed, stage 2"),
    (1, True, True, "6Ψ + 12Ψ/N", "bf16-mixed, stage 1 while accumulating"),
    (1, False, False, "4Ψ + 16Ψ/N", "fp32, stage 1 without accumulation"),
    (2, False, False, "4Ψ + 16Ψ/N", "fp32, stage 2"),
    (1, False, True, "8Ψ + 12Ψ/N", "fp32, stage 1 while accumulating"),
    (3, True, False, "16Ψ/N and the gathered units", "bf16-mixed, stage 3"),
    (3, False, False, "16Ψ/N and the gathered units", "fp32, stage 3"),
)


beyond: list[str] = []
"""Figures in which plan and measurement differ too much."""


# -- formulas of Rajbhandari et al. 2020 (arXiv:1910.02054), and others ------------------------------------------------


def paper_bytes(stage: int, num_parameters: float, world_size: int, optimizer_bytes: float = 12) -> float:
    """Model states per rank in mixed precision: 2 parameter, 2 gradient and K=12 optimizer bytes for Adam.

    Sections 3.1 and 5 (P_os, P_os+g, P_os+g+p; figure 1, table 1): (2 + 2 + K)Ψ without ZeRO, 4Ψ + KΨ/N,
    2Ψ + (2 + K)Ψ/N, (4 + K)Ψ/N.
    """
    k, n = optimizer_bytes, world_size
    return num_parameters * {0: 4 + k, 1: 4 + k / n, 2: 2 + (2 + k) / n, 3: (4 + k) / n}[stage]


def paper_bytes_fp32(stage: int, num_parameters: float, world_size: int) -> float:
    """The same split (section 5) of 4 parameter, 4 gradient and 8 optimizer bytes: full fp32 and Adam."""
    n = world_size
    return num_parameters * {0: 16, 1: 8 + 8 / n, 2: 4 + 12 / n, 3: 16 / n}[stage]


def popular_bytes(stage: int, num_parameters: float, world_size: int) -> float:
    """The formulas that circulate instead: "12 + 4/N", "8 + 8/N", "16/N" bytes per parameter.

    All agree with the paper at N = 1; for more ranks only stage 3's holds. Stage 1's swaps the coefficients of 4 + 12/N
    and stage 2's is the fp32 formula of stage 1.
    """
    n = world_size
    return num_parameters * {1: 12 + 4 / n, 2: 8 + 8 / n, 3: 16 / n}[stage]


def fsdp2_bytes(
    stage: int,
    num_parameters: float,
    world_size: int,
    mixed: bool = True,
    accumulating: bool = False,
) -> float:
    """Model states per rank inside a step under ``fully_shard`` with Adam; the gathered units of stage 3 left out.

    ``fully_shard`` keeps the fp32 shard beside the gathered buffer, so a parameter costs p + 4/N bytes, while the paper
    (section 5) counts p: bf16-mixed with fp32 reduction has p = 2 and accumulates in 4 bytes, fp32 has 4 and 4.
    Between steps every stage holds 16Ψ/N.

    Args:
        stage: 1, 2 or 3.
        num_parameters: Ψ.
        world_size: N.
        mixed: ``bf16-mixed`` or ``16-mixed``, else ``32-true``.
        accumulating: In the middle of an accumulation window, where stage 1 holds whole gradients and no shards of
            them. Without accumulation stage 1 is stage 2: each unit is reduced as soon as it is complete.
    """
    n, gathered = world_size, 2 if mixed else 4
    if stage == 3:
        return num_parameters * 16 / n
    if stage == 1 and accumulating:
        return num_parameters * (gathered + 4 + 12 / n)
    return num_parameters * (gathered + 16 / n)


# -- the page ----------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", choices=[*MEASURES, []], help="what to measure; all, unless --keep is given"
    )
    parser.add_argument("--keep", type=Path, help="take the other measurements from this page")
    options = parser.parse_args()
    measured = measured_parts(options.keep.read_text(encoding="utf-8")) if options.keep else {}
    for name in options.parts or (MEASURES if not options.keep else ()):
        measured[name] = MEASURES[name]()
    print(page(measured), end="")
    if beyond:
        raise SystemExit("\n".join(["plan and measurement are too far apart:", *beyond]))


def measured_parts(text: str) -> dict[str, str]:
    """The text between the marks of each part."""
    return {name: text.split(f"<!-- {name} -->\n")[1].split(f"\n<!-- /{name} -->")[0] for name in MEASURES}


def _marked(name: str, text: str) -> str:
    return f"<!-- {name} -->\n{text}\n<!-- /{name} -->"


def page(measured: dict[str, str]) -> str:
    return f"""# What a rank stores and sends

`lightning-zero plan` predicts this for your module; this page explains the numbers. Ψ is the number of parameters, N is
the number of ranks. `make memory` (`benchmarks/memory.py`) makes every figure; those of the example are printed by its
command.

## Example: 7 B parameters on 4 GPUs of 24 GB

Which strategy trains a Llama of 7 B parameters on one host with four such GPUs and 128 GiB of memory? The model needs
the extra `lightning-zero[examples]`.

```
lightning-zero plan trainer=gpu trainer.devices=4 plan.device_memory_gib=24 plan.host_memory_gib=128 \\
    model=llama_70b model.config.hidden_size=4096 model.config.intermediate_size=11008 \\
    model.config.num_hidden_layers=32 model.config.num_attention_heads=32 model.config.num_key_value_heads=32 \\
    model.config.vocab_size=32000 data=none "plan.batch=[1,2049]"
```

It recommends `zero3_offload`. These are the rows that matter, in GiB per rank, for `bf16-mixed`, AdamW and
micro-batches of one sequence of 2,048 tokens. Of 24 GiB the plan uses 21.6 (`plan.headroom` is 10 %).

| | states | peak | peak with activation checkpointing | host memory | largest micro-batch, without / with it |
|---|---|---|---|---|---|
| `zero3` | 25.1 | 37.6 | 31.4 | – | none fits |
| `zero2_offload` | 25.1 | 25.3 | 18.0 | 25.1 | 0 / 1 |
| `zero3_offload` | 25.1 | 13.4 | 6.07 | 25.1 | 1 / 4 |
| `zero3_nvme` | 25.1 | 13.4 | 6.07 | 6.28, and 18.8 on disk | 1 / 4 |

- Without offload nothing fits: weights, gradients and optimizer states take 16Ψ bytes, 100 GiB, which is 25.1 GiB for
  each of four ranks.
- With `zero3_offload` these 100 GiB are in the memory of the host. On a host with 64 GiB the plan recommends
  `zero3_nvme`. Add `strategy/activation_checkpointing=full` for micro-batches above one.
- Build the module on the meta device ([below](#models-that-do-not-fit-into-one-process)). Otherwise each of the four
  ranks first holds all of it in host memory, 25 GiB in fp32.
- Two other ways fit without offload, under `zero3` with activation checkpointing: eight such GPUs
  (`trainer.devices=8`, peak 18.3 GiB), or `trainer.precision=bf16-true` on four (peak 17.9 GiB), which keeps no fp32
  master weights ([precision](precision.md)).

For your own module, the first batch of your data gives the shapes:

```
lightning-zero plan trainer=gpu trainer.devices=4 plan.device_memory_gib=24 \\
    model=custom model._target_=my_package.MyModule data=custom data._target_=my_package.MyData
```

## What training keeps

For each parameter, training with Adam in mixed precision keeps 2 bytes of weight and 2 bytes of gradient for compute,
and 12 bytes for the optimizer: an fp32 copy of the weight and two running averages. That is 16Ψ bytes. Under DDP every
rank holds the same 16Ψ. ZeRO keeps one copy and shards it:

| | sharded | bytes per rank, mixed precision | in fp32 | {PSI / 1e9:g} B parameters on {RANKS} GPUs, mixed |
|---|---|---|---|---|
{_paper_rows()}

This is table 1 and figure 1 of the [ZeRO paper](https://arxiv.org/abs/1910.02054) (sections 3 and 5), in GB of 10⁹
bytes. In fp32 the same 16Ψ split differently: 4 of weight, 4 of gradient, 8 of optimizer states. `bf16-true` takes half
of the fp32 figures, here and below (8Ψ/N at stage 3): weights, gradients and optimizer states are bf16, and there are
no fp32 master weights.

## Formulas that are often quoted, and wrong

| | quoted, bytes per parameter | the paper's | N = 1 | N = 8: quoted / right | N = 64: quoted / right |
|---|---|---|---|---|---|
{_popular_rows()}

On one rank all agree. For N > 1 only the formula of stage 3 is right. That of stage 1 swaps the coefficients of 4 +
12/N, so it predicts almost no saving. That of stage 2 is the fp32 formula of stage 1.

## What `fsdp2` really does

PyTorch's `fully_shard` keeps the fp32 shard in addition to the gathered copy. So inside a step a parameter takes the
gathered copy (2 bytes in mixed precision, 4 in fp32) and its share of 16 bytes:

| | formula | N = 8, bytes per parameter | N = 64 |
|---|---|---|---|
{_fsdp2_rows()}

- On one rank (N = 1) nothing is sharded, and the gathered copy comes on top: 20Ψ in fp32 at stages 1 and 2,
  while training without ZeRO holds 16Ψ.
- Without accumulation stage 1 equals stage 2: each unit's gradients are reduced and sharded as soon as they are
  complete.
- During accumulation stage 1 holds unsharded gradients in the dtype of the reduction, and no gradient shards.
- Between two steps every stage holds 16Ψ/N. DDP holds 20Ψ, because the buckets of its reducer are a second copy of the
  gradients.
- Lightning zeroes gradients after the next forward, so the previous step's gradients are alive during it.
- A shard is `ceil(rows / N)` rows, padded. The plan counts padding, frozen and unused parameters, and parameters that
  cannot be sharded, one by one. It takes optimizer states from one step of your own optimizer.

Message buffers and activations come on top. There is a flat buffer for the unit being gathered, at stage 3 also for the
next one, and one for the last reduced unit. (Between CPU processes of one host no gather needs a buffer: parameters
arrive at their final place.) The plan traces one micro-batch with fake tensors and records the live
bytes whenever a unit has run or a gradient is complete. A formula adds what each stage holds at these moments. Planned
peaks are within 10 % of measured ones; states and bytes sent are closer. Some steps cannot be traced: they read values,
as `.numpy()` does, or the module holds hooks or closures that refer to it, so that a copy would run on the original.
Then the plan counts only the states, and says that activations are not counted.

## Traffic

Per rank and optimizer step of A micro-batches, in elements, each times (N−1)/N (section 7 of the paper). At stage 3 the
root unit and the unit that runs last are gathered once per micro-batch, every other unit twice. (The engine knows the
last unit from the second step on, and only under automatic optimization.)

| | gathered | reduced |
|---|---|---|
| DDP | – | 2Ψ, once (an all-reduce) |
| stage 1 | Ψ | Ψ |
| stage 2 | Ψ | AΨ |
| stage 3 | 2AΨ | AΨ |

Stages 1 and 2 gather A times instead of once if a user hook runs between micro-batches. The plan also counts the
broadcast of buffers, and bytes that ranks on one host read from each other's memory, but not agreements between ranks
(a few KiB). An optimizer that is not element-wise (Adafactor, Muon, LAMB) also gathers its parameters, gradients and
states.

## Offload

Rows with `_offload` and `_nvme` move shards of parameters, gradients and optimizer states to host memory (ZeRO-Offload,
arXiv:2101.06840) or files (ZeRO-Infinity, arXiv:2104.07857). Every gather copies the fp32 shard to the device, and
every reduction copies a gradient shard back. `zero_auto` chooses `_offload` if nothing fits without it and host memory
is sufficient. On a CPU-only machine offload to host memory frees nothing. `zero_auto` never chooses `_nvme`, because
the plan cannot predict the pages that the kernel keeps. Files also work at stages 1 and 2 (`strategy/offload=nvme`),
but the plan has no rows for them. [`offload.md`](offload.md) shows where each tensor is stored.

## Models that do not fit into one process

At stage 3 a step needs 16Ψ/N bytes and the gathered units. A module that ordinary constructors build, in
`__init__` or `configure_model`, is full in the host memory of every rank until the engine moves it to the accelerator
and shards it, one unit at a time (`deepspeed`: one of the smallest modules): 4Ψ bytes in fp32 for each rank of a
host. (At stages 1 and 2 without offload
`configure_model` builds on the accelerator, as under DDP.) A module on the meta device takes no memory before that:

```python
def configure_model(self):
    if not hasattr(self, "model"):
        with torch.device("meta"):
            self.model = GPT(...)  # or AutoModelForCausalLM.from_config(config)
```

Outside the module, write `with trainer.init_module(empty_init=True): module = MyModule()`. (Without `empty_init=True`
every process builds the full module, because the ranks do not exist yet.) The engine then
materializes, initializes and shards one unit after the other. On `fsdp2`, parameters of the root (norms, and embeddings
and heads that are small or tied) stay unsharded until the end, as in each step. `build="whole"` materializes the full
module on every rank before sharding.
Values come from

1. `ckpt_path` or [`load_pretrained`](checkpoints.md#published-weights): rank 0 reads one tensor at a time and sends it
   to the others, and nothing is initialized;
2. the class's own `reset_parameters`, in the order of construction. The values equal those of ordinary construction
   under the same seed bit for bit, if constructors also draw them through `reset_parameters`, as torch's do;
3. in models of transformers, `_init_weights` after that, including buffers such as rotary frequencies. Distributions
   and constants are those of ordinary construction. The random numbers differ, because transformers draws them twice
   there, for the full model each time.

A tied parameter keeps the value of the first module that holds it. If none of these fills a tensor (a bare
`nn.Parameter`, or a buffer or plain tensor that a constructor computes), an error names it on every rank before
training. Modules that were built outside `torch.device("meta")` keep their values. Initializers that write to sharded
units draw each rank's rows from that rank's random numbers, so seed all ranks alike, as `seed_everything` does.

At stages 1 and 2 of `deepspeed`, and without sharding (`validate` at stages 1 and 2), the full module is materialized
on every rank.

When such a run ends, `after_fit="auto"` leaves the shards if the full module does not fit into host memory. A parameter
then becomes full on every rank when user code touches it: in `setup` and `configure_model` of the next run, in a
forward between runs, in `copy.deepcopy` or `torch.save`. All ranks must do that together, as a collective; a rank that
reads alone gets an error after 30 seconds. What nobody touches stays sharded: the next `fsdp2` run at stage 3
(`trainer.test(module, ckpt_path="best")`, another `fit`) shards it again unit by unit, or reads the checkpoint instead,
and `trainer.save_checkpoint` sends shards. The same holds for `deepspeed`.

`tests/system/test_limits.py` trains a module of 512 MiB on four ranks, none of which may take as much memory.

## Plan and measurement

`tests/system/test_plan.py` compares the plan with the counts of `ZeroMonitor` on every rank: model states, gathers and
reductions within 1 %, the CPU allocator's peak within 10 %. `make memory` ends with an error if the figures below
differ more.

{_marked("steps", measured["steps"])}

The figures on this page were not measured on a GPU. `tests/gpu/test_plan_cuda.py` compares the plan with
`torch.cuda.max_memory_allocated` for three models; it is skipped without a GPU. On a machine without CUDA, a plan for
CUDA traces the CPU's operators, whose attention may keep other tensors, and says so.

## In your run

`callbacks=zero_monitor` (`lightning_zero.callbacks.ZeroMonitor`) logs per optimizer step: its seconds on the host's
clock, and their parts (waiting for data, compute, communication, optimizer); bytes of parameters, gradients and
optimizer states, peak memory, and bytes sent, except those of DDP's reducer (Lightning's `ThroughputMonitor` logs
samples and tokens per second, FLOPs and MFU). On an accelerator the host only queues work, so the parts show where the
host spends its time. At the end it prints one column per rank next to the plan. Its hooks take well below 1 % of a step
(`benchmarks/monitor.py`). On the CPU the peak is the process's resident memory. `profile=true` writes a Chrome trace of
three steps per rank into the run folder, which shows where a step's time goes, and on GPUs which communication is not
hidden behind compute.
"""


def _paper_rows() -> str:
    sharded = {0: "–", 1: "optimizer states", 2: "+ gradients", 3: "+ parameters"}
    formulas = {0: "16Ψ", 1: "4Ψ + 12Ψ/N", 2: "2Ψ + 14Ψ/N", 3: "16Ψ/N"}
    in_fp32 = {0: "16Ψ", 1: "8Ψ + 8Ψ/N", 2: "4Ψ + 12Ψ/N", 3: "16Ψ/N"}
    return _rows(
        (STAGE_NAMES[s], sharded[s], formulas[s], in_fp32[s], f"{paper_bytes(s, PSI, RANKS) / 1e9:.3g} GB")
        for s in STAGE_NAMES
    )


def _popular_rows() -> str:
    def pair(stage: int, n: int) -> str:
        return f"{popular_bytes(stage, 1, n):.4g} / {paper_bytes(stage, 1, n):.4g}"

    rows = []
    for s in (1, 2, 3):
        right = RIGHT[s] if RIGHT[s] == RIGHT_FP32[s] else f"{RIGHT[s]} (fp32: {RIGHT_FP32[s]})"
        one = {popular_bytes(s, 1, 1), paper_bytes(s, 1, 1), paper_bytes_fp32(s, 1, 1)}
        assert len(one) == 1
        rows.append((STAGE_NAMES[s], POPULAR[s], right, f"{one.pop():g}", pair(s, 8), pair(s, 64)))
    return _rows(rows)


def _fsdp2_rows() -> str:
    return _rows(
        (when, formula, *(f"{fsdp2_bytes(stage, 1, n, mixed, accumulating):.4g}" for n in (8, 64)))
        for stage, mixed, accumulating, formula, when in FSDP2
    )


def _rows(rows: object) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)  # type: ignore[attr-defined]


# -- measurements ----------------------------------------------------------------------------------------------------


def steps() -> str:
    """The peak of a step, and what goes over the wire."""
    from tests.helpers import account
    from tests.helpers.ranks import RankPool

    with RankPool() as pool:
        states = [_measured_state(pool, *case) for case in FSDP2]
        peaks: list[tuple[str, ...]] = []
        for name, n, options in (
            ("mlp", 1, {}),
            ("mlp", 2, {}),
            ("mlp", 4, {"precision": "bf16-mixed"}),
            ("attention", 2, {}),
            ("convolutions", 2, {}),
        ):
            peaks += _measured_peaks(pool, name, n, options)
            print(f"measured: {name} on {n}", file=sys.stderr, flush=True)
    unit = account.Stack.WIDTH**2 / (account.Stack.NUM_UNITS * account.Stack.WIDTH**2)
    return f"""Bytes per parameter at the peak of a step on 2 CPU ranks, by the allocator's record of every block, for
{account.Stack.NUM_UNITS} equal units (one is {4 * unit:.2f} bytes per parameter in fp32) and next to no activations:

| | formula | by the formula, N = 2 | measured |
|---|---|---|---|
{_rows(states)}

Peaks with activations, MiB, rank 0, micro-batches of 16 (`tests/helpers/account.py`), and bytes sent per step:

| module, ranks | | planned peak | measured | | planned KiB sent | measured |
|---|---|---|---|---|---|---|
{_rows(peaks)}

{_versions()}"""


def _versions() -> str:
    import platform

    import torch

    return f"torch {torch.__version__}, Python {platform.python_version()}, CPU, gloo."


def _measured_state(
    pool: object, stage: int, mixed: bool, accumulating: bool, formula: str, when: str
) -> tuple[str, ...]:
    from tests.helpers import account

    found = max(pool.run(account.bytes_per_parameter, stage, mixed, accumulating, world_size=2))  # type: ignore[attr-defined]
    expected = fsdp2_bytes(stage, 1, 2, mixed, accumulating)
    if abs(expected - found) > 0.1 * found:
        beyond.append(f"{when}: {expected:.4g} by the formula, {found:.2f} measured")
    print(f"measured: {when}: {found:.2f}", file=sys.stderr, flush=True)
    return when, formula, f"{expected:.4g}", f"{found:.2f}"


def _measured_peaks(pool: object, name: str, n: int, options: dict[str, object]) -> Sequence[tuple[str, ...]]:
    from tests.helpers import account

    results = account.observe_peaks(pool.run, name, (0, 1, 2, 3), options, world_size=n)  # type: ignore[attr-defined]
    for rank, found in enumerate(results):
        beyond.extend(f"{name}, rank {rank} of {n}, {gap}" for each in found for gap in account.disagreements(each))
    rows = []
    for each in results[0]:
        row, measured = each["planned"], each["measured"]
        sent = sum(v for k, v in measured.items() if k.startswith("sent per step"))
        rows.append(
            (
                f"{name}, {n}" + (f", {options['precision']}" if options else ""),
                row.name,
                f"{row.peak / 2**20:.1f}",
                f"{each['peak'] / 2**20:.1f}",
                f"{row.peak / each['peak'] - 1:+.1%}",
                f"{row.sent_total / 2**10:.1f}",
                f"{sent / 2**10:.1f}" if row.stage else "–",
            )
        )
    return rows


MEASURES: dict[str, Callable[[], str]] = {"steps": steps}

if __name__ == "__main__":
    main()
