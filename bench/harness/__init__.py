"""What every comparison shares: contenders in turn, rows on disk, intervals, tables, charts."""
