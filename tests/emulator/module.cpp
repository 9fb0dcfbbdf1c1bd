// A kernel that Python builds instruction by instruction, and its run over a grid.

#include "machine.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace py = pybind11;

namespace emulator {
namespace {

constexpr int THREAD = 0, BLOCK = 1, BLOCKS = 2;  // registers that hold the indices of a thread

class Program {
 public:
  Program(int threads, int64_t shared) : threads_(threads), shared_(shared), initial_{0, 0, 0} {}

  int add_register(uint64_t value) {
    initial_.push_back(value);
    return static_cast<int>(initial_.size()) - 1;
  }

  void add(const std::string& opcode, std::vector<int> outs, std::vector<int> ins, int guard, bool unless,
           int64_t offset, std::string text) {
    const auto& what = known(opcode);
    const auto fits = [](int wanted, size_t given) { return wanted < 0 || wanted == static_cast<int>(given); };
    if (!fits(what.outs, outs.size()) || !fits(what.ins, ins.size()))
      throw std::runtime_error(opcode + " with other operands than the emulator knows");
    code_.push_back({&what.work, std::move(outs), std::move(ins), guard, unless, offset, -1, std::move(text)});
  }

  void add_branch(int target, int guard, bool unless, std::string text) {
    code_.push_back({nullptr, {}, {}, guard, unless, 0, target, std::move(text)});
  }

  void run(const std::vector<uint64_t>& parameters, int64_t blocks) const {
    py::gil_scoped_release release;
    Block block{threads_, std::vector<uint64_t>(initial_.size() * threads_), {}, parameters.data()};
    for (size_t r = 0; r < initial_.size(); ++r) std::fill_n(block.row(r), threads_, initial_[r]);
    for (int t = 0; t < threads_; ++t) block.row(THREAD)[t] = t;
    std::fill_n(block.row(BLOCKS), threads_, blocks);
    for (int64_t index = 0; index < blocks; ++index) {
      std::fill_n(block.row(BLOCK), threads_, index);
      block.shared.assign(shared_, 0xab);  // unwritten memory does not read as zero
      run_block(block);
    }
  }

 private:
  void run_block(Block& block) const {
    size_t at = 0;
    while (at < code_.size()) {
      const auto& i = code_[at++];
      try {
        if (i.work) {
          (*i.work)(block, i);
        } else if (goes(block, i)) {
          at = i.target;
        }
      } catch (const std::runtime_error& error) {
        throw std::runtime_error(std::string(error.what()) + ", at: " + i.text);
      }
    }
  }

  static bool goes(Block& block, const Instruction& i) {
    const bool first = block.acts(i, 0);
    for (int t = 1; t < block.threads; ++t)
      if (block.acts(i, t) != first)
        throw std::runtime_error("a divergent branch, which the emulator cannot run: threads 0 and " + std::to_string(t) +
                                 " of a block part");
    return first;
  }

  int threads_;
  int64_t shared_;
  std::vector<uint64_t> initial_;
  std::vector<Instruction> code_;
};

}  // namespace
}  // namespace emulator

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using emulator::Program;
  py::class_<Program>(m, "Program")
      .def(py::init<int, int64_t>())
      .def("add_register", &Program::add_register)
      .def("add", &Program::add)
      .def("add_branch", &Program::add_branch)
      .def("run", &Program::run);
}
