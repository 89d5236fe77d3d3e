"""First Block Cache: the blocks behind the first are skipped while its residual hardly changes."""
