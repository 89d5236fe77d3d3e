"""Classifier-free guidance (CFG) over ranks, for pipelines that call the model once per branch."""
