"""Search for the longest sequence that trains on this machine, by training trial steps in another process."""
