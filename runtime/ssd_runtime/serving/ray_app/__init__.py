"""Several replicas of a server on Ray Serve. `router.py` is the page to read first."""
