"""What happens inside a layer's forward: calls, intercepted functions, and cutting arguments by token."""
