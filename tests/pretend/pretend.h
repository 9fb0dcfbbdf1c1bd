// A fake CUDA device: its memory is the host's, its kernels are those of the CPU.
//
// For torch built without CUDA, whose registries of devices, hooks and allocators have an empty place under this type.
// The host then does what it does with a GPU: autocast's rules for CUDA, backward in a thread of the device, errors for
// tensors of two devices, counted host syncs, graphs that run nothing while they are captured.
// The CPU's kernels compute: this shows nothing about speed, Triton's compiler, cuDNN or streams.

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
// The CPU generator that draws for one of the device.
at::Generator drawn_by(const at::Generator& generator);

// kernels.cpp: operators, host syncs, graphs

extern std::atomic<int64_t> waits, kernels;
extern std::atomic<int> on_wait;  // 0: count, 1: warn, 2: throw

struct Graph {
  std::vector<std::function<void()>> calls;
};
extern std::shared_ptr<Graph> captured;  // the one that is being captured, if one is

// Count a host sync, or refuse it.
void wait_for_device(const std::string& who);

// From now on torch's operators in place over lists of tensors do nothing, in one launch, as they have one on CUDA.
void skip_lists();

// The memory of a device tensor as a host tensor; other tensors are returned unchanged.
at::Tensor on_host(const at::Tensor& tensor);

// Do something now or, during a capture, at each replay of the graph.
void now_or_in_graph(std::function<void()> work);

}  // namespace pretend
