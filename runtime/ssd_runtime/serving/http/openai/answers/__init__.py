"""Answers in OpenAI's form: whole or as events of a stream, with log-probabilities and origins of tokens."""
