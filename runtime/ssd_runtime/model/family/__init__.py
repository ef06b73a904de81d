"""Model families: the structure of their layers, and the kinds of layers in a config."""
