"""Run convolutional models, such as VAEs and UNets, with the rows of an image sharded over ranks.

A mode intercepts torch functions, and fetches the rows and statistics of other ranks that they need.
"""
