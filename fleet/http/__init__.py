"""Bodies of HTTP requests, and the answers to them."""
