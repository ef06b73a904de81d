"""Keys and values of sequences, and the pool of memory that they are leased from."""
