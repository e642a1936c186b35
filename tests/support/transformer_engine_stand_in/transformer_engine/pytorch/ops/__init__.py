"""Operations, which may be fused: here, each is one of its own."""
