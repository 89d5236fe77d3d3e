"""CFG over ranks: different ranks compute the conditional and the unconditional pass of a pipeline's transformer."""
