"""Code behind the command lines: Hydra, several processes, interrupts and restarts."""
