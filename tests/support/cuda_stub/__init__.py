"""A stub of the CUDA runtime, and PyTorch's own CUDA allocator on it."""
