"""Trains a tiny model of each type of transformers at each level, and compares it with plain training."""
