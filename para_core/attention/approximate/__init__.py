"""Opt-in attention that is not exact, or not to all keys. Exact attention imports it only if an option needs it."""
