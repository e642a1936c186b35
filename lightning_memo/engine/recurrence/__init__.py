"""Recurrences and convolutions in layers that run in slices: each slice gets the state at the end of the one before."""
