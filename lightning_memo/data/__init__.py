"""Long token sequences from files of text."""

from lightning_memo.data.corpus import unigram_entropy
from lightning_memo.data.documents import DocumentsDataModule
from lightning_memo.data.module import TextDataModule
from lightning_memo.data.sequences import SequenceDataModule

__all__ = ["DocumentsDataModule", "SequenceDataModule", "TextDataModule", "unigram_entropy"]
