"""What an estimate starts from: clusters, presets, parallelism, precision and fitted constants."""
