"""Code in C for what torch has no operation for; it is compiled on the machine that runs it."""
