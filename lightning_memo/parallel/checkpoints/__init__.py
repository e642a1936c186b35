"""Sharded checkpoints that any topology can read."""
