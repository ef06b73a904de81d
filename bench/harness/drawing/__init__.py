"""Charts, pictures and tables of the pages."""
