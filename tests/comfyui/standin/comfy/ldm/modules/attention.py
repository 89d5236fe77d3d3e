import torch


def attention_pytorch(q, k, v, heads, mask=None, transformer_options=None):
    q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


optimized_attention = attention_pytorch
