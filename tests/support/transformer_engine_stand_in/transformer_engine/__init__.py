"""Stands in for TransformerEngine: see the folder above."""

__version__ = "2.18.0"
