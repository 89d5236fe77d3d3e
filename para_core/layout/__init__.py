"""Layouts: the tokens of a sequence that each rank holds, arithmetic on runs of positions, sharding and gathering."""
