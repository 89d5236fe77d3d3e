"""A class for which no plan is recorded."""

from comfy.ldm.wan.model import WanModel


class OtherModel(WanModel):
    def _forward(self, x, timestep, context, clip_fea=None, transformer_options=None, **kwargs):
        if clip_fea is not None:
            context = context + clip_fea[:6]
        return super()._forward(x, timestep, context, None, transformer_options, **kwargs)
