"""From the recorded requests of a step to planned memory: every buffer is served from a fixed offset."""
