"""The common parts of comparisons: contenders in turn, rows on disk, intervals, tables and charts."""
