import types

from torch import nn


class BaseModel(nn.Module):
    def __init__(self, cls, dtype):
        super().__init__()
        import comfy.ops

        self.model_config = types.SimpleNamespace(unet_config={"num_layers": 3, "dtype": dtype})
        config = {"num_layers": 3, "operations": comfy.ops.disable_weight_init}
        self.diffusion_model = cls(**config, dtype=dtype).requires_grad_(False)
        self.current_patcher = None

    def memory_required(self, input_shape):
        return 1000.0

    def apply_model(self, x, timestep, context, options, **conditions):
        return self.diffusion_model(x, timestep, context, transformer_options=options, **conditions)
