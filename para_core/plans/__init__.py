"""Plans: the language of what a model shards and gathers, and its application to a module."""
