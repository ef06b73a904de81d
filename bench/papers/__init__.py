"""Claims, tables and figures of the papers, one per file. `python -m bench.papers` writes docs/papers.md."""
