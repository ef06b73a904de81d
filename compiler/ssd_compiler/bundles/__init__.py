"""The command `ssd-bundle`: what is in a bundle, how it travels, and how it comes to serve another model."""
