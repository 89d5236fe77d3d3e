"""VAEs and UNets whose rows are sharded over ranks."""
