"""Stand-ins for models outside diffusers, and recipes that run each of them on several ranks.

The stand-ins were written for this project. They have the structure of the official code: names of modules, arguments
of blocks, the place where positions and text enter, and the function that attends. They contain none of its text or
weights.
"""
