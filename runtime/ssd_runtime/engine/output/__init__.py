"""What a generation gives: tokens, their texts and its result."""
