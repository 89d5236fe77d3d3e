"""What each model family shards, gathers and caches: data, one file a family."""
