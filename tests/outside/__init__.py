"""Stand-ins for models outside diffusers, and recipes that run each of them on several ranks.

The stand-ins were written for this project. They have the structure of the official code (names of modules, arguments
of blocks, where positions and text enter, which function attends) and none of its text or weights.
"""
