"""A decoder layer's modules in the form in which the engine calls them."""
