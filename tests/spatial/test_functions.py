"""Every function that may run on a part of the rows is compared on ranks and on one device. Others are refused."""

import math
import re
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from para_core.distributed.mesh import dim_of_one, one_guided_rank
from para_core.spatial import convolution
from para_core.spatial.mode import SpatialShardMode
from para_core.spatial.row_tag import MixesRows
from para_core.spatial.tiles import Pending, Tiles
from tests.attention.one_device import relative_error
from tests.operators import Operators

HEIGHT, WIDTH = 14, 6


def make_inputs(dim):
    """Return an image ``[B, C, H, W]``, a clip ``[B, C, T, H, W]``, and weights. ``dim`` is the longer one."""
    randn = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    height, width = (HEIGHT, WIDTH) if dim == -2 else (WIDTH, HEIGHT)
    return {
        "image": randn(2, 8, height, width) + 1,
        "other": randn(2, 8, height, width),
        "clip": randn(1, 8, 3, height, width),
        "weight": randn(8, 8, 3, 3) / 8,
        "wide": randn(4, 8, 5, 5) / 14,
        "even": randn(8, 8, 4, 4) / 11,
        "volume": randn(4, 8, 3, 3, 3) / 14,
        "line": randn(8, 8, 3) / 5,
        "matrix": randn(12, 8) / 3,
        "bias": randn(8),
        "whole": randn(2, 1, height, width),
    }


def tokens(x):
    return x.flatten(2).transpose(1, 2)


def attend_by_products(x):
    q = tokens(x)
    scores = torch.baddbmm(torch.empty(q.shape[0], q.shape[1], q.shape[1]), q, q.transpose(1, 2), beta=0, alpha=0.3)
    return torch.bmm(scores.softmax(dim=-1), q).transpose(1, 2).reshape(x.shape)


def attend_linearly(x):
    q = x.relu().flatten(2)
    memory = torch.matmul(F.pad(q, (0, 0, 0, 1), value=1.0), q.transpose(1, 2))
    return torch.matmul(memory, q).unflatten(-1, x.shape[-2:])


def attend_over_frames(x, token=None):
    """Attend like HunyuanVideo's VAE, causal by frame, with a mask of local sizes. Only ``token`` attends to all."""
    frames, rows, columns = x.shape[2:]
    q = x.permute(0, 2, 3, 4, 1).flatten(1, 3)
    of_token = torch.arange(frames).repeat_interleave(rows * columns)
    visible = of_token[:, None] >= of_token
    if token is not None:
        visible = visible | (torch.arange(frames * rows * columns)[:, None] == token)
    mask = torch.where(visible, 0.0, float("-inf"))
    out = F.scaled_dot_product_attention(q[:, None], q[:, None], q[:, None], attn_mask=mask)[:, 0]
    return out.unflatten(1, (frames, rows, columns)).permute(0, 4, 1, 2, 3)


def attend_within_pixels(x):
    """Attend like Mochi's VAE: over time, with each pixel as a sample."""
    batch, _, _, rows, columns = x.shape
    q = x.permute(0, 3, 4, 2, 1).flatten(0, 2).unflatten(-1, (2, 4)).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
    return out.unflatten(0, (batch, rows, columns)).permute(0, 4, 3, 1, 2)


def patchify(x):
    batch, channels, rows, columns = x.shape
    x = x.view(batch, channels, rows // 2, 2, columns // 2, 2).permute(0, 1, 3, 5, 2, 4).contiguous()
    x = x.view(batch, channels * 4, rows // 2, columns // 2)
    x = x.view(batch, channels, 2, 2, rows // 2, columns // 2).permute(0, 1, 4, 2, 5, 3)
    return x.reshape(batch, channels, rows, columns)


def stft_of_columns(x):
    """Return the STFT, with windows of 4 pixels, of each line along the longer side, as real numbers."""
    lines = x if x.shape[-1] > x.shape[-2] else x.transpose(-2, -1)
    samples = F.pad(lines.flatten(0, 2), (1, 1))
    spectrum = torch.stft(samples, 4, 2, window=torch.hann_window(4), center=False, return_complex=True)
    return torch.cat(torch.view_as_real(spectrum).chunk(2, dim=-1), dim=1).squeeze(-1).transpose(1, 2)


def attend(x, mask=None, **options):
    return F.scaled_dot_product_attention(*[tokens(x)] * 3, mask, **options)


def write_a_frame(x):
    y = x.clone()
    y[:, :, 1] = y[:, :, 0] * 2 + x[:, :, 2]
    y[:, :, -1, :, :] += 1
    return y


def numbers_of(size):
    """Return numbers that Python code may compute from a size."""
    return [
        *(2.0 * size, size * 0.5, 3 - size, size - 3, -size % 5, divmod(size, 4)[1], size & 1, size**-0.5, size / 3),
        *(math.sqrt(size), float(size), int(size), round(size / 3), len(range(size)), len(str(size)), max(size, 9)),
    ]


CASES = {
    "conv2d 'same'": lambda i: F.conv2d(i["image"], i["wide"], padding="same"),
    "conv2d stride, padded below": lambda i: F.conv2d(F.pad(i["image"], (0, 1, 0, 1)), i["weight"], stride=2),
    "conv2d stride 3": lambda i: F.conv2d(i["image"], i["wide"], stride=3, padding=2),
    "conv2d even": lambda i: F.conv2d(i["image"], i["even"], stride=2, padding=1),
    "conv2d dilation": lambda i: F.conv2d(i["image"], i["weight"], padding=2, dilation=2),
    "conv2d much padding": lambda i: F.conv2d(i["image"], i["weight"], padding=2),
    "conv2d groups": lambda i: F.conv2d(i["image"], i["weight"][:, :2], i["bias"], padding=1, groups=4),
    "conv2d 1 x 1": lambda i: F.conv2d(i["image"], i["weight"][:, :, :1, :1]),
    "conv2d of the batch": lambda i: F.conv1d(
        torch.permute(input=i["image"], dims=(0, 2, 1, 3)).flatten(0, 1), i["line"], padding=1
    ).unflatten(0, (2, -1)),
    "conv3d causal": lambda i: F.conv3d(F.pad(i["clip"], (1, 1, 1, 1, 2, 0), mode="replicate"), i["volume"]),
    "conv3d stride": lambda i: F.conv3d(F.pad(i["clip"], (1, 1, 1, 1, 2, 0)), i["volume"], stride=2),
    "conv_transpose2d": lambda i: F.conv_transpose2d(i["image"], i["even"], i["bias"], stride=2, padding=1),
    "conv_transpose2d extra": lambda i: F.conv_transpose2d(i["image"], i["weight"], None, 2, 1, output_padding=1),
    "conv_transpose2d patches": lambda i: F.conv_transpose2d(i["image"], i["even"][..., :2, :2], stride=2),
    "conv_transpose2d apart": lambda i: F.conv_transpose2d(i["image"], i["weight"][..., :1, :1], i["bias"], stride=3),
    "conv_transpose3d": lambda i: F.conv_transpose3d(i["clip"], i["volume"].transpose(0, 1), stride=(1, 2, 2)),
    "pad by rows": lambda i: sum(F.pad(i["image"], (2, 1, 1, 2), mode=mode) for mode in ("reflect", "replicate")),
    "pad constant": lambda i: F.pad(i["image"], (2, 1, 1, 2), value=3.0),
    "pad negative": lambda i: F.pad(i["image"], (-1, -1, -1, -1)),
    "group_norm far from zero": lambda i: F.group_norm(i["image"] + 100, 4, i["bias"], i["bias"]),
    "group_norm of frames": lambda i: torch.group_norm(i["clip"].transpose(1, 2).flatten(0, 1), 2, cudnn_enabled=True),
    "layer_norm": lambda i: F.layer_norm(i["image"].permute(0, 2, 3, 1), (8,), i["bias"]).permute(0, 3, 1, 2),
    "rms_norm": lambda i: F.rms_norm(i["image"].permute(0, 2, 3, 1), (8,), i["bias"]).permute(0, 3, 1, 2),
    "normalize": lambda i: F.normalize(i["clip"], dim=1),
    "batch_norm": lambda i: F.batch_norm(i["image"], i["bias"], i["bias"].square() + 1, i["bias"]),
    "avg_pool2d overlapping": lambda i: F.avg_pool2d(i["image"], 3, stride=1, padding=1),
    "max_pool2d, no stride": lambda i: F.max_pool2d(i["image"], 2, stride=()),
    "max_pool2d": lambda i: F.max_pool2d(i["image"] - 5, 3, stride=2, padding=1, dilation=2),
    "avg_pool3d": lambda i: F.avg_pool3d(i["clip"], (1, 2, 2)),
    "nearest": lambda i: F.interpolate(i["image"], scale_factor=1.5),
    "nearest-exact": lambda i: F.interpolate(i["image"], scale_factor=(2.0, 3.0), mode="nearest-exact"),
    "nearest to a size": lambda i: F.interpolate(i["clip"], size=(3, i["clip"].shape[-2] * 2, 2 * i["clip"].size(-1))),
    "bilinear of 64-bit numbers": lambda i: F.interpolate(i["image"].double(), scale_factor=2.3, mode="bilinear"),
    "bilinear corners": lambda i: F.interpolate(i["image"], scale_factor=2.0, mode="bilinear", align_corners=True),
    "bilinear to a size": lambda i: F.interpolate(i["image"], size=(11, 13), mode="bilinear"),
    "bicubic": lambda i: F.interpolate(i["image"], scale_factor=2.0, mode="bicubic"),
    "trilinear": lambda i: F.interpolate(i["clip"], scale_factor=(2.0, 2.0, 2.0), mode="trilinear"),
    "adaptive_avg_pool1d": lambda i: F.adaptive_avg_pool1d(tokens(i["image"]), 3).transpose(1, 2),
    "stft": lambda i: stft_of_columns(i["image"]),
    "pixel_shuffle": lambda i: F.pixel_shuffle(i["image"], 2),
    "pixel_unshuffle": lambda i: F.pixel_unshuffle(i["image"], 2),
    "patches": lambda i: patchify(i["image"]),
    "attention": lambda i: attend(i["image"]).transpose(1, 2).reshape(i["image"].shape),
    "causal attention": lambda i: attend(i["image"], is_causal=True),
    "attention with a mask": lambda i: attend(i["image"], torch.eye(tokens(i["image"]).shape[1])),
    "attention by products": lambda i: attend_by_products(i["image"]),
    "linear attention": lambda i: attend_linearly(i["image"]),
    "attention over frames": lambda i: attend_over_frames(i["clip"]),
    "attention within pixels": lambda i: attend_within_pixels(i["clip"]),
    "cross": lambda i: F.scaled_dot_product_attention(tokens(i["image"]), *[i["matrix"].expand(2, -1, -1)] * 2),
    "linear": lambda i: F.linear(tokens(i["image"]), i["matrix"]).transpose(1, 2).unflatten(2, i["image"].shape[-2:]),
    "mean of all": lambda i: i["image"].mean(),
    "mean over pixels": lambda i: i["clip"].mean(axis=(2, 3, 4), keepdims=True) * i["clip"].amax(1, keepdim=True),
    "largest of 16-bit integers": lambda i: (i["image"] * 99).short().amax(dim=(-2, -1)).float(),
    "with a whole one": lambda i: i["image"] * i["whole"] + i["bias"][:, None, None],
    "in place": lambda i: i["image"].clone().mul_(i["other"]).add_(1).clamp_(-1, 1),
    "cat and chunk": lambda i: torch.cat([i["image"], i["other"]], 1).chunk(4, 1)[2],
    "stack and unbind": lambda i: torch.stack([i["image"], i["other"]], 1).unbind(0)[1],
    "expanded like another": lambda i: i["image"][:, :1].expand(size=i["other"].shape),
    "repeat_interleave": lambda i: i["image"].repeat_interleave(2, dim=1).repeat_interleave(2, dim=-1),
    "dims as NumPy has them": lambda i: i["clip"][:, :, :1].squeeze(axis=2).mean(np.int64(1)),
    "sum of a mask": lambda i: (i["image"] > 0).sum((2, 3)),
    "pairs of columns": lambda i: i["image"].unflatten(-1, (int(i["image"].shape[-1]) // 2, -1)),
    "squeeze to one row on a rank": lambda i: F.conv2d(i["image"], i["wide"], stride=4).squeeze(),
    "frames apart": lambda i: torch.cat([i["clip"][:, :, :1], i["clip"][:, :, 1:].flip(2)], dim=2)[:, :, [2, 0]],
    "flipped twice": lambda i: i["clip"].flip(1, 2).flip((0, 2)),
    "rows left out of 16-bit integers": lambda i: (i["image"] * 99).short()[..., 1:-2, 2:].float(),
    "rows left out of complex numbers": lambda i: torch.complex(i["image"], i["other"]).conj()[..., 1:-2, 2:].abs(),
    "a frame written": lambda i: write_a_frame(i["clip"]),
    "drawn": lambda i: torch.randn(i["image"].shape[-2:], generator=torch.Generator().manual_seed(3)) + i["image"],
    "drawn for tokens": lambda i: (x := tokens(i["clip"])) + torch.randn(x.shape, generator=torch.manual_seed(3)),
    "decided": lambda i: i["image"] if i["image"].shape[-2] * i["image"].shape[-1] > 80 else i["other"],
    "compared with a word": lambda i: i["other"] if i["image"] == "Rep" else i["image"],
    "a whole one resized": lambda i: (
        i["image"] * F.interpolate(i["bias"].view(1, 1, 2, 4), size=i["image"].shape[-2:], mode="bilinear")
    ),
    "padded to a multiple": lambda i: F.pad(i["image"], (0, -i["image"].shape[-1] % 4, 0, -i["image"].shape[-2] % 4)),
    "numbers of sizes": lambda i: (
        i["image"] * sum(numbers_of(i["image"].shape[-2])) / numbers_of(i["image"].shape[-1])[0] / i["image"].numel()
    ),
    "whole ones of sizes": lambda i: (
        i["image"] + torch.arange(i["image"].shape[-2])[:, None] + torch.linspace(0, 1, i["image"].shape[-1])
    ),
    "all but the last row": lambda i: i["image"][..., : i["image"].shape[-2] - 1, : i["image"].shape[-1] - 1],
    "a channel by a number of NumPy": lambda i: i["clip"][:, np.int64(1)],
    "zeros": lambda i: torch.cat([i["clip"].new_zeros(1, 8, 1, *i["clip"].shape[-2:]), torch.zeros_like(i["clip"])], 2),
}


REFUSED = {
    "flip of two dims": lambda i, dim: i["image"].flip(1, dim),
    "softmax": lambda i, dim: i["image"].softmax(dim),
    "var": lambda i, dim: i["image"].var(False),
    "max": lambda i, dim: i["image"].max(),
    "chunk": lambda i, dim: i["image"].chunk(2, axis=dim),
    "normalize": lambda i, dim: F.normalize(i["image"], dim=dim),
    "item": lambda i, dim: i["image"].item(),
    "cat": lambda i, dim: torch.cat([i["image"], i["other"]], dim),
    "conv2d by an image": lambda i, dim: F.conv2d(i["image"], i["other"], padding=1),
    "conv1d over frames": lambda i, dim: F.conv1d(i["clip"].flatten(2), i["line"]),
    "avg_pool2d of a part of a window": lambda i, dim: F.avg_pool2d(i["image"], 3, ceil_mode=True),
    "avg_pool2d without padding": lambda i, dim: F.avg_pool2d(i["image"], 3, padding=1, count_include_pad=False),
    "pad, circular": lambda i, dim: F.pad(i["image"], (1, 1, 1, 1), mode="circular"),
    "repeat of rows": lambda i, dim: i["image"].repeat(1, 1, 2, 2),
    "interpolate integers": lambda i, dim: F.interpolate(i["image"].byte(), scale_factor=2.0, mode="bilinear"),
    "getitem": lambda i, dim: i["image"].transpose(dim, -1)[..., 3],
    "getitem by a bool": lambda i, dim: i["image"][True],
    "add": lambda i, dim: i["image"] + torch.ones(2, 8, *[size - 3 for size in i["image"].shape[-2:]]),
    "copy into a whole one": lambda i, dim: i["whole"].expand(2, 8, -1, -1).clone().copy_(i["image"]),
    "where": lambda i, dim: torch.where(i["image"] > 0),
    "cat under vmap": lambda i, dim: torch.vmap(lambda x: torch.cat([x, x]))(i["image"]),
    "linear under vmap": lambda i, dim: torch.vmap(lambda x: F.linear(input=x, weight=torch.ones(2, 6)))(i["image"]),
    "mul under vmap, of a size": lambda i, dim: torch.vmap(torch.mul, (0, None))(i["image"], i["image"].shape[dim]),
    "__bool__": lambda i, dim: bool(i["image"]),
    "dropout": lambda i, dim: F.dropout(i["image"], training=True),
    "interpolate": lambda i, dim: F.interpolate(i["image"], scale_factor=0.5, mode="bilinear", antialias=True),
    "scaled_dot_product_attention": lambda i, dim: attend(i["image"], torch.eye(3)),
    "scaled_dot_product_attention, causal": lambda i, dim: attend(i["image"], torch.eye(84), is_causal=True),
    "stft": lambda i, dim: torch.stft(i["image"].transpose(dim, -1).flatten(0, 2), 4, return_complex=True),
    "randn_like": lambda i, dim: torch.randn_like(i["image"]),
    "pixel_unshuffle of other rows": lambda i, dim: F.pixel_unshuffle(i["image"], 4),
    "interpolate to one row": lambda i, dim: F.interpolate(i["image"], size=(1, 1)),
    "cat, out": lambda i, dim: torch.cat([i["image"], i["other"]], 1, out=torch.empty(0)),
    "matmul of keywords": lambda i, dim: torch.matmul(input=i["image"], other=i["other"].mT),
    "baddbmm in place": lambda i, dim: torch.empty(2, 84, 84).baddbmm_(
        tokens(i["image"]), i["image"].flatten(2), beta=0
    ),
    "getitem by rows": lambda i, dim: i["image"][:, tokens(i["image"])[0, :, 0].long()],
    "index_select by rows": lambda i, dim: i["image"].index_select(1, tokens(i["image"])[0, :, 0].long()),
    "batch_norm in training": lambda i, dim: F.batch_norm(i["image"], None, None, training=True),
    "group_norm of sharded channels": lambda i, dim: F.group_norm(i["image"].transpose(1, dim), 2),
}


def compute(dim, overlaps):
    inputs = make_inputs(dim)
    outs = {}
    # An accelerator computes the middle rows of a convolution during the exchange. Do the same here.
    overlapping = mock.patch.object(convolution, "_overlaps", lambda device: overlaps)
    with torch.no_grad(), overlapping, SpatialShardMode(dist.group.WORLD) as rows:
        images = {name: rows.shard(inputs[name], dim, unit=2) for name in ("image", "other", "clip")}
        sharded = {**inputs, **images}
        for name, case in CASES.items():
            outs[name] = rows.gather(case(sharded))
        for name, case in REFUSED.items():
            with pytest.raises(MixesRows, match=rf"^{re.split('[ ,]', name)[0]} .*dim \d"):
                case(sharded, dim)
    return outs


@pytest.mark.parametrize(("world_size", "dim", "overlaps"), [(2, -2, True), (3, -1, False), (3, -2, True)])
def test_each_function_is_exact_or_refused(rank_pool, world_size, dim, overlaps):
    inputs = make_inputs(dim)
    errors = {}
    for outs in rank_pool.run(compute, world_size, dim, overlaps):
        for name, case in CASES.items():
            error = relative_error(outs[name], case(inputs)) * (1e7 if outs[name].dtype == torch.float64 else 1)
            errors[name] = max(errors.get(name, 0.0), error)
    assert not {name: error for name, error in errors.items() if error > 1e-5}


def test_a_pending_tile_may_be_a_keyword_argument_and_be_written():
    x = torch.ones(3)
    pending = Pending(lambda: x, lambda: x)
    assert torch.equal(torch.mul(input=pending, other=2).value(), 2 * x)
    assert torch.equal(torch.cat(tensors=[pending, x]).local_value(), torch.ones(6))
    with Tiles(dim_of_one("rows"), one_guided_rank("cpu")):
        for read in (lambda y, _: torch.cat([y]), lambda _, row: row[None] + 0):
            y = torch.zeros(1, 3)
            row = y[0]
            y[0] = pending
            assert torch.equal(read(y, row), x[None])
        assert torch.equal(y.copy_(torch.mul(pending, 2)), 2 * x[None])


@torch.no_grad()
def convolve_narrowly(columns):
    """Check that no rank convolves a single column, which torch 2.13 computes wrong on CPUs with bfloat16."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Conv2d(16, 16, 3, stride=2, padding=1) for _ in range(2)]).bfloat16()
    x = torch.randn(1, 16, 49, columns).bfloat16()
    with SpatialShardMode(dist.group.WORLD) as rows, Operators() as ran:
        out = rows.gather(model(rows.shard(x, -1, unit=2)))
    assert relative_error(out.float(), model.float()(x.float())) < 6e-3
    convolved = [y for func, _, y in ran.calls if func.overloadpacket is torch.ops.aten.convolution]
    assert len(convolved) == 2
    assert all(y.shape[-1] > 1 for y in convolved if y.dtype == torch.bfloat16)


def ask_for_a_gradient(rows):
    with torch.enable_grad():
        F.conv2d(rows.shard(torch.zeros(1, 3, 8, 5, requires_grad=True)), torch.zeros(8, 3, 3, 3), padding=1)


IMAGE = torch.zeros(1, 3, 8, 5)
ERRORS = [
    (ask_for_a_gradient, RuntimeError, r"torch\.no_grad\(\)"),
    (lambda rows: rows.shard(torch.zeros(1, 3, 3, 5)), ValueError, r"\[2, 1\] .*3 rows .*2 ranks"),
    (lambda rows: rows.shard(torch.zeros(4, 3, 8, 5), 4), ValueError, "dim=4 is out of range"),
    # The second token is on rank 0.
    (lambda rows: attend_over_frames(rows.shard(make_inputs(-1)["clip"], -1), 1), MixesRows, "each of 18 runs"),
    (lambda rows: torch.empty([rows.shard(torch.ones(8, 8)).shape[0]] * 2).tolist(), RuntimeError, "meta"),
    (lambda rows: [torch.cos, torch.sin][dist.get_rank()](rows.shard(IMAGE)), ValueError, "rank 0 .*cos.* rank 1 "),
    (lambda rows: rows.shard(IMAGE).long().mean(2), RuntimeError, r"mean\(\).*Long"),  # These are PyTorch's own errors.
    (lambda rows: F.conv2d(rows.shard(IMAGE), torch.zeros(8, 3, 3, 3), None, 2, "same"), ValueError, "stride 1"),
    (lambda rows: F.group_norm(rows.shard(IMAGE), 2), RuntimeError, "channels .*divisible by num_groups"),
    (lambda rows: F.group_norm(rows.shard(IMAGE), 3, torch.ones(1)), RuntimeError, "weight to be a vector"),
]


@torch.no_grad()
def check_costs_and_errors():
    for columns in (8, 12):
        convolve_narrowly(columns)
    for call, error, message in ERRORS:
        with SpatialShardMode(dist.group.WORLD, compare_calls=True) as rows, pytest.raises(error, match=message):
            call(rows)


def test_costs_and_errors_are_equal_on_every_rank(rank_pool):
    rank_pool.run(check_costs_and_errors, 2)
