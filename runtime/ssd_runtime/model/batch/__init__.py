"""The rows of a forward: their sequences, positions, slots and views."""
