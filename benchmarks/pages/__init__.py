"""Pages that are made from the files of results, and from nothing else."""
