"""Long token sequences from folders of text."""

from lightning_memo.data.corpus import unigram_entropy
from lightning_memo.data.module import TextDataModule

__all__ = ["TextDataModule", "unigram_entropy"]
