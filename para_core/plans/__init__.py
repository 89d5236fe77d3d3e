"""Plans: a declarative description of which tensors a model shards and gathers, and the code that applies it
to a module.
"""
