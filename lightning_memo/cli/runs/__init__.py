"""One run of the training command, from its configuration to its summary."""
