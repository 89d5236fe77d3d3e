"""The parameters of a model that take gradients: none while its weights are distributed, the same ones as before
afterwards.
"""

from __future__ import annotations

from torch import nn

from para_core.torch_internals import parameter_slots


class Gradients:
    """Turns gradients off for the parameters of a model, and on again.

    A parameter is remembered by its module and name: FSDP2, tensor parallelism and stages put other objects in its
    place. What a user puts there is of another class (quantized weights), and keeps what it has.
    """

    def __init__(self) -> None:
        self._enabled: dict[tuple[int, str], tuple[nn.Module, str, type]] = {}

    def stop(self, module: nn.Module) -> None:
        """Turn gradients off for the parameters of ``module`` that take some now. Call it again for parameters that
        came later.
        """
        for owner in module.modules():
            for name, parameter in owner.named_parameters(recurse=False):
                if parameter.requires_grad:
                    self._enabled[id(owner), name] = (owner, name, type(parameter))
        module.requires_grad_(False)

    def restore(self) -> None:
        """Turn gradients on again for the parameters for which :meth:`stop` turned them off."""
        for owner, name, kind in self._enabled.values():
            parameter: nn.Parameter | None = parameter_slots(owner).get(name)
            if parameter is not None and type(parameter) is kind:
                parameter.requires_grad_(True)
        self.forget()

    def forget(self) -> None:
        """Let :meth:`restore` turn nothing on that was stopped before this call.

        peft freezes all that is there when it adds an adapter; on a distributed model, where nothing takes gradients,
        that leaves no trace.
        """
        self._enabled.clear()
