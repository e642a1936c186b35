"""Training steps with many methods: each combination of method, model and length is a cell."""
