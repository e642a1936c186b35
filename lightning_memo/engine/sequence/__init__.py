"""The schedule "slice": the whole model on one slice of the sequence after the other."""
