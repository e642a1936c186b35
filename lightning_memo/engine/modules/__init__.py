"""Probes and wraps the model's modules before layers run."""
