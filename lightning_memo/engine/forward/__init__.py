"""Inside a layer's forward: reading and cutting its call, intercepting attention, dropout and matrix products."""
