"""Fits the constants of the cost model to measured runs."""
