"""Measurements: the machine's free memory and bandwidths, the costs of layers, and the memory requests of a step."""
