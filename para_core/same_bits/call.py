"""Run the calls of one model with the bits of one process, and check its functions at each new size of its inputs.

- :class:`SameBitsCalls` lives as long as the option. It knows which calls were checked: by the kinds of their
  arguments, of the model's weights and of its adapters, and only while the code of the model stays the same.
- A :class:`~para_core.same_bits.row_check.RowCheck` lives for one checked call. It compares each new
  function, and holds the findings and products that the ranks then exchange.
- A :class:`~para_core.same_bits.found.Found` is what remains of a check, for later calls of that kind: which
  functions are computed at their place, and which sequences they get.

``adapters/same_bits.py`` installs this on each transformer of a pipeline; a VAE has :mod:`.image_rows`
instead. Tests: tests/same_bits/test_pipelines.py, tests/same_bits/test_rows.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat
from operator import is_
from typing import Any

from torch import nn

from para_core.dataclass_fields import leaf_kinds
from para_core.distributed.agree import exchange
from para_core.distributed.mesh import GuidedMesh
from para_core.instance.modules import ModuleTree, submodules_of
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
from para_core.torch_internals import DisableTorchFunction, is_compiled_code

_COMPILED = (
    "same_bits=True runs eager models: generated code may add up in another order for another number of tokens, which "
    "nothing checks. Leave torch.compile out, or same_bits."
)


class _ModelFunctions:
    """A snapshot of what decides which functions a call of a model runs, besides its arguments.

    Hooks are left out: a user may register one on a single rank, to log for example.

    A model has over a thousand modules, so :meth:`is_unchanged` is made of loops in C.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._tree = module, ModuleTree(module)
        modules = submodules_of(module)
        self._states = [submodule.__dict__ for submodule in modules]
        self._code = self._current_code()
        # The layers that peft has wrapped with adapters, such as LoRAs.
        self._adapted: list[Any] = [x for x in modules if hasattr(x, "adapter_layer_names")]

    def _current_code(self) -> list[Any]:
        """Return the attention processors and the replaced ``forward`` functions of all modules, in one order."""
        return [
            *map(dict.get, self._states, repeat("processor")),
            *map(dict.get, self._states, repeat("forward")),
        ]

    def is_unchanged(self) -> bool:
        """Whether the submodules and their code are the same objects as in the snapshot.

        Loading a LoRA replaces submodules.
        """
        # Compare code by identity, because some processors define equality by their settings.
        return self._tree.is_unchanged() and all(map(is_, self._code, self._current_code()))

    def has_compiled_parts(self) -> bool:
        """Whether a part of the model is compiled now. Only valid if :meth:`is_unchanged`."""
        return self._tree.has_compiled_parts()

    def kinds(self) -> tuple[Any, ...]:
        """Return what users change without exchanging objects: the type and dtype of each weight, and which
        adapters of each layer are active or fused. Only valid if :meth:`is_unchanged`.

        Sizes and devices of weights are left out, because offload may change them on one rank.
        """
        weights = [*self._module.parameters()]
        # Otherwise each dtype of a quantized weight is a Python call.
        with DisableTorchFunction():
            dtypes = [weight.dtype for weight in weights]
        adapters = [
            (layer.disable_adapters, tuple(layer.active_adapters), tuple(layer.merged_adapters))
            for layer in self._adapted
        ]
        return (*map(type, weights), *dtypes, *adapters)


class SameBitsCalls:
    """``same_bits=True`` for the calls of one model.

    Args:
        module: The model, which has a plan on ``mesh``.
        mesh: The ranks.
    """

    def __init__(self, module: nn.Module, mesh: GuidedMesh) -> None:
        self.module, self._mesh = module, mesh
        # The findings of each checked call, by the kinds of its arguments and of the model.
        self._checked: dict[tuple[Any, ...], Found] = {}
        self._functions: _ModelFunctions | None = None
        # Those of the current call: _run sets both, and _run_part, which runs inside of it, reads them. A
        # check fills the same Found.
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

    def begin_generation(self) -> None:
        """Forget all checks if the code of the model has changed on a rank, which would else check alone,
        until the time-out of all ranks. Collective.

        Inside of a generation, and of a transformer without a pipeline, code must be changed on all ranks.
        """
        is_unchanged = self._functions is not None and self._functions.is_unchanged()
        if not all(exchange(is_unchanged, self._mesh)):
            self._functions = None

    def _functions_of(self, module: nn.Module) -> _ModelFunctions:
        """Return the snapshot of the model as it is now. Forgets all checks if the code inside has changed."""
        if self._functions is None or not self._functions.is_unchanged():
            self._functions = _ModelFunctions(module)
            self._checked.clear()
        return self._functions

    def _run(self, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Run a call on all tokens: outside of the plan, where all ranks have the same arguments. Collective
        in the first call with each size of the inputs, and in the first one after a change of the model.

        Raises:
            RuntimeError: On every rank: a function gives other bits for the rows of a rank than for those of
                one process. Or the model is compiled.
        """
        if is_compiled_code():
            raise RuntimeError(_COMPILED)
        if self._mesh.ranks == 1:
            with deterministic_products():
                return call(module, *args, **kwargs)
        functions = self._functions_of(module)
        if functions.has_compiled_parts():
            raise RuntimeError(_COMPILED)
        # All ranks have the same arguments and the same model here, so they check the same calls.
        key = (leaf_kinds((args, sorted(kwargs.items()))), functions.kinds())
        is_new = key not in self._checked
        self._found = self._checked.get(key, Found())
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
        self._checked[key] = self._found
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
        # Ranks along "batch" share the samples of this call, or each makes calls of its own, of another
        # branch of guidance. Products of such calls differ by right: test_flux_has_the_bytes_of_one_process
        # on 2 × 1 × 2.
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
