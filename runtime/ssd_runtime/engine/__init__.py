"""The engine, the decode loop and its results."""
