"""Tensor, context and data parallelism: which rank holds which tokens and weights, and how ranks communicate."""
