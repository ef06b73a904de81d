"""Several requests at once, without HTTP."""
