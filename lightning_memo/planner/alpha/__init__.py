"""The fraction of tokens whose activations are swapped (MEMO, section 4.2)."""
