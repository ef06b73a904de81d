"""The controller that picks the fastest way to draft, cycle by cycle."""
