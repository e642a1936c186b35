"""Tensor, context and data parallelism: who holds which tokens and weights, and how they meet."""
