"""Propose plans for models without an adapter: observe two calls, guess a plan, and check it against the
model.
"""
