"""Studies of how the time of a step is spent."""
