"""Attention inside the engine: catching calls, choosing a core, and cores that know the keys of all slices."""
