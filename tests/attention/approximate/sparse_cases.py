"""Modes that leave out keys, compared with dense attention under the mask of the left-out keys."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from para_core import UnifiedAttnMode
from tests.attention.cases import Case, compiled_sdpa, held, put_together, sdpa_with_both
from tests.attention.one_device import relative_error
from tests.rank_pool import heartbeat


@dataclass(frozen=True)
class SparseCase:
    """An attention call whose mode, ``make_mode(mesh, layout=, key_layout=)``, attends to the keys of ``visible``, a
    bool mask.
    """

    case: Case
    make_mode: Callable[..., UnifiedAttnMode]
    visible: Tensor

    def on_one_device(self, qkv: list[Tensor] | None = None) -> Tensor:
        visible, mask = self.visible, self.case.whole_mask()
        if mask is not None:
            visible = mask & visible if mask.dtype == torch.bool else mask.float().masked_fill(~visible, float("-inf"))
        return sdpa_with_both(*(qkv or self.case.qkv()), visible, **self.case.options)


def _attend(
    items: list[SparseCase], ring: int, ulysses: int, compile_with: str | None
) -> list[tuple[Tensor, list[Tensor]]]:
    """Return the whole result and this rank's gradients of each item."""
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    rank, results = mesh.get_rank(), []
    for item in items:
        heartbeat()
        case = item.case
        query_layout, key_layout = case.layouts(ring * ulysses)
        layouts = (query_layout, key_layout, key_layout)
        qkv = [held(x, -2, layout, rank).requires_grad_() for x, layout in zip(case.qkv(), layouts, strict=True)]
        mask = case.whole_mask()
        weight = held(case.weight(), -2, query_layout, rank)
        sdpa = compiled_sdpa(compile_with)
        key_layout = None if key_layout is query_layout else key_layout
        with item.make_mode(mesh, layout=query_layout, key_layout=key_layout) as cp:
            if mask is not None:
                mask = case.mask.cut(mask, cp, query_layout, layouts[1])
            with torch.no_grad():
                out = sdpa(*[x.detach() for x in qkv], mask, **case.options)
                whole = cp.gather(out, dim=-2, sequence=query_layout)
            sdpa(*qkv, mask, **case.options).mul(weight).sum().backward()
        results.append((whole, [x.grad for x in qkv]))
    return results


def check_all(rank_pool, items, ring, ulysses, compile_with=None):
    """Raise if the result or a gradient of an item differs from one device on any rank of the mesh."""
    ranks = range(ring * ulysses)
    results = rank_pool.run(_attend, len(ranks), items, ring, ulysses, compile_with)
    for index, item in enumerate(items):
        query_layout, key_layout = item.case.layouts(len(ranks))
        qkv = [x.clone().requires_grad_() for x in item.case.qkv()]
        expected = item.on_one_device(qkv)
        # The loss of each rank counts the tokens of the rank, so replicated ones count once per rank.
        weights = [held(item.case.weight(), -2, query_layout, rank) for rank in ranks]
        (expected * put_together(weights, -2, query_layout)).sum().backward()
        where = f"item {index}: {item}\nring {ring} × ulysses {ulysses}"
        for rank in ranks:
            assert relative_error(results[rank][index][0], expected.detach()) < 1e-5, f"{where}, rank {rank}"
        # If a query sees one key, softmax is constant, and its gradients are rounding errors of 0.
        for position, layout in enumerate((query_layout, key_layout, key_layout)):
            whole = put_together([results[rank][index][1][position] for rank in ranks], -2, layout)
            scale = max(qkv[position].grad.norm(), qkv[2].grad.norm())
            assert (whole - qkv[position].grad).norm() <= 1e-5 * scale, f"{where}, gradient {position}"
