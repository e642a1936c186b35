"""Models with unusual stacks of layers."""
