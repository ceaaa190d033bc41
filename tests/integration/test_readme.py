"""Every command and snippet of the README and of docs/ does what it says, in the order of its page.

What a block is, a comment before it tells:

- ``<!-- not run here: WHY -->``: it needs what no test machine has to have; Python must still compile, and find what it
  imports;
- ``<!-- needs: MODULE -->``: it is run where that module is installed;
- ``<!-- file: NAME -->``: the file that later blocks of the page use;
- ``<!-- notebook -->``: Python as a notebook runs it, not as a script.

Blocks without commands (a diagram, an output) are nobody's. Overrides are appended to what would take long: they shrink
the model and the data and say for how many steps, nothing else.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integration.commands import ROOT

pytestmark = pytest.mark.rest

PAGES = sorted(path.relative_to(ROOT) for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
PROGRAMS = ("lightning-zero", "python", "make", "pip", "cd", "bash", "torchrun", "srun", "sbatch", "mpirun", "pytest")
DATA = "data.block_size=32 data.max_characters=20000 data.vocab_size=300"
MODEL = "model.width=32 model.num_layers=2"

PREAMBLE = """
from my_package import MyData, MyModule
import torch
module, data, batch = MyModule(), MyData(), [torch.randn(4, 20), torch.zeros(4, dtype=torch.int64)]
"""
"""What a page's Python takes as given."""

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

    line: int
    language: str
    mark: str
    what: str
    text: str

    @property
    def commands(self) -> list[str]:
        """One for each line that begins with a program's name; continued lines are joined."""
        if self.language not in ("", "bash", "sh", "console"):
            return []
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line.split("  #")[0].strip() for line in lines if line.split(" ")[0] in PROGRAMS]


def blocks(page: Path) -> Iterator[Block]:
    """Every fenced block of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    pattern = r"(?:^<!-- ([a-z ]+?)(?:: ([^\n]+?))? -->\n+)?^```(\w*)\n(.*?)^```$"
    for match in re.finditer(pattern, text, re.MULTILINE | re.DOTALL):
        mark, what, language, body = match.groups()
        yield Block(text[: match.start()].count("\n") + 1, language, mark or "", what or "", body)


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


def test_pages_have_blocks_and_marks_are_known() -> None:
    found = [block for page in PAGES for block in blocks(page)]
    assert len(found) > 20
    for page in PAGES:
        for block in blocks(page):
            assert block.mark in ("", "not run here", "needs", "file", "notebook"), f"{page}:{block.line}"
            assert block.mark in ("", "notebook") or block.what, f"{page}:{block.line}: say why"


def test_a_block_is_read_with_its_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    text = (
        "a\n\n<!-- file: x.py -->\n```python\na = 1\n```\n\n```\nmake x\n  y\nlightning-zero plan \\\n  b=1  # c\n```\n"
    )
    (tmp_path / "page.md").write_text(text)
    first, second = blocks(Path("page.md"))
    assert (first.language, first.mark, first.what, first.text) == ("python", "file", "x.py", "a = 1\n")
    assert (second.mark, second.commands) == ("", ["make x", "lightning-zero plan    b=1"])


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("page", [str(page) for page in PAGES if any(True for _ in blocks(page))])
def test_every_block_of_a_page_works(page: str, tmp_path: Path) -> None:
    _prepare(tmp_path, page)
    for block in blocks(Path(page)):
        where = f"{page}:{block.line}"
        if block.mark == "file":
            (tmp_path / block.what).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / block.what).write_text(block.text)
        elif block.mark == "not run here":
            if block.language == "python":
                _imports_exist(block.text)
        elif block.mark == "needs" and not _installed(block.what):
            continue
        elif block.language == "python":
            _run_python(block, tmp_path, where)
        for command in block.commands if block.mark in ("", "needs") else ():
            if command.startswith("make "):
                _check(f"make -n -C {ROOT} {command[5:]}", tmp_path, where)
            else:
                _check(small(command), tmp_path, where)


def test_plain_words_of_the_readme_that_are_commands() -> None:
    """``make train`` and the like inside a sentence: their targets exist."""
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)`", text)) <= targets


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"


def test_no_page_says_that_a_registry_has_the_package() -> None:
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert not re.search(r"pip install lightning-zero", text), page


def _prepare(folder: Path, page: str) -> None:
    (folder / "my_package.py").write_text(MY_PACKAGE)
    shutil.copytree(ROOT / "examples", folder / "examples")
    (folder / "zero_2.json").write_text('{"zero_optimization": {"stage": 2}}')
    if "x.ckpt" in (ROOT / page).read_text(encoding="utf-8"):
        code = "import lightning as L\nfrom lightning_zero import ZeroStrategy\n" + PREAMBLE
        code += "t = L.Trainer(strategy=ZeroStrategy(), accelerator='cpu', max_steps=1, logger=False,\n"
        code += "              enable_checkpointing=False, enable_progress_bar=False)\n"
        code += "t.fit(module, data)\nt.save_checkpoint('x.ckpt')\n"
        (folder / "make_checkpoint.py").write_text(code)
        _check(f"{sys.executable} make_checkpoint.py", folder, "x.ckpt")


def _run_python(block: Block, folder: Path, where: str) -> None:
    if block.mark == "notebook":
        _check_python(PREAMBLE + block.text, folder, where)
        return
    script = folder / "snippet.py"
    script.write_text(PREAMBLE + block.text)
    _check(f"{sys.executable} snippet.py", folder, where)


def _check_python(code: str, folder: Path, where: str) -> None:
    _finish(subprocess.run([sys.executable, "-c", code], **_how(folder)), where)  # type: ignore[call-overload]


def _check(command: str, folder: Path, where: str) -> None:
    _finish(subprocess.run(["bash", "-ec", command], **_how(folder)), f"{where}: {command}")  # type: ignore[call-overload]


def _how(folder: Path) -> dict[str, object]:
    binaries = str(Path(sys.executable).parent)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = path
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return {"cwd": folder, "env": env, "timeout": 280, "check": False, **pipes}


def _finish(done: subprocess.CompletedProcess[str], where: str) -> None:
    assert done.returncode == 0, f"{where}\n{done.stdout}"


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
