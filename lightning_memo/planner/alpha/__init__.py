"""Which fraction of the tokens is swapped and which is recomputed (MEMO, section 4.2)."""
