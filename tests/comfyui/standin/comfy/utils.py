from torch import nn


def get_attr(model, name):
    return model.get_parameter(name)


def set_attr_param(model, name, value):
    owner, _, name = name.rpartition(".")
    setattr(model.get_submodule(owner), name, nn.Parameter(value, requires_grad=False))
