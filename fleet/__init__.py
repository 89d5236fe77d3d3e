"""Many prompts, many requests: one group of ranks, or replicas on Ray. Only batch, group and serving import Ray."""
