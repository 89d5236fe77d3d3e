// CUDA for a torch that was built without it: what C++ asks of a device, with the CPU's memory. See __init__.py.
//
// A tensor of the device is a plain tensor whose storage says "cuda" and whose bytes are a CPU storage's. on_cpu and
// on_device relabel a tensor without a copy; operators.py computes on the CPU between the two.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <mutex>
#include <set>

namespace {

using c10::DeviceIndex;
constexpr DeviceIndex kCount = 8;
thread_local DeviceIndex current = 0;  // As on CUDA, a new thread begins on the first GPU.

// The device's streams are simulated in Python (streams.py): autograd's engine and indexing need only a guard.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return {c10::kCUDA, current}; }
  c10::Device exchangeDevice(c10::Device device) const override { return {c10::kCUDA, std::exchange(current, device.index())}; }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, device.has_index() ? device : getDevice());
  }
  DeviceIndex deviceCount() const noexcept override { return kCount; }
  void record(void**, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// Pinned memory is CPU memory whose addresses are known.
struct PinnedAllocator final : c10::Allocator {
  static std::set<const void*>& blocks() { static std::set<const void*> all; return all; }
  static std::mutex& lock() { static std::mutex own; return own; }
  static void release(void* data) {
    { std::lock_guard<std::mutex> guard(lock()); blocks().erase(data); }
    c10::GetCPUAllocator()->raw_deallocate(data);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::GetCPUAllocator()->raw_allocate(bytes ? bytes : 1);
    std::lock_guard<std::mutex> guard(lock());
    blocks().insert(data);
    return {data, data, &release, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(DeviceIndex index) : at::CPUGeneratorImpl() { device_ = {c10::kCUDA, index < 0 ? current : index}; }
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return kCount; }
  DeviceIndex deviceCount() const override { return kCount; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { current = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return std::exchange(current, index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return std::exchange(current, index < 0 ? current : index); }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> guard(PinnedAllocator::lock());
    return PinnedAllocator::blocks().count(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { static PinnedAllocator only; return &only; }
  at::Generator getNewGenerator(DeviceIndex index) const override { return at::make_generator<Generator>(index); }
};

void release(void* storage) { delete static_cast<c10::Storage*>(storage); }

// Return a storage of `device` over the bytes of `from`. A CPU storage that was made from one of the device gives that
// one back, so that a view has the storage of its base.
c10::Storage relabel(const c10::Storage& from, c10::Device device) {
  if (device.is_cuda() && from.data_ptr().get_deleter() == release) {
    return *static_cast<c10::Storage*>(from.data_ptr().get_context());
  }
  c10::DataPtr data(const_cast<void*>(from.data()), new c10::Storage(from), release, device);
  auto* allocator = device.is_cpu() ? c10::GetCPUAllocator() : nullptr;  // An `out=` may be resized on the CPU.
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), from.nbytes(), std::move(data), allocator, allocator != nullptr);
}

at::Tensor relabel(const at::Tensor& x, c10::Device device) {
  using c10::BackendComponent;
  auto to = device.is_cpu() ? BackendComponent::CPUBit : BackendComponent::CUDABit;
  auto keys = x.key_set().remove_backend(BackendComponent::CPUBit).remove_backend(BackendComponent::CUDABit);
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      c10::TensorImpl::VIEW, relabel(x.storage(), device), keys | c10::DispatchKeySet(to), x.dtype());
  impl->set_sizes_and_strides(x.sizes(), x.strides(), x.storage_offset());
  return at::Tensor(std::move(impl));
}

at::Tensor on_cpu(const at::Tensor& x) { return relabel(x, c10::kCPU); }
at::Tensor on_device(const at::Tensor& x, int64_t index) { return relabel(x, {c10::kCUDA, static_cast<DeviceIndex>(index)}); }

// Give the storage of `x` new memory of this many bytes; what fits of the old content is kept.
at::Tensor resize_storage(const at::Tensor& x, int64_t bytes) {
  auto* storage = x.storage().unsafeGetStorageImpl();
  auto fresh = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, c10::GetCPUAllocator()->allocate(bytes), c10::GetCPUAllocator(), true));
  std::memcpy(fresh.mutable_data(), storage->data(), std::min<size_t>(bytes, storage->nbytes()));
  void* data = fresh.mutable_data();
  storage->set_data_ptr_noswap({data, new c10::Storage(std::move(fresh)), release, storage->device()});
  storage->set_nbytes(bytes);
  return x;
}

at::Tensor& set_storage(at::Tensor& x, c10::Storage source, c10::SymInt offset, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  auto* impl = x.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  auto shape = C10_AS_INTARRAYREF_SLOW(sizes);
  if (strides.size() == sizes.size()) {
    impl->set_sizes_and_strides(shape, C10_AS_INTARRAYREF_SLOW(strides), offset.expect_int());
  } else {
    impl->set_sizes_contiguous(shape);
    impl->set_storage_offset(offset.expect_int());
  }
  return x;
}

at::Tensor& set_whole_storage(at::Tensor& x, c10::Storage source) {
  auto count = static_cast<int64_t>(source.nbytes() / x.element_size());
  return set_storage(x, std::move(source), 0, {c10::SymInt(count)}, {});
}

at::Tensor& set_tensor(at::Tensor& x, const at::Tensor& source) {
  x.unsafeGetTensorImpl()->set_storage_keep_dtype(source.storage());
  x.unsafeGetTensorImpl()->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return x;
}

// scaled_dot_product_attention asks a stub of CUDA for its kernel; here it is an operator (attention.py).
int64_t choose(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask, double dropout, bool causal, std::optional<double> scale, bool enable_gqa) {
  // While a graph is traced, attention is matrix products: 0 is SDPBackend::math.
  if (query.key_set().has(c10::DispatchKey::Python)) return 0;
  return at::_fused_sdp_choice(query, key, value, mask, dropout, causal, scale, enable_gqa);
}
static const bool asked = (at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(choose), true);

}  // namespace

// The hooks are looked up once, during the import of torch: replace the object, which holds nothing but its table.
static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
static auto* hooks = new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks();

TORCH_LIBRARY(simulated_gpu, m) {
  m.def("on_cpu(Tensor x) -> Tensor", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, on_cpu));
  m.def("on_device(Tensor x, int index) -> Tensor", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, on_device));
  m.def("resize_storage(Tensor x, int bytes) -> Tensor", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, resize_storage));
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
}
