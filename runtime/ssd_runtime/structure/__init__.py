"""Answers with a shape: grammars, and what they allow after the tokens of an answer."""
