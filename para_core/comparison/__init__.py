"""Compare a call of a model on several ranks with a call of the unmodified model, and find where they differ."""
