"""Memory for swapped activations: host arena, slots, rounding buffers, and the spill file."""
