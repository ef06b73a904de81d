"""Tools that measure one claim or table each."""
