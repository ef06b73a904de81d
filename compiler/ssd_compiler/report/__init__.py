"""Reports of a compile, as JSON and as a page."""
