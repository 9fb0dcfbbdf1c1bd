// A process group for tensors on the fake CUDA device: a gloo group does the work in their memory.
//
// As with NCCL there is no host sync, and a graph repeats the work at each replay.

#include "pretend.h"

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/pybind.h>

namespace {

using at::Tensor;
using c10d::Backend;
using c10d::Work;
using Tensors = std::vector<Tensor>;
using Lists = std::vector<Tensors>;
using Done = c10::intrusive_ptr<Work>;

class Finished final : public Work {
 public:
  Finished(c10d::OpType kind, Tensors results) : Work(-1, kind), results_(std::move(results)) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
    future_->markCompleted(c10::IValue(results_));
    finish();
  }
  bool isCompleted() override {
    return true;
  }
  bool isSuccess() const override {
    return true;
  }
  bool wait(std::chrono::milliseconds) override {
    return true;
  }
  void synchronize() override {}
  Tensors result() override {
    return results_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

 private:
  Tensors results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

Tensor host(const Tensor& tensor) {
  return pretend::on_host(tensor);
}

Tensors host(const Tensors& tensors) {
  Tensors seen;
  for (const auto& tensor : tensors) seen.push_back(pretend::on_host(tensor));
  return seen;
}

Lists host(const Lists& lists) {
  Lists seen;
  for (const auto& tensors : lists) seen.push_back(host(tensors));
  return seen;
}

Tensors flat(const Lists& lists) {
  Tensors all;
  for (const auto& tensors : lists) all.insert(all.end(), tensors.begin(), tensors.end());
  return all;
}

class Group final : public Backend {
 public:
  explicit Group(c10::intrusive_ptr<Backend> inner)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}

  const std::string getBackendName() const override {
    return "pretend";
  }
  Done broadcast(Tensors& data, const c10d::BroadcastOptions& o) override {
    return run(c10d::OpType::BROADCAST, data, [this, x = host(data), o]() mutable { return inner_->broadcast(x, o); });
  }
  Done allreduce(Tensors& data, const c10d::AllreduceOptions& o) override {
    return run(c10d::OpType::ALLREDUCE, data, [this, x = host(data), o]() mutable { return inner_->allreduce(x, o); });
  }
  Done allreduce_coalesced(Tensors& data, const c10d::AllreduceCoalescedOptions& o) override {
    return run(c10d::OpType::ALLREDUCE_COALESCED, data, [this, x = host(data), o]() mutable {
      return inner_->allreduce_coalesced(x, o);
    });
  }
  Done reduce(Tensors& data, const c10d::ReduceOptions& o) override {
    return run(c10d::OpType::REDUCE, data, [this, x = host(data), o]() mutable { return inner_->reduce(x, o); });
  }
  Done allgather(Lists& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return run(c10d::OpType::ALLGATHER, flat(out), [this, y = host(out), x = host(in), o]() mutable {
      return inner_->allgather(y, x, o);
    });
  }
  Done _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
    return run(c10d::OpType::_ALLGATHER_BASE, {out}, [this, y = host(out), x = host(in), o]() mutable {
      return inner_->_allgather_base(y, x, o);
    });
  }
  Done allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return run(c10d::OpType::COALESCED, out, [this, y = host(out), x = host(in), o]() mutable {
      return inner_->allgather_into_tensor_coalesced(y, x, o);
    });
  }
  Done gather(Lists& out, Tensors& in, const c10d::GatherOptions& o) override {
    return run(c10d::OpType::GATHER, flat(out), [this, y = host(out), x = host(in), o]() mutable {
      return inner_->gather(y, x, o);
    });
  }
  Done scatter(Tensors& out, Lists& in, const c10d::ScatterOptions& o) override {
    return run(c10d::OpType::SCATTER, out, [this, y = host(out), x = host(in), o]() mutable {
      return inner_->scatter(y, x, o);
    });
  }
  Done reduce_scatter(Tensors& out, Lists& in, const c10d::ReduceScatterOptions& o) override {
    return run(c10d::OpType::REDUCE_SCATTER, out, [this, y = host(out), x = host(in), o]() mutable {
      return inner_->reduce_scatter(y, x, o);
    });
  }
  Done _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& o) override {
    return run(c10d::OpType::_REDUCE_SCATTER_BASE, {out}, [this, y = host(out), x = host(in), o]() mutable {
      return inner_->_reduce_scatter_base(y, x, o);
    });
  }
  Done reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o) override {
    return run(c10d::OpType::COALESCED, out, [this, y = host(out), x = host(in), o]() mutable {
      return inner_->reduce_scatter_tensor_coalesced(y, x, o);
    });
  }
  Done alltoall_base(
      Tensor& out, Tensor& in, std::vector<int64_t>& to, std::vector<int64_t>& from,
      const c10d::AllToAllOptions& o) override {
    return run(c10d::OpType::ALLTOALL_BASE, {out}, [this, y = host(out), x = host(in), to, from, o]() mutable {
      return inner_->alltoall_base(y, x, to, from, o);
    });
  }
  // Complete when the other rank receives it, for which two ranks that both send first would wait; not in graphs.
  Done send(Tensors& data, int to, int tag) override {
    auto held = host(data);
    return inner_->send(held, to, tag);
  }
  Done recv(Tensors& data, int from, int tag) override {
    auto held = host(data);
    return inner_->recv(held, from, tag);
  }
  Done barrier(const c10d::BarrierOptions& o) override {
    auto plain = o;
    plain.device_ids.clear();
    return run(c10d::OpType::BARRIER, {}, [this, plain]() { return inner_->barrier(plain); });
  }
  void setSequenceNumberForGroup() override {
    inner_->setSequenceNumberForGroup();
  }
  uint64_t getSequenceNumberForGroup() override {
    return inner_->getSequenceNumberForGroup();
  }

 private:
  template <typename Start>
  Done run(c10d::OpType kind, Tensors results, Start start) {
    pretend::now_or_in_graph([start]() mutable { start()->wait(); });
    return c10::make_intrusive<Finished>(kind, std::move(results));
  }

  c10::intrusive_ptr<Backend> inner_;
};

// DistributedDataParallel asks for one of each kind of device.
class HostTimer final : public c10d::Timer {
 public:
  explicit HostTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const auto from = getTimestamp(start), to = getTimestamp(end);
    return from && to ? std::optional<int64_t>(*to - *from) : std::nullopt;
  }
};

}  // namespace

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, HostTimer)
}

void bind_group(py::module& m) {
  m.def("group", [](const c10::intrusive_ptr<Backend>& inner) -> c10::intrusive_ptr<Backend> {
    return c10::make_intrusive<Group>(inner);
  });
}
