"""Checks of the view of a model, before it decodes."""
