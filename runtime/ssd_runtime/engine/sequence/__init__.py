"""One sequence: its committed tokens, its cache, and how a draft is verified and accepted."""
