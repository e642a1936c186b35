"""Attention kernels for tests without a GPU, and the reference they are compared with."""
