"""Context parallelism: ring and all-to-all attention."""
