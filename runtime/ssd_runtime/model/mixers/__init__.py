"""Sub-layers that mix tokens through a state of fixed size: short convolutions and linear recurrences."""
