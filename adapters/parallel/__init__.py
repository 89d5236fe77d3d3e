"""Running a pipeline or a transformer on the ranks of a mesh."""
