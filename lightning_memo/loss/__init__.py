"""The loss of long sequences, with the logits of a few tokens at a time in forward and backward."""
