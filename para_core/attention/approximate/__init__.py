"""Attention that is not exact, or not to all keys. Opt-in; the exact path imports nothing of it."""
