"""What a user asks for: the request, the methods and the candidates to compare."""
