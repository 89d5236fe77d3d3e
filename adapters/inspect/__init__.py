"""Components of a pipeline, its attention modules, and the step of its scheduler."""
