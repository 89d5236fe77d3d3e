"""What the planner must know of diffusers: published models, what a transformer is given, what a pipeline generates by default."""
