"""The strategies of the five papers and of their baselines."""
