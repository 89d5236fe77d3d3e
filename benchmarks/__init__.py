"""Programs that measure, each run as ``python -m benchmarks.NAME``."""

import logging

# diffusers imports torchao and tries each of its parts; what was built for other machines is told of by every rank.
for _name in (
    "torchao",
    "torch.utils._pytree",
    "transformers.utils.import_utils",
    "diffusers.quantizers.torchao.torchao_quantizer",
):
    logging.getLogger(_name).setLevel(logging.ERROR)
