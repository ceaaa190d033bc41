"""Every command and snippet of the README and of docs/ does what it says.

What a block is, a comment before it tells:

- ``<!-- not run here: WHY -->``: it needs what no test machine has to have; Python must still compile, and find what it
  imports;
- ``<!-- needs: MODULE -->``: it is run where that module is installed;
- ``<!-- file: NAME -->``: the file that other blocks of the page use;
- ``<!-- notebook -->``: Python as a notebook runs it, not as a script.

Blocks without commands (a diagram, an output) are nobody's. Overrides are appended to what would take long: they shrink
the model and the data and say for how many steps, nothing else.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.system.commands import ROOT, run

PAGES = sorted(path.relative_to(ROOT) for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
PROGRAMS = ("lightning-zero", "python", "make", "pip", "cd", "bash", "torchrun", "srun", "sbatch", "mpirun", "pytest")
DATA = "data.block_size=32 data.max_characters=20000 data.vocab_size=300"
MODEL = "model.width=32 model.num_layers=2"
ELSEWHERE = ("lightning-zero doctor --json", "lightning-zero check")
"""What another test types."""
SWEEPS = pytest.mark.timeout(240)  # ranks of four jobs start one after the other, and import Lightning

PREAMBLE = """
from my_package import MyData, MyModule
import torch
module, data, batch = MyModule(), MyData(), [torch.randn(4, 20), torch.zeros(4, dtype=torch.int64)]
"""
"""What a page's Python takes as given."""
MAKES_CHECKPOINT = f"""
import lightning as L
from lightning_zero import ZeroStrategy
{PREAMBLE}
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer = L.Trainer(strategy=ZeroStrategy(), accelerator="cpu", max_steps=1, **quiet)
trainer.fit(module, data)
trainer.save_checkpoint("x.ckpt")
"""

MY_PACKAGE = """
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class MyModule(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class MyData(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(64, 20), torch.zeros(64, dtype=torch.int64)), batch_size=8)
"""


@dataclass(frozen=True)
class Block:
    """A fenced block and the comment before it."""

    page: Path
    line: int
    language: str
    mark: str
    what: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Of Python the command that runs it as a script; otherwise one for each line that begins with a program's
        name. Continued lines are joined, and so is one that goes into a folder with the one before it."""
        if self.mark in ("file", "not run here"):
            return []
        if self.language == "python":
            code = shlex.quote(PREAMBLE + self.text)
            return [f"python -c {code}" if self.mark == "notebook" else "python snippet.py"]
        if self.language not in ("", "bash", "sh", "console"):
            return []
        lines = self.text.replace("\\\n", " ").replace("\ncd ", " && cd ").splitlines()
        return [line.split("  #")[0].strip() for line in lines if line.split(" ")[0] in PROGRAMS]


def blocks(page: Path) -> Iterator[Block]:
    """Every fenced block of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    pattern = r"(?:^<!-- ([a-z ]+?)(?:: ([^\n]+?))? -->\n+)?^```(\w*)\n(.*?)^```$"
    for match in re.finditer(pattern, text, re.MULTILINE | re.DOTALL):
        mark, what, language, body = match.groups()
        yield Block(page, text[: match.start()].count("\n") + 1, language, mark or "", what or "", body)


BLOCKS = [block for page in PAGES for block in blocks(page)]


def small(command: str) -> str:
    """``command`` with overrides appended, so that it takes seconds."""
    for part in command.split("&&"):
        words = part.split()
        if words[:2] not in (["lightning-zero", "fit"], ["lightning-zero", "validate"]) or "--help" in words:
            continue
        more = [] if "max_epochs" in part or "debug=" in part else ["trainer.max_steps=3"]
        more += [] if "debug=" in part else ["trainer.limit_train_batches=6"]
        more += [DATA] if "data=" not in part else []
        more += [MODEL] if "model=" not in part else []
        if "optuna" in part:  # its metric is there at the end of an epoch
            more[0] = "trainer.max_epochs=1"
        command = command.replace(part, f"{part.rstrip()} {' '.join(more)} ")
    return command


def test_marks_are_known() -> None:
    for block in BLOCKS:
        assert block.mark in ("", "not run here", "needs", "file", "notebook"), block
        assert block.mark in ("", "notebook") or block.what, f"{block}: say why"


@pytest.mark.parametrize(
    ("block", "command"),
    [
        pytest.param(block, command, id=f"{block}:{number}", marks=SWEEPS if " -m " in command else ())
        for block in BLOCKS
        for number, command in enumerate(block.commands)
        if command not in ELSEWHERE
    ],
)
def test_a_command_works(block: Block, command: str, tmp_path: Path) -> None:
    if block.mark == "needs" and not _installed(block.what):
        pytest.skip(f"{block.what} is not installed")
    if command.startswith("make "):
        command = f"make -n -C {ROOT} {command[5:]}"
    else:
        _prepare(tmp_path, block)
    binaries = str(Path(sys.executable).parent)
    env = {"PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    program, *words = shlex.split(command := small(command))
    if "&&" in words or program not in ("lightning-zero", "python"):
        done = run("bash", "-ec", command, cwd=tmp_path, **env)
    else:
        fork = "first" if program == "lightning-zero" and block.page.name == "README.md" else "all"
        done = run(*words, fork=fork, cwd=tmp_path, **env)
    assert done.returncode == 0
    if words[0] == "fit" and program == "lightning-zero" and "--help" not in words:
        _check_jobs(done.stdout)


def test_what_is_not_run_here_imports_what_exists() -> None:
    for block in BLOCKS:
        if (block.mark, block.language) == ("not run here", "python"):
            _imports_exist(block.text)


def test_makefile_has_the_targets_that_pages_name() -> None:
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)`", text)) <= targets


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"


def _prepare(folder: Path, block: Block) -> None:
    (folder / "my_package.py").write_text(MY_PACKAGE)
    (folder / "zero_2.json").write_text('{"zero_optimization": {"stage": 2}}')
    (folder / "snippet.py").write_text(PREAMBLE + block.text)
    for file in (other for other in BLOCKS if (other.page, other.mark) == (block.page, "file")):
        (folder / file.what).parent.mkdir(parents=True, exist_ok=True)
        (folder / file.what).write_text(file.text)
    if "x.ckpt" in block.text:
        assert run("-c", MAKES_CHECKPOINT, fork="all", cwd=folder, PYTHONPATH=str(ROOT)).returncode == 0


def _check_jobs(output: str) -> None:
    """Each has a folder with one config and one log per rank, and the jobs of a sweep over strategies differ by
    rounding."""
    folders = [Path(folder) for folder in re.findall(r"^run folder: (.*)$", output, re.MULTILINE)]
    assert folders
    for folder in folders:
        assert len([*folder.rglob(".hydra")]) == 1
        devices = re.search(r"^  devices: (\d+)$", (folder / ".hydra" / "config.yaml").read_text(), re.MULTILINE)
        logs = {f"rank{rank}.log" for rank in range(1, int(devices[1]) if devices else 1)}  # rank 0 uses the terminal
        assert {log.name for log in folder.glob("ranks/*")} == logs
    losses = [float(loss) for loss in re.findall(r"^loss ([\d.]+)", output, re.MULTILINE)]
    assert losses == pytest.approx(losses[:1] * len(losses), rel=1e-3)


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _imports_exist(code: str) -> None:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = __import__(node.module, fromlist=["*"])
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)
