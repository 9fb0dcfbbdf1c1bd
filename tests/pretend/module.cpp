// What Python sees.

#include "pretend.h"

#include <torch/csrc/utils/pybind.h>

using namespace pretend;

void bind_group(py::module& m);  // group.cpp

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  be_the_hooks();
  bind_group(m);
  m.def("set_devices", [](int count) { devices = static_cast<c10::DeviceIndex>(count); });
  m.def("devices", [] { return static_cast<int>(devices); });
  m.def("device", [] { return static_cast<int>(current); });
  m.def("set_device", &pretend::set_device);
  m.def("held", [] { return held.load(); });
  m.def("held_at_most", [] { return held_at_most.load(); });
  m.def("forget_peak", [] { held_at_most = held.load(); });
  m.def("waits", [] { return waits.load(); });
  m.def("kernels", [] { return kernels.load(); });
  m.def("wait", &wait_for_device);
  m.def("on_wait", [] { return on_wait.load(); });
  m.def("set_on_wait", [](int mode) { on_wait = mode; });
  m.def("skip_lists", &skip_lists);
  m.def("resize_storage", [](const at::Tensor& of, int64_t bytes) {  // torch's own is compiled with CUDA only
    auto storage = of.storage();
    auto fresh = pretend::memory().allocate(bytes);
    const auto both = std::min<size_t>(bytes, storage.nbytes());
    if (both > 0) std::memcpy(fresh.get(), storage.data(), both);
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(bytes);
  });
  m.def("generator", &generator);
  m.def("is_capturing", [] { return captured != nullptr; });
  m.def("launch", [](const py::function& function) {  // a kernel: now, or, while a graph is captured, at its replays
    if (!captured) {
      ++kernels;
      function();
      return;
    }
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
