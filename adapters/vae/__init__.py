"""Run VAEs and UNets with their image rows sharded over ranks."""
