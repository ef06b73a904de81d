"""What all comparisons share: contenders in turn, rows on disk, intervals, tables and charts."""
