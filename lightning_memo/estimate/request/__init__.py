"""The requested training: its settings, the training method and the parallelisms that are possible."""
