"""The command ``para_core``: what a user types, and the sentences that answer it. Needs the extra ``cli``."""
