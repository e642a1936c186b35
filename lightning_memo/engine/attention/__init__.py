"""Attention of the engine's layers: intercepting calls, selecting a kernel, and attending slice by slice."""
