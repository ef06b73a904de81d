"""Claims of the papers, with what decides them. `python -m bench.papers` writes docs/papers.md."""
