"""What changes the result of attention: opt-in, and nothing that the exact path needs."""
