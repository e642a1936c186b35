"""Models put together at random from operations that mix tokens, keep things and return things."""
