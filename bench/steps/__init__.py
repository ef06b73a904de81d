"""How the time of a step is spent."""
