"""Ranks that one Python process drives: ``launch`` starts them, and its handle calls the pipeline on all of them."""
