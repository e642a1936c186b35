"""Times of the parts of a training step: layers, what is around them, and communication."""
