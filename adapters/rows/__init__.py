"""VAEs and UNets whose image rows are sharded over ranks."""
