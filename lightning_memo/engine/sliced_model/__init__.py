"""`stream_from_host="model"`, which runs the whole model on one slice of the sequence after the other."""
