"""Data modules for long token sequences from text files."""

from lightning_memo.data.document_module import DocumentsDataModule
from lightning_memo.data.text_module import SequenceDataModule, TextDataModule, unigram_entropy

__all__ = ["DocumentsDataModule", "SequenceDataModule", "TextDataModule", "unigram_entropy"]
