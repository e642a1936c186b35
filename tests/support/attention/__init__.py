"""Models whose attention is not plain, and their training against plain training."""
