"""Run convolutional models, such as VAEs and UNets, with the rows of an image sharded over ranks.

A mode intercepts torch functions, and exchanges the rows and statistics that a function needs from other
ranks.
"""
