"""Saved tensors: which are activations, and how each kind is stored and restored."""
