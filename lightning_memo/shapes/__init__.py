"""Shapes of models, from which bytes and FLOPs are computed."""
