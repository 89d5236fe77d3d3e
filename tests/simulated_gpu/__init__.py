"""A simulated GPU on a CPU-only torch: real numbers, a GPU's rules.

Tensors say ``cuda:<rank>`` and are plain ones, whose memory is the CPU's. Every operator that reaches the device is
computed on the CPU (operators.py), and what a GPU would refuse, wait for or get wrong is a fault or is counted:

- tensors of two devices, dtypes without a kernel, strides and masks that a fused attention kernel does not take;
- waits of the host, copies to and from the device, launches and collectives, by line (record.py);
- memory that another stream still writes or reads, pinned memory that changes too early, and results that are read
  before the host has waited: they are NaN (streams.py);
- NCCL's rules: dtypes, memory, outputs that are NaN until they are waited for (collectives.py); and over all ranks the
  order, sizes and pairs of collectives, and circles of waiting (order.py).

Triton kernels run by Triton's interpreter. Autograd and ``torch.compile(backend="eager" or "aot_eager")`` work.

**What it cannot see**: the numerics of cuBLAS and cuDNN, kernels that Inductor or Triton compile, CUDA graphs, memory
that is freed while another stream uses it, how much memory there is, and time. Each process has one GPU. torch's
``_c10d_functional_autograd`` operators call gloo in C++, past the checks. A group of gloo with tensors on
cuda waits at every collective; one of the fake backend moves nothing.

Tests use the fixture ``gpu_ranks``. ``python -m tests.simulated_gpu PROGRAM`` runs any program on it.
"""
