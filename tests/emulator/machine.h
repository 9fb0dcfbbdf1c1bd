// Runs the PTX of a kernel on the CPU, one block of threads after the other.
//
// Every instruction is executed for all threads of a block before the next one begins. So a barrier has nothing to do,
// shuffles find their inputs, and all threads must take the same way at a branch: the kernels of this library branch on
// values that a whole program shares. This cannot show races between threads or blocks, nor time.

#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace emulator {

struct Block;
struct Instruction;
using Handler = std::function<void(Block&, const Instruction&)>;

struct Instruction {
  const Handler* work;
  std::vector<int> outs, ins;  // registers; an immediate of PTX is a register that holds it from the start
  int guard = -1;              // the predicate under which a thread executes it; -1: all threads do
  bool unless = false;         // whether the predicate has to be false
  int64_t offset = 0;          // bytes, of an address; or which parameter of the kernel
  int target = -1;             // of a branch: where to continue
  std::string text;            // as PTX has it, with the line of the kernel's source
};

// A block of threads while it runs.
struct Block {
  int threads;
  std::vector<uint64_t> registers;  // 8 bytes for each thread, register by register; narrow ones use the low bytes
  std::vector<uint8_t> shared;
  const uint64_t* parameters;

  uint64_t* row(int index) {
    return registers.data() + static_cast<size_t>(index) * threads;
  }
  bool acts(const Instruction& i, int thread) {
    return i.guard < 0 || (static_cast<uint8_t>(row(i.guard)[thread]) != 0) != i.unless;
  }
};

template <class T>
T read(const uint64_t& slot) {
  T value;
  std::memcpy(&value, &slot, sizeof value);
  return value;
}

// All of the register: a number narrower than it fills the rest with its sign, or with zeros if it has none.
template <class T>
void write(uint64_t& slot, T value) {
  if constexpr (std::is_integral_v<T>) {
    slot = static_cast<uint64_t>(value);
  } else {
    slot = 0;
    std::memcpy(&slot, &value, sizeof value);
  }
}

struct Known {
  Handler work;
  int outs, ins;  // how many operands; -1: any number
};

// instructions.cpp: what an opcode does; throws for one that is not known.
const Known& known(const std::string& opcode);

// memory.cpp: loads and stores, which check addresses, and the instructions by which threads read each other's registers.
void add_memory(std::vector<std::pair<std::string, Known>>& all);
void add_exchanges(std::vector<std::pair<std::string, Known>>& all);

}  // namespace emulator
