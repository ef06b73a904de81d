"""The server: an engine behind HTTP."""
