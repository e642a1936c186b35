"""The slices of a layer call: packing what they save, recomputing them, and the order in which they run."""
