"""Block sizes of the kernels of merge.py and attention_int8.py whose programs each read some rows of one head."""

from __future__ import annotations

import triton

# Elements that a program reads per tensor: 16 for each of its 128 threads, which are two 16-byte loads in
# 16-bit dtypes.
_ELEMENTS = 2048
NUM_WARPS = 4


def block_of(width: int) -> dict[str, int]:
    """Return the block sizes ROWS and WIDTH of one program, for rows of ``width`` elements of one head."""
    columns = triton.next_power_of_2(width)
    return {"ROWS": max(1, _ELEMENTS // columns), "WIDTH": columns}
