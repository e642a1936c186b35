"""Stands in for TransformerEngine: see the folder above."""

__version__ = "2.20.2"
