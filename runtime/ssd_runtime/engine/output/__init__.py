"""Results of a generation: tokens, their texts and figures."""
