"""Inputs of an estimate: clusters, presets, parallelism, precision and calibrated constants."""
