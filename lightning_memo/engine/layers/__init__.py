"""Running one layer: its slices, their schedule, and their recomputation."""
