"""First Block Cache: skip the blocks after the first one while the residual of the first block hardly changes."""
