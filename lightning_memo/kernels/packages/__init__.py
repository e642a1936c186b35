"""Attention kernels of optional packages."""
