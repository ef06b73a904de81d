"""Claims, tables and figures of the papers, one file each; `python -m bench.papers` writes docs/papers.md."""
