"""Memory for offloaded activations: slots, their rounding buffers on the device, and the places outside of it."""
