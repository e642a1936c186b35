"""Measuring: what the machine has, and what a block of code takes."""
