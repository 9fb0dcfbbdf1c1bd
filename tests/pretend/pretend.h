// A device of type "cuda" that is none: its memory is the host's, its kernels are those of the CPU.
//
// For torch built without CUDA, whose registries of devices, hooks and allocators have an empty place under this type.
// What the host does is then what it does beside a GPU: autocast's rules for CUDA, backward in a thread of the device's,
// tensors that must lie on one device, steps that must not wait for it, graphs that run nothing while they are captured.
// What kernels compute is the CPU's: this shows nothing of speed, of Triton's compiler, of cuDNN or of streams.

#pragma once

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace pretend {

constexpr auto CUDA = c10::DeviceType::CUDA;

// device.cpp: the device, its memory, its random numbers

extern c10::DeviceIndex devices;
extern thread_local c10::DeviceIndex current;
extern std::atomic<int64_t> held, held_at_most;  // bytes

c10::Allocator& memory();
void set_device(int index);
void be_the_hooks();
at::Generator& generator();
// The generator of the CPU's that draws for one of the device's.
at::Generator drawn_by(const at::Generator& generator);

// kernels.cpp: operators, waits, graphs

extern std::atomic<int64_t> waits, kernels;
extern std::atomic<int> on_wait;  // 0: count, 1: warn, 2: throw

struct Graph {
  std::vector<std::function<void()>> calls;
};
extern std::shared_ptr<Graph> captured;  // the one that is being captured, if one is

// Count a wait of the host for the device, or refuse it.
void wait_for_device(const std::string& who);

// From now on torch's operators in place over lists of tensors do nothing, in one launch, as they have one on CUDA.
void skip_lists();

// The memory of a tensor of the device's, as a tensor of the host's; others are given back as they are.
at::Tensor on_host(const at::Tensor& tensor);

// Do something now, or, while a graph is captured, at each of its replays.
void now_or_in_graph(std::function<void()> work);

}  // namespace pretend
