"""check_parallel finds what differs on several ranks, names the module, and leaves the model as it is."""

import threading
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from para_core import Attention, Gather, Plan, Split, check_parallel
from para_core.adapters.models.shared.flux import FLUX_PLAN
from para_core.instance.record import fill_slot
from para_core.instance.slots import Slot
from zoo.tiny.transformers.registry import MODELS

pytestmark = pytest.mark.slow


class Block(nn.Module):
    def __init__(self, *, centred=False):
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(16, 48), nn.Linear(16, 16), nn.LayerNorm(16)
        self.register_buffer("calls", torch.zeros(()))
        self.drop = nn.Dropout(0.5)
        self.centred = centred

    def forward(self, x):
        self.calls += 1
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        x = x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        return x - x.mean(dim=1, keepdim=True) if self.centred else x


class Model(nn.Module):
    """A model with an embedding of pixel patches, blocks and a head."""

    def __init__(self, *, centred=()):
        super().__init__()
        self.embed = nn.Linear(4, 16)
        self.blocks = nn.ModuleList(Block(centred=i in centred) for i in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make(**options):
    torch.manual_seed(0)
    return Model(**options)


def test_model_without_token_mixing_is_exact():
    model, x = make().train(), torch.randn(2, 13, 4, requires_grad=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    check = check_parallel(model, x)
    assert check.exact
    assert check
    assert check.error < 1e-6
    lengths = {(case.method, case.ranks, case.tokens) for case in check.cases}
    assert lengths == {(m, r, n) for m in ("ring", "ulysses") for r, n in [(2, 13), (2, 12), (3, 13), (3, 12)]}
    assert model.training
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert x.grad is None
    assert all(weight.grad is None for weight in model.parameters())


class Gathers(Model):
    """A model whose forward uses its number of tokens between two blocks."""

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x * x.shape[1] ** 0.5)
        return self.head(x)


def shard_pixels(cp, model, x):
    x = cp.shard(model.embed(x), dim=1)
    for block in model.blocks:
        x = block(x)
    return cp.gather(model.head(x), dim=1)


def test_own_lines_are_checked_as_they_are():
    check = check_parallel(make(), torch.randn(1, 12, 4), forward=shard_pixels)
    assert check.exact
    assert {case.tokens for case in check.cases} == {12}
    assert "not varied" in str(check)
    wrong = check_parallel(make(centred=[1]), torch.randn(1, 12, 4), forward=shard_pixels)
    assert wrong.first_difference.module == "blocks.1"


def shard_input(cp, model, x):
    return cp.gather(model(cp.shard(x, dim=1)), dim=1)


def test_own_sharding_code_is_checked_at_two_lengths():
    check = check_parallel(make(), torch.randn(1, 12, 4), forward=shard_input, ranks=2)
    assert check.exact
    assert {case.tokens for case in check.cases} == {12, 11}


def gather_twice(cp, model, x):
    return shard_input(cp, model, x).flip(1)


class Fails(Model):
    def forward(self, x):
        if x.shape[1] == 5:
            raise ArithmeticError("five tokens")
        return super().forward(x)


class Short(nn.Module):
    def forward(self, x):
        if x.shape[1] == 6:
            raise IndexError("6 tokens")
        return x


class FailsOnSecondRank(Model):
    """A model that fails on the second rank before attention, in which the first rank waits."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(Short(), Block()), Block()])


@dataclass(frozen=True)
class Inputs:
    x: torch.Tensor
    scale: torch.Tensor


class OfInputs(Model):
    def forward(self, inputs):
        return super().forward(inputs.x * inputs.scale)


@pytest.mark.parametrize("dim", [1, {"inputs": 1}, {"inputs.x": 1, "inputs.scale": 1}])
def test_tensors_in_a_dataclass_are_sharded(dim):
    inputs = Inputs(torch.randn(2, 13, 4), torch.randn(1, 13, 1))
    check = check_parallel(OfInputs(), inputs, dim=dim, ranks=2)
    assert check.exact
    assert {case.tokens for case in check.cases} == {13, 12}


def test_model_that_fails_on_one_device_raises_its_error():
    with pytest.raises(ArithmeticError, match="five tokens"):
        check_parallel(Fails(), torch.randn(1, 5, 4))


class Draws(Model):
    def forward(self, x):
        return super().forward(x + torch.randn_like(x))


def test_plans_are_checked():
    module, inputs = MODELS["flux"].build(), MODELS["flux"].inputs(1, 5, 7)
    check = check_parallel(module, plan=FLUX_PLAN, ranks=2, **inputs)
    assert check.exact, str(check)
    assert {case.tokens for case in check.cases} == {35, 34}
    wrong = Plan(
        dict(FLUX_PLAN.inputs),
        FLUX_PLAN.outputs,
        ("text", "image"),
        attention={"transformer_blocks.1.attn": (Attention(("image",), ("image",)),)},
    )
    check = check_parallel(module, plan=wrong, ranks=2, **inputs)
    assert not check.exact
    assert check.first_difference.module == "transformer_blocks.1.attn"


def test_misplaced_gather_is_found():
    plan = Plan({"x": Split(1, "image")}, {"blocks.0": Gather(1, "image")}, ("image",))
    check = check_parallel(make(), torch.randn(1, 12, 4), plan=plan, ranks=2)
    # After the first block every rank has all tokens, so attention on one rank is complete.
    assert check.exact


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"dim": 7}, ValueError, "dim 7"),
        ({"dim": {"y": 1}}, ValueError, "'y'"),
        ({"dim": "1"}, TypeError, "str"),
        ({"ranks": 1}, ValueError, "1"),
        ({"ranks": ()}, ValueError, "ranks"),
        ({"dim": 1, "forward": shard_input}, ValueError, "forward="),
    ],
)
def test_options_that_mean_nothing_raise(options, error, words):
    with pytest.raises(error, match=words):
        check_parallel(make(), torch.randn(1, 12, 4), **options)


@dataclass
class Out:
    sample: torch.Tensor
    note: str


class Returns(Model):
    def forward(self, x):
        return Out(super().forward(x), "a note")


def test_outputs_in_a_dataclass_are_compared():
    torch.manual_seed(0)
    assert check_parallel(Returns(), torch.randn(1, 12, 4), ranks=2).error < 1e-6


class ReturnsMore(Model):
    """A model that returns a second tensor if it has at least a number of tokens that no rank has."""

    def forward(self, x):
        y = super().forward(x)
        return (y, y.mean(dim=1)) if x.shape[1] > 6 else (y,)


class Forbids(Model):
    def forward(self, x):
        y = super().forward(x)
        return y.masked_fill(torch.arange(4) == 1, float("-inf"))


def test_infinite_outputs_are_equal_to_themselves():
    torch.manual_seed(0)
    assert check_parallel(Forbids(), torch.randn(1, 12, 4), ranks=2).error < 1e-6
    assert check_parallel(Forbids(), torch.randn(1, 12, 4), forward=shard_pixels, ranks=2).error == float("inf")


class Masked(Model):
    def forward(self, x, mask):
        q = self.embed(x)[:, None]
        if isinstance(mask, BlockMask):
            return self.head(flex_attention(q, q, q, block_mask=mask)[:, 0])
        return self.head(F.scaled_dot_product_attention(q, q, q, mask)[:, 0])


def shard_both(cp, model, x, mask):
    return cp.gather(model(cp.shard(x, dim=1), cp.shard(mask)), dim=1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_masks_are_shortened_with_tokens():
    torch.manual_seed(0)
    x, rows = torch.randn(1, 12, 4), torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
    blocks = create_block_mask(lambda b, h, q, k: q >= k, None, None, 12, 12, device="cpu", BLOCK_SIZE=4)
    of_rows = check_parallel(Masked(), x, rows, dim={"x": 1, "mask": 2}, ranks=2)
    of_blocks = check_parallel(Masked(), x, blocks, forward=shard_both, ranks=2)
    for check in (of_rows, of_blocks):
        assert check.error < 1e-6, str(check)
        assert {case.tokens for case in check.cases} == {11, 12}


def test_a_model_that_cannot_be_copied_raises():
    model = make()
    model.lock = threading.Lock()
    with pytest.raises(RuntimeError, match=r"Model .*copied .*lock"):
        check_parallel(model, torch.randn(1, 12, 4))


def test_bfloat16_and_autocast_are_compared_coarsely():
    with torch.autocast("cpu", torch.bfloat16):
        check = check_parallel(make(), torch.randn(1, 12, 4), ranks=2)
    assert check.tolerance == 5e-2
    assert check.exact
    assert check_parallel(make(centred=[1]).bfloat16(), torch.randn(1, 12, 4).bfloat16(), ranks=2).error > 5e-2


def test_a_function_is_no_model():
    with pytest.raises(TypeError, match="function"):
        check_parallel(F.relu, torch.randn(1, 12, 4))


def transformers_model(name, **config):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    if name != "ViT":
        sizes["vocab_size"] = 64
    configuration = getattr(transformers, f"{name}Config")(**sizes, **config)
    model = getattr(transformers, f"{name}Model")(configuration)
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3)
    return model.eval()


def tokens(length):
    return torch.randint(64, (1, length), generator=torch.Generator().manual_seed(length))


IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
GROUPED = {"num_key_value_heads": 2}
WINDOW = {"sliding_window": 8, **GROUPED}


def of_transformers(name, length=12, positions=True, **config):
    """Return a model of transformers, and its inputs."""
    inputs = {"input_ids": tokens(length)}
    if positions:
        inputs["position_ids"] = torch.arange(length)[None]
    if name not in ("ModernBert", "Bert"):
        inputs["use_cache"] = False
    return transformers_model(name, **config), inputs


def pixels(model, **options):
    return model, {"x": torch.randn(1, 12, 4), **options}


# Each row has a model with its inputs, the module that differs on two ranks, and words of the report.
DIFFERENCES = {
    "a mean in the first block": (lambda: pixels(make(centred=[0])), "blocks.0", "blocks.0 (Block)"),
    "a mean in the last block": (lambda: pixels(make(centred=[2])), "blocks.2", "blocks.2 (Block)"),
    "code between modules": (lambda: pixels(Gathers()), "", "blocks.0"),
    "own lines with a wrong block": (lambda: pixels(make(centred=[1]), forward=shard_pixels), "blocks.1", "blocks.1"),
    "own lines that are wrong": (lambda: pixels(make(), forward=gather_twice), "", "forward="),
    "random numbers": (lambda: pixels(Draws()), "", "random numbers"),
    "an exception": (
        lambda: (Fails(), {"x": torch.randn(1, 11, 4)}),
        "",
        "ArithmeticError: five tokens",
    ),
    "an exception on the second rank": (
        lambda: (FailsOnSecondRank(), {"x": torch.randn(2, 13, 4)}),
        "blocks.0.0",
        "6 tokens",
    ),
    "an output that ranks lack": (lambda: pixels(ReturnsMore()), "", "[1, 1]"),
    "weights of attention": (
        lambda: (MultiHead(needs_weights=True), {"x": torch.randn(1, 12, 8)}),
        "",
        "need_weights",
    ),
    "a mean before flex attention": (
        lambda: (nn.Sequential(FlexAttention()), {"input": torch.randn(1, 12, 16)}),
        "0",
        "12 queries, 12 keys",
    ),
    "windows of an encoder": (
        lambda: of_transformers("ModernBert", local_attention=16, global_attn_every_n_layers=2, **IDS),
        "layers.1.attn",
        "sliding_window",
    ),
    "windows of Mistral": (lambda: of_transformers("Mistral", **WINDOW), "layers.0.self_attn", "window"),
    "windows of Qwen2": (
        lambda: of_transformers("Qwen2", **WINDOW, use_sliding_window=True, max_window_layers=1),
        "layers.1.self_attn",
        "window",
    ),
    "windows of Gemma3": (
        lambda: of_transformers("Gemma3Text", **WINDOW, head_dim=8, layer_types=["sliding_attention"] * 2),
        "layers.0.self_attn",
        "window",
    ),
    "a rank with a single token": (
        lambda: of_transformers("Llama", 2, **GROUPED),
        "layers.0.self_attn",
        "is_causal",
    ),
    "positions counted from zero": (lambda: of_transformers("Llama", positions=False, **GROUPED), "", "rotary_emb"),
    "learned positions": (lambda: of_transformers("Bert", positions=False), "embeddings", "embeddings"),
    # The pooler takes the first token, which only the first rank has.
    "the first token": (lambda: of_transformers("Bert"), "pooler", "pooler"),
}


@pytest.mark.sample(16)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("name", DIFFERENCES)
def test_difference_is_located(name):
    build, module, words = DIFFERENCES[name]
    torch.manual_seed(0)
    model, inputs = build()
    check = check_parallel(model, ranks=2, **inputs)
    assert not check and not check.exact
    assert check.first_difference.module == module
    assert words in str(check)
    assert all(case.error > 1e-3 for case in check.cases if case.failure is None)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["Mistral", "Llama", "Qwen2"])
def test_decoders_without_a_window_are_exact(name):
    model, inputs = of_transformers(name, **GROUPED)
    check = check_parallel(model, **inputs)
    assert check.exact, str(check)


def test_local_decoder_mask_is_found():
    model, inputs = of_transformers("Llama", **GROUPED)
    sharded = {"input_ids": 1, "position_ids": 1}
    mask = torch.ones(1, 12, dtype=torch.long)
    for padded in (0, 3):
        mask[:, :padded] = 0
        check = check_parallel(model, attention_mask=mask, dim=sharded, ranks=2, **inputs)
        assert not check.exact
        assert check.first_difference.module == "layers.0.self_attn"
        assert "[1, 1, 6, 12]" in str(check)
    mask = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
    check = check_parallel(model, attention_mask=mask, dim=sharded, ranks=2, **inputs)
    assert check.exact, str(check)


def patches(cp, model, pixel_values):
    x = cp.shard(model.embeddings(pixel_values), dim=1)
    x = model.encoder(x).last_hidden_state if hasattr(model, "encoder") else run_layers(model, x)
    return cp.gather(model.layernorm(x), dim=1)


def run_layers(model, x):
    for layer in model.layers:
        x = layer(x)
    return x


def test_an_image_encoder_is_checked_by_own_lines():
    model = transformers_model("ViT", image_size=16, patch_size=4)
    check = check_parallel(model, torch.randn(1, 3, 16, 16), forward=patches)
    assert check.exact, str(check)
    assert {case.tokens for case in check.cases} == {17}


def test_a_parallel_model_is_refused():
    model = MODELS["flux"].build()
    fill_slot(model, Slot.PLAN, {"__call__": lambda call, module, *args: call(module, *args)})
    with pytest.raises(ValueError, match="FluxTransformer2DModel is already parallel"):
        check_parallel(model, plan=FLUX_PLAN)


class MultiHead(nn.Module):
    """A model whose attention cannot be computed on several ranks if it ``needs_weights``."""

    def __init__(self, needs_weights):
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.needs_weights = needs_weights

    def forward(self, x):
        return self.attn(x, x, x, need_weights=self.needs_weights)[0]


def test_multi_head_attention_is_checked():
    assert check_parallel(MultiHead(needs_weights=False), torch.randn(1, 12, 8), ranks=2)


class FlexAttention(nn.Module):
    def forward(self, x):
        q = x.unflatten(-1, (2, 8)).transpose(1, 2)
        return flex_attention(q, q, q + q.mean(2, keepdim=True)).transpose(1, 2).flatten(2)
