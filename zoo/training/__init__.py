"""Shared training code of the tiny pipelines: the loop, the losses, the command line."""
