"""Crews, which run the steps of a compile: this process, or workers on Ray."""
