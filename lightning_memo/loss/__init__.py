"""The loss of long sequences: the logits of a few tokens at a time, forward and backward."""
