"""Time and memory of one training step, for each training method."""
