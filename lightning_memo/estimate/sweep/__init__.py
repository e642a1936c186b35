"""Sweeps of estimates."""
