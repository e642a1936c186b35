"""Bytes of a training step: activations, buffers with lifetimes, and peaks."""
