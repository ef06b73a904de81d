"""The page docs/benchmarks.md: what the project claims about speed, by commands that anyone can run."""
