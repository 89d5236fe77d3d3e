"""What is intercepted, and nothing about how attention is computed."""
