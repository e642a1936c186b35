"""Saved tensors of a layer: which of them are activations, and how they are stored and restored."""
