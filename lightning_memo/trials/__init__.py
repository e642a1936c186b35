"""Training steps tried in another process: the longest sequence that trains on this machine."""
