"""Knowledge of diffusers for the planner: published models, transformer inputs and default sizes of pipelines."""
