"""Backends of local attention: those of PyTorch, and those that ``option_values.ADDED_BACKENDS`` registers."""
