"""Seconds and bytes of one training step, by method."""
