"""Pipeline parallelism: each process has some of the layers, and micro-batches pass from one to the next."""
