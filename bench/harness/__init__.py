"""The common parts of comparisons: contenders in turn, rows on disk, prices, intervals and tables."""
