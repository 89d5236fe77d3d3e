"""The gradient of attention over a mesh: the operators, and the backward of each way to bring keys together."""
