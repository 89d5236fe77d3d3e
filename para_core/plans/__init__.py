"""What a model shards and gathers: the language, and its application to a module."""
