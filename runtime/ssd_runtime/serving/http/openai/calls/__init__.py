"""Tools of a request, and calls of them in an answer."""
