"""A call of a layer: its storage, attention and hidden states, and the plan and profile by which it runs."""
