"""A group of diffusers' group offload that copies weights on a CPU as it does on CUDA."""

from unittest import mock

from diffusers.hooks.group_offloading import ModuleGroup


class CopyingGroup(ModuleGroup):
    """A group as on CUDA, where the copies on the device are not the weights in host memory. It counts copied
    tensors.
    """

    copies = 0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{**kwargs, "stream": mock.Mock(), "record_stream": True})

    @staticmethod
    def _to_cpu(tensor, low_cpu_mem_usage):
        return tensor.data.clone()

    def _onload_from_memory(self):
        for x, held in self.cpu_param_dict.items():
            x.data = held.clone()
            CopyingGroup.copies += 1
