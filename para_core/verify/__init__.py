"""Compare a model on virtual ranks, which are threads of this process, with the unmodified model."""
