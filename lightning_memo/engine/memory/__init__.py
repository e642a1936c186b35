"""Memory for offloaded activations: slots, their rounding buffers on the device, the host arena and the spill file."""
