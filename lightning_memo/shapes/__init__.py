"""Shapes of models, as far as bytes and FLOPs depend on them."""
