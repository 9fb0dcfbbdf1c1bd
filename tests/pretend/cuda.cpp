// A device of type "cuda" that is none: its memory is the host's, its kernels are those of the CPU.
//
// For torch built without CUDA, whose registries of devices, hooks and allocators have an empty place under this type.
// What the host does is then what it does beside a GPU: autocast's rules for CUDA, backward in a thread of the device's,
// tensors that must lie on one device, steps that must not wait for it, graphs that run nothing while they are captured.
// What kernels compute is the CPU's: this shows nothing of speed, of Triton's compiler, of cuDNN or of streams.

#include "pretend.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <mutex>
#include <set>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::Stack;

constexpr auto CUDA = c10::DeviceType::CUDA;

DeviceIndex devices = 1;
thread_local DeviceIndex current = 0;
thread_local c10::StreamId streams[16] = {};
std::atomic<int64_t> held{0}, held_at_most{0}, waits{0}, kernels{0};
std::atomic<int> on_wait{0};  // 0: count, 1: warn, 2: throw

// ---- memory

struct Block {
  c10::DataPtr memory;
  int64_t bytes;
};

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* block = new Block{c10::GetAllocator(c10::kCPU)->allocate(bytes), static_cast<int64_t>(bytes)};
    int64_t now = held += block->bytes, most = held_at_most;
    while (now > most && !held_at_most.compare_exchange_weak(most, now)) {
    }
    std::memset(block->memory.get(), 0xff, bytes);  // NaN in every floating format: what is read unwritten shows
    return {block->memory.get(), block, &drop, Device(CUDA, current)};
  }
  static void drop(void* block) {
    held -= static_cast<Block*>(block)->bytes;
    delete static_cast<Block*>(block);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &drop;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

Allocator allocator;
REGISTER_ALLOCATOR(CUDA, &allocator);

// ---- device, streams, events

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return CUDA;
  }
  Device exchangeDevice(Device device) const override {
    Device before(CUDA, current);
    setDevice(device);
    return before;
  }
  Device getDevice() const override {
    return {CUDA, current};
  }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < devices, "CUDA error: invalid device ordinal");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  c10::Stream getStream(Device device) const override {
    auto index = device.index() < 0 ? current : device.index();
    return c10::Stream(c10::Stream::UNSAFE, Device(CUDA, index), streams[index]);
  }
  c10::Stream getDefaultStream(Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getNewStream(Device device, int) const override {
    static std::atomic<c10::StreamId> last{0};
    return c10::Stream(c10::Stream::UNSAFE, Device(CUDA, device.index() < 0 ? current : device.index()), ++last);
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    streams[stream.device_index()] = stream.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override {
    return devices;
  }
  // all work is done when its call returns, in whatever stream
  void record(void** event, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {
    *event = this_event();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void synchronizeEvent(void*) const override {}
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  double elapsedTime(void*, void*, const DeviceIndex) const override {
    return 1.0;
  }

 private:
  static void* this_event() {
    static char event;
    return &event;
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

at::Generator& generator() {
  static auto one = at::make_generator<at::CPUGeneratorImpl>(0);
  return one;
}

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    return generator();
  }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return at::make_generator<at::CPUGeneratorImpl>(0);
  }
  Device getDeviceFromPtr(void*) const override {
    return {CUDA, current};
  }
  bool hasCUDA() const override {
    return true;
  }
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex current_device() const override {
    return current;
  }
  DeviceIndex deviceCount() const override {
    return devices;
  }
  DeviceIndex getCurrentDevice() const override {
    return current;
  }
  void setCurrentDevice(DeviceIndex device) const override {
    Guard().setDevice({CUDA, device});
  }
  int getNumGPUs() const override {
    return devices;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return c10::GetAllocator(c10::kCPU);
  }
  c10::Allocator* getCUDADeviceAllocator() const override {
    return &allocator;
  }
  void deviceSynchronize(DeviceIndex) const override {}
};

// torch has made its own by now, which say that there is no CUDA, and keeps them: they have no members, so that
// changing what they are changes what they say.
void be_the_hooks() {
  static CUDAHooks own{at::CUDAHooksArgs{}};
  static_assert(sizeof(CUDAHooks) == sizeof(at::CUDAHooksInterface));
  auto* theirs = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  std::memcpy(static_cast<void*>(theirs), static_cast<void*>(&own), sizeof(void*));
}

// ---- graphs: what is called while one is captured does nothing, and is called again at each replay

struct Graph {
  std::vector<std::function<void()>> calls;
};

std::mutex capturing;
std::shared_ptr<Graph> captured;  // the one that is being captured, if one is

void wait_for_device(const std::string& who) {
  TORCH_CHECK(!captured, "CUDA error: operation not permitted when stream is capturing (", who, ")");
  ++waits;
  TORCH_CHECK(on_wait != 2, "called a synchronizing CUDA operation: ", who);
  if (on_wait == 1) TORCH_WARN("called a synchronizing CUDA operation: ", who);
}

// ---- tensors: the same memory, seen from either side

Tensor placed(c10::Storage storage, DispatchKey key, const Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  tensor.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  return tensor;
}

Tensor seen_by_host(const Tensor& tensor) {
  auto* kept = new c10::Storage(tensor.storage());
  c10::DataPtr memory(
      const_cast<void*>(kept->data()), kept, [](void* s) { delete static_cast<c10::Storage*>(s); },
      Device(c10::kCPU));
  c10::Storage storage(
      c10::Storage::use_byte_size_t{}, kept->nbytes(), std::move(memory), c10::GetAllocator(c10::kCPU), true);
  return placed(std::move(storage), DispatchKey::CPU, tensor);
}

using pretend::on_host;

// A copy in memory of the device's.
Tensor on_device(const Tensor& tensor) {
  Tensor copy = at::detail::empty_strided_generic(
      tensor.sizes(), tensor.strides(), &allocator, c10::DispatchKeySet(DispatchKey::CUDA), tensor.scalar_type());
  if (tensor.numel() > 0) on_host(copy).copy_(tensor);
  return copy;
}

struct Seen {
  Tensor device, host, before;
  bool written;
};

// Ops whose work depends on values that only the host can tell apart by waiting.
const std::set<std::string> WAITING = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::equal",
    "aten::unique_dim", "aten::unique_consecutive", "aten::bincount", "aten::repeat_interleave.Tensor"};

// Ops that take values from the host by themselves.
const std::set<std::string> MIXING = {
    "aten::copy_", "aten::_index_put_impl_", "aten::index", "aten::index_put_", "aten::index_put", "aten::_copy_from"};

// On CUDA softmax takes 16 bits and gives float32 in one go, and its backward the reverse; on a CPU by two.
bool softmax_in_one(const c10::OperatorHandle& op, Stack& stack) {
  const auto& name = op.operator_name().name;
  if ((name == "aten::_softmax" || name == "aten::_log_softmax") && stack[2].toBool()) {
    stack[0] = stack[0].toTensor().to(at::kFloat);
    stack[2] = false;
  } else if (name == "aten::_softmax_backward_data" || name == "aten::_log_softmax_backward_data") {
    const auto given = stack[0].toTensor().scalar_type(), wanted = stack[3].toScalarType();
    if (given == wanted) return false;
    stack[3] = given;
    Tensor out;
    if (stack.size() > 4) {
      out = stack[4].toTensor();
      stack[4] = at::empty({0}, out.options().dtype(given));
    }
    op.callBoxed(stack);
    stack[0] = out.defined() ? out.copy_(stack[0].toTensor()) : stack[0].toTensor().to(wanted);
    return true;
  }
  return false;
}

// Norms of CUDA read weights in the dtype of the input; those of a CPU float32 weights too.
void check_norm(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments) {
  const auto& name = op.operator_name().name;
  const size_t place = name == "aten::native_layer_norm" ? 2 : 1;
  if (name != "aten::native_layer_norm" && name != "aten::native_group_norm") return;
  if (!arguments[place].isTensor() || !arguments[place].toTensor().defined()) return;
  const auto input = arguments[0].toTensor().scalar_type(), weight = arguments[place].toTensor().scalar_type();
  TORCH_CHECK(input == weight, name, ": expected scalar type ", input, " but found ", weight);
}

// Products of float16 tensors are summed in float32 on CUDA; a CPU takes ten times as long for them as for float32.
const std::set<std::string> PRODUCTS = {
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addmv", "aten::mv", "aten::dot", "aten::addbmm",
    "aten::_slow_conv2d_forward", "aten::_slow_conv2d_backward", "aten::slow_conv3d_forward"};

bool in_float32(const c10::OperatorHandle& op, Stack& stack) {
  if (PRODUCTS.count(op.operator_name().name) == 0) return false;
  std::vector<std::pair<Tensor, Tensor>> widened;
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < stack.size(); ++i) {
    if (!stack[i].isTensor() || !stack[i].toTensor().defined()) continue;
    Tensor narrow = stack[i].toTensor();
    if (narrow.scalar_type() != at::kHalf) continue;
    Tensor wide = narrow.to(at::kFloat);
    stack[i] = wide;
    if (arguments[i].alias_info() != nullptr && arguments[i].alias_info()->isWrite()) widened.emplace_back(wide, narrow);
    else widened.emplace_back(wide, Tensor());
  }
  if (widened.empty()) return false;
  op.callBoxed(stack);
  for (auto& value : stack) {
    if (!value.isTensor() || !value.toTensor().defined() || value.toTensor().scalar_type() != at::kFloat) continue;
    Tensor result = value.toTensor(), given;
    for (auto& [wide, narrow] : widened)
      if (narrow.defined() && wide.is_same(result)) given = narrow;
    if (!given.defined()) {
      value = result.to(at::kHalf);
      continue;
    }
    if (given.sizes() != result.sizes()) at::native::resize_(given, result.sizes(), std::nullopt);
    value = given.copy_(result);
  }
  return true;
}

void run(const c10::OperatorHandle& op, Stack& stack) {
  c10::impl::ExcludeDispatchKeyGuard below(
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset);
  if (in_float32(op, stack)) return;
  if (softmax_in_one(op, stack)) return;
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) {
    op.callBoxed(stack);
    return;
  }
  at::Generator own = at::detail::getDefaultCPUGenerator();
  auto host_state = own.get_state();
  own.set_state(generator().get_state());
  try {
    op.callBoxed(stack);
  } catch (...) {
    own.set_state(host_state);
    throw;
  }
  generator().set_state(own.get_state());
  own.set_state(host_state);
}

void on_the_cpu(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto name = toString(op.operator_name());
  const auto many = schema.arguments().size();
  std::vector<Seen> seen;
  bool from_host = false;
  Device home(CUDA, current);

  const auto take = [&](const Tensor& tensor, bool written) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != CUDA) {
      from_host = from_host || tensor.dim() > 0 || tensor.is_sparse();
      return tensor;
    }
    home = tensor.device();
    for (auto& one : seen)
      if (one.device.is_same(tensor)) {
        one.written = one.written || written;
        return one.host;
      }
    seen.push_back({tensor, on_host(tensor), {}, written});
    return seen.back().host;
  };
  auto arguments = torch::jit::last(stack, many).vec();
  bool crosses = false;
  for (size_t i = 0; i < many; ++i) {
    auto& value = arguments[i];
    const auto* alias = schema.arguments()[i].alias_info();
    const bool written = alias != nullptr && alias->isWrite();
    if (value.isTensor()) {
      crosses = crosses || (value.toTensor().defined() && !value.toTensor().is_cuda());
      value = take(value.toTensor(), written);
    } else if (value.isTensorList()) {
      c10::List<Tensor> taken;
      for (const Tensor& tensor : value.toTensorList()) taken.push_back(take(tensor, written));
      value = taken;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> taken;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorList())
        taken.push_back(tensor ? std::optional<Tensor>(take(*tensor, written)) : std::nullopt);
      value = taken;
    } else if (value.isDevice() && value.toDevice().type() == CUDA) {
      home = value.toDevice();
      value = Device(c10::kCPU);
    }
  }
  check_norm(op, arguments);
  if (from_host && MIXING.count(name) == 0)
    TORCH_CHECK(false, name, ": Expected all tensors to be on the same device, but found at least two devices");
  const bool copies = name == "aten::copy_";
  if (WAITING.count(name) > 0 || (copies && crosses && !arguments[2].toBool())) wait_for_device(name);
  if ((name == "aten::index" || name == "aten::_index_put_impl_" || name == "aten::index_put_"))
    for (const std::optional<Tensor>& index : arguments[1].toOptionalTensorList())
      if (index && index->defined() && index->scalar_type() == at::kBool) wait_for_device(name);
  ++kernels;

  auto before = arguments;  // as boxed calls take theirs away
  const auto graph = captured;
  if (graph)
    for (auto& one : seen)
      if (one.written) one.before = one.host.clone();
  Stack working(arguments.begin(), arguments.end());
  run(op, working);

  const auto outside = current;
  current = home.index() < 0 ? current : home.index();
  std::vector<std::pair<Tensor, size_t>> made;  // what a replay computes anew, as the host sees it
  const auto give = [&](const Tensor& result, size_t place) {
    if (!result.defined()) return result;
    for (auto& one : seen) {
      if (one.host.is_same(result)) return one.device;
      if (one.host.storage().data() == result.storage().data() && result.storage().data() != nullptr) {
        return placed(one.device.storage(), DispatchKey::CUDA, result);
      }
    }
    auto out = on_device(result);
    made.emplace_back(on_host(out), place);
    return out;
  };
  for (auto& one : seen)  // written with another size: outputs that were given empty
    if (one.written && (one.host.sizes() != one.device.sizes() || one.host.strides() != one.device.strides())) {
      auto moved = on_device(one.host);
      one.device.unsafeGetTensorImpl()->set_storage_keep_dtype(moved.storage());
      one.device.unsafeGetTensorImpl()->set_sizes_and_strides(moved.sizes(), moved.strides());
      one.host.unsafeGetTensorImpl()->set_storage_keep_dtype(on_host(moved).storage());  // which a replay writes
      one.before = Tensor();
    }
  torch::jit::drop(*stack, many);
  for (size_t i = 0; i < working.size(); ++i) {
    auto& value = working[i];
    if (value.isTensor()) {
      torch::jit::push(*stack, name == "aten::_local_scalar_dense" ? value.toTensor() : give(value.toTensor(), i));
    } else if (value.isTensorList()) {
      c10::List<Tensor> given;
      size_t n = 0;
      for (const Tensor& tensor : value.toTensorList()) given.push_back(give(tensor, i + 1000 * ++n));
      torch::jit::push(*stack, given);
    } else {
      torch::jit::push(*stack, value);
    }
  }
  current = outside;
  if (!graph) return;
  for (auto& one : seen)
    if (one.before.defined()) one.host.copy_(one.before);
  pretend::now_or_in_graph([op, before, made]() {
    Stack again(before.begin(), before.end());
    run(op, again);
    for (const auto& [to, place] : made) {
      const auto& value = again[place % 1000];
      to.copy_(value.isTensor() ? value.toTensor() : value.toTensorList().get(place / 1000 - 1));
    }
  });
}

// ---- what cannot be had by asking the CPU

Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(Device(CUDA, current)));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &allocator, c10::DispatchKeySet(DispatchKey::CUDA),
      c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(Device(CUDA, current)));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
      c10::DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

Tensor as_strided(
    const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor& set_storage(
    Tensor& self, c10::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source);
  impl->set_storage_offset(offset.expect_int());
  auto strides = C10_AS_INTARRAYREF_SLOW(stride);
  if (strides.data() == nullptr && !size.empty()) {
    impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  } else {
    impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), strides);
  }
  return self;
}

Tensor& set_whole(Tensor& self, c10::Storage source) {
  auto entries = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source);
  self.unsafeGetTensorImpl()->set_storage_offset(0);
  self.unsafeGetTensorImpl()->set_sizes_contiguous({entries});
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_storage_offset(source.storage_offset());
  impl->set_sizes_and_strides(source.sizes(), source.strides());
  return self;
}

const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (self.sizes() == sizes) return self;
  const auto bytes = (c10::multiply_integers(sizes) + self.storage_offset()) * self.dtype().itemsize();
  if (self.storage().nbytes() < bytes) {
    auto larger = allocator.allocate(bytes);
    if (self.storage().nbytes() > 0) std::memcpy(larger.get(), self.storage().data(), self.storage().nbytes());
    self.storage().set_data_ptr_noswap(std::move(larger));
    self.storage().set_nbytes(bytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  for (const auto* name : {"copy_", "native_layer_norm", "native_group_norm"})  // else made of other operators
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>());
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("set_.source_Storage", &set_whole);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("resize_", &resize);
}

at::Tensor pretend::on_host(const at::Tensor& tensor) {
  return tensor.is_cuda() ? seen_by_host(tensor) : tensor;
}

void pretend::now_or_in_graph(std::function<void()> work) {
  const auto graph = captured;
  if (!graph) {
    work();
    return;
  }
  std::lock_guard<std::mutex> lock(capturing);
  graph->calls.push_back(std::move(work));
}

void bind_group(py::module& m);  // group.cpp

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  be_the_hooks();
  bind_group(m);
  m.def("set_devices", [](int count) { devices = static_cast<DeviceIndex>(count); });
  m.def("devices", [] { return static_cast<int>(devices); });
  m.def("device", [] { return static_cast<int>(current); });
  m.def("set_device", [](int index) { Guard().setDevice({CUDA, static_cast<DeviceIndex>(index)}); });
  m.def("held", [] { return held.load(); });
  m.def("held_at_most", [] { return held_at_most.load(); });
  m.def("forget_peak", [] { held_at_most = held.load(); });
  m.def("waits", [] { return waits.load(); });
  m.def("kernels", [] { return kernels.load(); });
  m.def("wait", &wait_for_device);
  m.def("on_wait", [] { return on_wait.load(); });
  m.def("set_on_wait", [](int mode) { on_wait = mode; });
  m.def("resize_storage", [](const Tensor& of, int64_t bytes) {  // torch's own is compiled with CUDA only
    auto storage = of.storage();
    auto memory = allocator.allocate(bytes);
    const auto both = std::min<size_t>(bytes, storage.nbytes());
    if (both > 0) std::memcpy(memory.get(), storage.data(), both);
    storage.set_data_ptr_noswap(std::move(memory));
    storage.set_nbytes(bytes);
  });
  m.def("generator", &generator);
  m.def("is_capturing", [] { return captured != nullptr; });
  m.def("record", [](const py::function& function) {
    // kept for good: a graph may die in a thread without the interpreter's lock
    auto* kept = new py::function(function);
    pretend::now_or_in_graph([kept] {
      py::gil_scoped_acquire gil;
      (*kept)();
    });
  });
  py::class_<Graph, std::shared_ptr<Graph>>(m, "Graph")
      .def(py::init<>())
      .def("begin", [](std::shared_ptr<Graph> graph) {
        TORCH_CHECK(!captured, "a graph is being captured already");
        captured = std::move(graph);
      })
      .def("end", [](Graph&) { captured = nullptr; })
      .def("size", [](Graph& graph) { return graph.calls.size(); })
      .def("replay", [](Graph& graph) {
        py::gil_scoped_release release;
        for (auto& call : graph.calls) ++kernels, call();
      });
}
