"""The commands ssd-run and ssd-serve, and what they share with ssd-compile."""
