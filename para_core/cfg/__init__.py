"""Classifier-free guidance over ranks: branches computed one after the other, and deferred tensors."""
