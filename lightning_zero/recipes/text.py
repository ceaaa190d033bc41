"""English text from Python's documentation topics, and a byte-pair tokenizer trained on it."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from itertools import pairwise
from pydoc_data.topics import topics
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

_WORDS = re.compile(r" ?\w+|\s+(?=\s\w)|\s+| ?[^\w\s]+")


class BytePairTokenizer:
    """Byte-level BPE (Sennrich et al. 2016) in plain Python: ids 0-255 are bytes, each later id is a merged pair."""

    def __init__(self, merges: list[tuple[int, int]]) -> None:
        self.merges = merges
        self._rank = {pair: 256 + i for i, pair in enumerate(merges)}
        self._bytes = [bytes([i]) for i in range(256)]
        for a, b in merges:
            self._bytes.append(self._bytes[a] + self._bytes[b])
        self._words: dict[str, list[int]] = {}

    @property
    def vocab_size(self) -> int:
        return 256 + len(self.merges)

    @classmethod
    def train(cls, text: str, vocab_size: int) -> BytePairTokenizer:
        """Merges the most frequent pair until there are ``vocab_size`` ids. Ties go to the smaller ids, so that all
        processes get the same tokenizer."""
        if vocab_size < 256:
            raise ValueError(f"vocab_size={vocab_size}: use 256 (plain bytes) or more.")
        counts = Counter(_WORDS.findall(text))
        words = [list(word.encode()) for word in counts]
        weights = list(counts.values())
        pairs: Counter[tuple[int, int]] = Counter()
        where: defaultdict[tuple[int, int], set[int]] = defaultdict(set)  # pair -> the words that may hold it
        for i, ids in enumerate(words):
            for pair in pairwise(ids):
                pairs[pair] += weights[i]
                where[pair].add(i)
        merges: list[tuple[int, int]] = []
        while len(merges) < vocab_size - 256 and pairs:
            best = max(pairs, key=lambda pair: (pairs[pair], -pair[0], -pair[1]))
            new_id = 256 + len(merges)
            merges.append(best)
            for i in where.pop(best):
                before, words[i] = words[i], _merge(words[i], best, new_id)
                for pair in pairwise(before):
                    pairs[pair] -= weights[i]
                for pair in pairwise(words[i]):
                    pairs[pair] += weights[i]
                    where[pair].add(i)
            del pairs[best]
        return cls(merges)

    def encode(self, text: str) -> list[int]:
        return [i for word in _WORDS.findall(text) for i in self._encode_word(word)]

    def decode(self, ids: list[int]) -> str:
        return b"".join(self._bytes[i] for i in ids).decode(errors="replace")

    def _encode_word(self, word: str) -> list[int]:
        if word not in self._words:
            ids = list(word.encode())
            while len(ids) > 1:
                first = min(pairwise(ids), key=lambda pair: self._rank.get(pair, math.inf))
                if first not in self._rank:
                    break
                ids = _merge(ids, first, self._rank[first])
            self._words[word] = ids
        return self._words[word]


def _merge(ids: list[int], pair: tuple[int, int], new_id: int) -> list[int]:
    merged, i = [], 0
    while i < len(ids):
        if i + 1 < len(ids) and (ids[i], ids[i + 1]) == pair:
            merged.append(new_id)
            i += 2
        else:
            merged.append(ids[i])
            i += 1
    return merged


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


def split_topics(page_paragraphs: int = 20, every: int = 10) -> tuple[str, str]:
    """Splits the topics into training and held-out text: every tenth page of twenty paragraphs is held out.

    Topics repeat each other, so only the first occurrence of a paragraph is kept; none is on both sides.
    """
    paragraphs = list(
        dict.fromkeys(p for name in sorted(topics) for p in re.split(r"\n\s*\n", topics[name].strip("\n")))
    )
    sides: tuple[list[str], list[str]] = ([], [])
    for i, paragraph in enumerate(paragraphs):
        sides[i // page_paragraphs % every == every - 1].append(paragraph)
    return "\n\n".join(sides[0]), "\n\n".join(sides[1])


class PythonTopics(LightningDataModule):
    """The help texts of ``pydoc_data.topics`` (about 465 kB), of which a tenth is held out.

    Args:
        block_size: Tokens per sample.
        batch_size: Samples per process and micro-batch.
        vocab_size: Vocabulary of the byte-pair tokenizer, 256 or more; ``hf_tokenizer`` has its own.
        hf_tokenizer: Name of a Hugging Face tokenizer, used if it is on disk or can be fetched.
        max_characters: Use only the beginning of the text, for quick checks.
    """

    def __init__(
        self,
        block_size: int = 128,
        batch_size: int = 16,
        vocab_size: int = 1024,
        hf_tokenizer: str | None = None,
        max_characters: int | None = None,
    ) -> None:
        super().__init__()
        self.block_size, self.batch_size, self.vocab_size = block_size, batch_size, vocab_size
        self.hf_tokenizer = hf_tokenizer
        self.max_characters = max_characters
        self.tokenizer: Any = None
        self.train_tokens = self.held_out_tokens = torch.empty(0, dtype=torch.long)

    def prepare_data(self) -> None:
        if self.hf_tokenizer is not None:
            from lightning_zero.recipes.causal_lm import fetch

            fetch(self.hf_tokenizer)

    def setup(self, stage: str) -> None:
        if self.tokenizer is not None:
            return
        train, held_out = (text[: self.max_characters] for text in split_topics())
        self.tokenizer = self._hf() or BytePairTokenizer.train(train, self.vocab_size)
        self.train_tokens = torch.tensor(self.tokenizer.encode(train))
        self.held_out_tokens = torch.tensor(self.tokenizer.encode(held_out))

    def _hf(self) -> Any:
        if self.hf_tokenizer is None:
            return None
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.hf_tokenizer, local_files_only=True)
        except (OSError, ValueError):  # no hub: all processes see the same disk, so they decide alike
            return None

    def unigram_perplexity(self) -> float:
        """Perplexity of the held-out text under a model of token frequencies in the training text (with add-one
        smoothing)."""
        size = int(max(self.train_tokens.max(), self.held_out_tokens.max())) + 1
        counts = torch.bincount(self.train_tokens, minlength=size).double() + 1
        log_probs = (counts / counts.sum()).log()
        return float((-log_probs[self.held_out_tokens].mean()).exp())

    def train_dataloader(self) -> DataLoader[Tensor]:
        blocks = Blocks(self.train_tokens, self.block_size, jitter=True)
        return DataLoader(blocks, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Blocks(self.held_out_tokens, self.block_size), batch_size=self.batch_size)

    def test_dataloader(self) -> DataLoader[Tensor]:
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[Tensor]:
        return self.val_dataloader()
