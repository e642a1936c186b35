"""Batches that several processes share: layout of the tokens, division, and loss weighting."""
