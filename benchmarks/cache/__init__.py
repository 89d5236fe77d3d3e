"""What a cache costs in quality and gains in time, beside other caches, on the tiny trained FLUX."""
