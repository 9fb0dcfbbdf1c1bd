#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <string>

namespace pretend {

// The memory of a tensor of the device's, as a tensor of the host's; others are given back as they are.
at::Tensor on_host(const at::Tensor& tensor);

// Do something now, or, while a graph is captured, at each of its replays.
void now_or_in_graph(std::function<void()> work);

}  // namespace pretend
