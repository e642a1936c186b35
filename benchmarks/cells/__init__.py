"""Training steps by many methods side by side: each combination of method, model and length is a cell."""
