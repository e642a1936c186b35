"""Inspecting and wrapping the model's modules."""
