"""UNets of Stable Diffusion under the mode, on ranks and on one device: the same functions as VAEs, and cross-attention
to whole text.
"""

import pytest
import torch
import torch.distributed as dist
from diffusers import UNet2DConditionModel, UNetSpatioTemporalConditionModel

from para_core.spatial.mode import SpatialShardMode
from tests.attention.one_device import relative_error
from zoo.tiny.vaes import fill_randomly

_SIZES = {"sample_size": 16, "layers_per_block": 1, "cross_attention_dim": 8}
UNETS = {
    "Stable Diffusion 1.5": lambda: UNet2DConditionModel(
        **_SIZES,
        block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=4,
        norm_num_groups=4,
    ),
    "Stable Diffusion XL": lambda: UNet2DConditionModel(
        **_SIZES,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        transformer_layers_per_block=(1, 2),
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=56,
        norm_num_groups=4,
    ),
    "Stable Video Diffusion": lambda: UNetSpatioTemporalConditionModel(
        **_SIZES,
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        num_attention_heads=(2, 4),
        projection_class_embeddings_input_dim=24,
        addition_time_embed_dim=8,
    ),
}


def inputs(name, height, width):
    generator = torch.Generator().manual_seed(1)

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    if name == "Stable Video Diffusion":
        text = {"encoder_hidden_states": randn(1, 1, 8), "added_time_ids": randn(1, 3)}
        return randn(1, 3, 8, height, width), text
    text = {"encoder_hidden_states": randn(2, 7, 8)}
    if name == "Stable Diffusion XL":
        text["added_cond_kwargs"] = {"text_embeds": randn(2, 8), "time_ids": randn(2, 6)}
    return randn(2, 4, height, width), text


@torch.no_grad()
def predict(name, height, width, sharded):
    unet = fill_randomly(UNETS[name]())
    x, text = inputs(name, height, width)
    if not sharded:
        return unet(x, torch.tensor(5.0), **text).sample
    with SpatialShardMode(dist.group.WORLD) as rows:
        return rows.gather(unet(rows.shard(x, unit=2), torch.tensor(5.0), **text).sample)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", list(UNETS))
@pytest.mark.parametrize(
    ("height", "width"), [(18, 10), (15, 9)]
)  # The size is odd and unevenly distributed, so the UNet passes upsample sizes.
def test_a_unet_on_rows_equals_one_device(rank_pool, name, height, width):
    expected = predict(name, height, width, sharded=False)
    for out in rank_pool.run(predict, 2, name, height, width, sharded=True):
        assert relative_error(out, expected) < 1e-5
