"""English text from Python's documentation topics, as ids of bytes and frequent words."""

from __future__ import annotations

import re
from collections import Counter
from pydoc_data.topics import topics

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

_WORDS = re.compile(r" ?\w+|\s+(?=\s\w)|\s+| ?[^\w\s]+")


class Blocks(Dataset[Tensor]):
    """A token stream cut into blocks of ``block_size + 1`` ids: inputs and targets, shifted by one."""

    def __init__(self, tokens: Tensor, block_size: int, jitter: bool = False) -> None:
        self.tokens = tokens  # (N,)
        self.block_size = block_size
        self.jitter = jitter
        """Whether to shift the start of each block at random, so that epochs cut the text differently."""

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.block_size

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.block_size
        if self.jitter:
            shift = int(torch.randint(-self.block_size // 2, self.block_size // 2, ()))
            start = min(max(start + shift, 0), len(self.tokens) - self.block_size - 1)
        return self.tokens[start : start + self.block_size + 1]


def split_topics() -> tuple[str, str]:
    """Splits the topics into training and held-out text: every tenth page of twenty paragraphs is held out.

    Topics repeat each other, so only the first occurrence of a paragraph is kept; none is on both sides.
    """
    paragraphs = dict.fromkeys(p for name in sorted(topics) for p in re.split(r"\n\s*\n", topics[name].strip("\n")))
    sides: tuple[list[str], list[str]] = ([], [])
    for i, paragraph in enumerate(paragraphs):
        sides[i // 20 % 10 == 9].append(paragraph)
    return "\n\n".join(sides[0]), "\n\n".join(sides[1])


class PythonTopics(LightningDataModule):
    """The help texts of ``pydoc_data.topics`` (about 465 kB), of which a tenth is held out.

    Args:
        block_size: Tokens per sample.
        batch_size: Samples per process and micro-batch.
        vocab_size: Number of token ids. Ids 0-255 are bytes, each later id is a frequent word of the training text;
            other words are spelled in bytes.
        max_characters: Use only the beginning of the text, for quick checks.
    """

    def __init__(
        self,
        block_size: int = 128,
        batch_size: int = 16,
        vocab_size: int = 1024,
        max_characters: int | None = None,
    ) -> None:
        super().__init__()
        if vocab_size < 256:
            raise ValueError(f"vocab_size={vocab_size}: use 256 (plain bytes) or more.")
        self.block_size, self.batch_size, self.vocab_size = block_size, batch_size, vocab_size
        self.max_characters = max_characters
        self.train_tokens = self.held_out_tokens = torch.empty(0, dtype=torch.long)

    def setup(self, stage: str) -> None:
        if len(self.train_tokens):
            return
        train, held_out = (_WORDS.findall(text[: self.max_characters]) for text in split_topics())
        # Ties go to the earlier word, so that all processes get the same ids
        frequent = Counter(train).most_common(self.vocab_size - 256)
        ids = {word: [256 + i] for i, (word, _) in enumerate(frequent)}
        self.train_tokens, self.held_out_tokens = (
            torch.tensor([i for word in words for i in ids.get(word) or word.encode()]) for words in (train, held_out)
        )

    def train_dataloader(self) -> DataLoader[Tensor]:
        blocks = Blocks(self.train_tokens, self.block_size, jitter=True)
        return DataLoader(blocks, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Blocks(self.held_out_tokens, self.block_size), batch_size=self.batch_size)

    def test_dataloader(self) -> DataLoader[Tensor]:
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[Tensor]:
        return self.val_dataloader()
