// The device, its memory and its random numbers.

#include "pretend.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <mutex>
#include <set>

namespace pretend {

c10::DeviceIndex devices = 1;
thread_local c10::DeviceIndex current = 0;
std::atomic<int64_t> held{0}, held_at_most{0};

namespace {

using c10::Device;
using c10::DeviceIndex;

thread_local c10::StreamId streams[16] = {};

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
    std::memset(block->memory.get(), 0xff, bytes);  // NaN in every floating format: reading unwritten memory shows
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

// Host memory that claims to be pinned. A driver allocates none while a graph is captured.
struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK(!captured, "CUDA error: operation not permitted when stream is capturing (cudaHostAlloc)");
    auto* held = new c10::DataPtr(c10::GetAllocator(c10::kCPU)->allocate(bytes));
    std::lock_guard<std::mutex> lock(mutex);
    begins.insert(held->get());
    return {held->get(), held, &drop, c10::Device(c10::kCPU)};
  }
  static void drop(void* context) {
    auto* held = static_cast<c10::DataPtr*>(context);
    {
      std::lock_guard<std::mutex> lock(mutex);
      begins.erase(held->get());
    }
    delete held;
  }
  static bool has(const void* begin) {
    std::lock_guard<std::mutex> lock(mutex);
    return begins.count(begin) > 0;
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &drop;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  static inline std::mutex mutex;
  static inline std::set<const void*> begins;
};

Pinned pinned;

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

// Draws what a CPU generator draws, which kernels get in its place; torch asks only for its device.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(at::Generator host)
      : c10::GeneratorImpl(Device(CUDA, current), c10::DispatchKeySet(c10::DispatchKey::CUDA)), host(std::move(host)) {}
  void set_current_seed(uint64_t seed) override {
    host.set_current_seed(seed);
  }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override {
    return 0;
  }
  uint64_t current_seed() const override {
    return host.current_seed();
  }
  uint64_t seed() override {
    return host.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& state) override {
    host = static_cast<Generator*>(state.get())->host;
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    return c10::make_intrusive<Generator>(host);
  }
  Generator* clone_impl() const override {
    return new Generator(host.clone());
  }

  at::Generator host;
};

at::Generator new_generator() {
  return at::make_generator<Generator>(at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val));
}

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    return generator();
  }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return new_generator();
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
    return &pinned;
  }
  bool isPinnedPtr(const void* begin) const override {
    return Pinned::has(begin);
  }
  c10::Allocator* getCUDADeviceAllocator() const override {
    return &allocator;
  }
  void deviceSynchronize(DeviceIndex) const override {}
};

}  // namespace

at::Generator& generator() {
  static auto one = new_generator();
  return one;
}

at::Generator drawn_by(const at::Generator& generator) {
  return generator.device().type() == CUDA ? static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->host : generator;
}

c10::Allocator& memory() {
  return allocator;
}

void set_device(int index) {
  Guard().setDevice({CUDA, static_cast<DeviceIndex>(index)});
}

// torch has already made its own hooks, which say that there is no CUDA, and keeps them. They have no members, so
// replacing their type replaces what they say.
void be_the_hooks() {
  static CUDAHooks own{at::CUDAHooksArgs{}};
  static_assert(sizeof(CUDAHooks) == sizeof(at::CUDAHooksInterface));
  auto* theirs = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  std::memcpy(static_cast<void*>(theirs), static_cast<void*>(&own), sizeof(void*));
}

}  // namespace pretend
