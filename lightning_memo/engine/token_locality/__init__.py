"""Proves that a layer computes each token by itself outside attention, so that it can run on slices of tokens."""
