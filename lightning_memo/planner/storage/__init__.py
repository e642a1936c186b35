"""Storage by kind of tensor: a linear program over what each layer stores, and where."""
