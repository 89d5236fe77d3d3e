"""Finding the threshold of a cache, and the image metrics by which it is judged."""
