"""TransformerEngine's FP8 in layers: which modules run, and the scales that a recomputation returns to."""
