"""Run the calls of one model with the bits of one process, and check each new size of its inputs.

``adapters/same_bits.py`` installs this on each transformer of a pipeline; a VAE has :mod:`.image_rows`
instead. Tests: tests/same_bits/test_pipelines.py, tests/same_bits/test_rows.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from para_core.dataclass_fields import leaf_kinds
from para_core.distributed.agree import exchange
from para_core.distributed.mesh import GuidedMesh
from para_core.instance.modules import has_compiled_parts
from para_core.instance.private_class import original_class
from para_core.instance.record import empty_slot, fill_slot
from para_core.instance.slots import Slot
from para_core.plans.region import region_of
from para_core.plans.samples import count_samples
from para_core.recorder.events import AttentionStart, Event
from para_core.recorder.recorder import Recorder
from para_core.same_bits.device_settings import deterministic_products
from para_core.same_bits.found import Found
from para_core.same_bits.mode import SameBits
from para_core.same_bits.one_process import one_process_of
from para_core.same_bits.products import find_differences
from para_core.same_bits.row_check import RowCheck
from para_core.same_bits.token_tags import TokenTags
from para_core.torch_internals import is_compiled_code

_COMPILED = (
    "same_bits=True runs eager models: generated code may add up in another order for another number of tokens, which "
    "nothing checks. Leave torch.compile out, or same_bits."
)


class SameBitsCalls:
    """``same_bits=True`` for the calls of one model.

    Args:
        module: The model, which has a plan on ``mesh``.
        mesh: The ranks.
    """

    def __init__(self, module: nn.Module, mesh: GuidedMesh) -> None:
        self.module, self._mesh = module, mesh
        # What was found for each sizes of the inputs with which ranks have the bits of one process.
        self._checked: dict[tuple[Any, ...], Found] = {}
        self._check: RowCheck | None = None
        self._found = Found()

    def install(self) -> None:
        """Fill the slots of the model."""
        fill_slot(self.module, Slot.SAME_BITS, {"__call__": self._run})
        fill_slot(self.module, Slot.SAME_BITS_PRODUCTS, {"__call__": self._run_part})

    def remove(self) -> None:
        """Empty the slots of the model."""
        empty_slot(self.module, Slot.SAME_BITS)
        empty_slot(self.module, Slot.SAME_BITS_PRODUCTS)

    def _run(self, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Run a call on all tokens: outside of the plan, where all ranks have the same arguments. Collective
        in the first call with each sizes.

        Raises:
            RuntimeError: On every rank: a function gives other bits for the rows of a rank than for those of
                one process. Or the model is compiled.
        """
        if is_compiled_code():
            raise RuntimeError(_COMPILED)
        # All ranks have the same arguments here, so they check the same calls.
        sizes = leaf_kinds((args, sorted(kwargs.items())))
        is_new = self._mesh.ranks > 1 and sizes not in self._checked
        if is_new and has_compiled_parts(module):
            raise RuntimeError(_COMPILED)
        self._found = self._checked.get(sizes, Found())
        self._check = None
        if is_new:
            self._check = RowCheck(self._found, TokenTags(lambda: one_process_of(module)))
        try:
            with deterministic_products():
                output = call(module, *args, **kwargs)
            if self._check is not None:
                self._conclude(self._check)
        finally:
            self._check = None
        self._checked[sizes] = self._found
        return output

    def _run_part(self, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Run a call, whose tokens and samples the plan then shards."""
        if self._mesh.ranks == 1:
            return call(module, *args, **kwargs)
        samples = self._count_samples(args, kwargs)
        self._check_samples(samples)
        most = max(samples.values(), default=1)
        with SameBits(module, most, self._found, self._check), self._watch(module, most):
            return call(module, *args, **kwargs)

    @contextmanager
    def _watch(self, module: nn.Module, samples: int) -> Iterator[None]:
        """During a check, follow the tokens of this rank through the call, and compare its attention."""
        check, region = self._check, region_of(module)
        if check is None or region is None:
            yield
            return

        def handle(event: Event) -> None:
            check.tags.follow(event)
            if isinstance(event, AttentionStart) and event.is_sdpa:
                check.compare_splits(one_process_of(module, samples), *event.call[:4])

        recorder = Recorder(handle)
        check.running = lambda: recorder.running[-1] if recorder.running else ""
        with region.executor.report_tokens(check.tags.add), recorder.watch(module):
            yield

    def _count_samples(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, int]:
        """Return the number of samples in each argument that has samples."""
        region = region_of(self.module)
        if region is None:
            return {}
        arguments = {**dict(zip(region.parameters, args, strict=False)), **kwargs}
        samples: dict[str, int] = {}
        for name, dim in region.plan.batched.items():
            number = count_samples(arguments.get(name), dim)
            if number is not None:
                samples[name] = number
        return samples

    def _check_samples(self, samples: dict[str, int]) -> None:
        """Raise ``ValueError`` on every rank if ranks share samples, and an argument has one row for all of
        them.

        Products of that row are computed with one row in one process. On a rank with one sample they look
        like those of the sample.
        """
        region = region_of(self.module)
        if region is None or region.batch is None:
            return
        single = [name for name, number in samples.items() if number == 1]
        most = max(samples.values(), default=1)
        if single and most > 1:
            raise ValueError(
                f"same_bits=True: {', '.join(single)} of {original_class(self.module).__name__} has one row for all "
                f"{most} samples, and ranks that share the samples cannot tell its products from those of a sample. "
                "Use a mesh without 'batch' (max_batch_dim_size=1), or leave same_bits out."
            )

    def _conclude(self, check: RowCheck) -> None:
        """Raise ``RuntimeError`` on every rank if the check of a finished call found anything. Collective."""
        # Ranks along "batch" share the samples of this call, or each makes calls of its own.
        calling = self._mesh if check.shares_samples else self._mesh.sequence
        of_ranks = exchange((check.findings, check.products), calling)
        found = [line for findings, _ in of_ranks for line in findings]
        found += find_differences([products for _, products in of_ranks])
        if not found:
            return
        lines = "\n".join(f"  {line}" for line in dict.fromkeys(found))
        raise RuntimeError(
            f"same_bits=True: {original_class(self.module).__name__} on {self._mesh.ranks} ranks has other bits than "
            f"in one process, because these results depend on the number of rows:\n{lines}\nChoose sizes with more "
            "tokens on each rank, or fewer ranks. Or leave same_bits out: results then differ by rounding."
        )
