"""How a bundle travels: references, archives, the Hub, registries, signatures, and what is private in it."""
