"""Proposals of plans for models without an adapter: observe calls, guess a plan, and check it on virtual ranks."""
