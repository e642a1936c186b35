"""Memory of a training step: saved activations, buffers with lifetimes, and peaks."""
