"""What the trained tiny pipelines share: the loop, the losses, the command line."""
