"""The longest sequence that trains on a machine: which lengths to try, trying one, and telling of it."""
