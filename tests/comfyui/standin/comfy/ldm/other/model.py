"""A class for which no plan is recorded."""

from comfy.ldm.wan.model import WanModel


class OtherModel(WanModel):
    pass
