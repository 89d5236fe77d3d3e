from torch import nn


class disable_weight_init:
    Linear, LayerNorm = nn.Linear, nn.LayerNorm
