// Memory, of the device and of a block, and threads that read what other threads of their warp hold.

#include "machine.h"

#include <sstream>

namespace emulator {
namespace {

constexpr int WARP = 32;

void refuse_guard(const Instruction& i) {
  if (i.guard >= 0) throw std::runtime_error("the emulator lets all threads of a warp exchange, not some");
}

[[noreturn]] void refuse(const char* why, uint64_t address, int thread, int64_t size) {
  std::ostringstream text;
  text << "CUDA error: " << why << ": thread " << thread << " takes " << size << " bytes at 0x" << std::hex << address;
  throw std::runtime_error(text.str());
}

// The byte that a thread's access begins at, which has to be a multiple of what is read or written at once.
uint8_t* place(Block& block, const Instruction& i, int thread, bool shared, int64_t size) {
  const uint64_t slot = block.row(i.ins[0])[thread];
  const uint64_t address = (shared ? uint64_t{read<uint32_t>(slot)} : slot) + i.offset;
  if (address % size) refuse("misaligned address", address, thread, size);
  if (shared ? address + size > block.shared.size() : address < 4096)
    refuse("an illegal memory access", address, thread, size);
  return shared ? block.shared.data() + address : reinterpret_cast<uint8_t*>(address);
}

template <class T>
Known loads(bool shared) {
  return {[shared](Block& block, const Instruction& i) {
            const int count = static_cast<int>(i.outs.size());
            for (int t = 0; t < block.threads; ++t) {
              if (!block.acts(i, t)) continue;
              const auto* from = place(block, i, t, shared, count * int64_t{sizeof(T)});
              for (int k = 0; k < count; ++k) {
                T value;
                std::memcpy(&value, from + k * sizeof(T), sizeof(T));
                write<T>(block.row(i.outs[k])[t], value);
              }
            }
          },
          -1, 1};
}

template <class T>
Known stores(bool shared) {
  return {[shared](Block& block, const Instruction& i) {
            const int count = static_cast<int>(i.ins.size()) - 1;
            for (int t = 0; t < block.threads; ++t) {
              if (!block.acts(i, t)) continue;
              auto* to = place(block, i, t, shared, count * int64_t{sizeof(T)});
              for (int k = 0; k < count; ++k) std::memcpy(to + k * sizeof(T), &block.row(i.ins[k + 1])[t], sizeof(T));
            }
          },
          0, -1};
}

// One register from several, or several from one; the first has the lowest bits.
template <class Part>
void add_parts(std::vector<std::pair<std::string, Known>>& all, const std::string& width) {
  all.emplace_back("pack.b" + width, Known{[](Block& block, const Instruction& i) {
                                             auto* to = block.row(i.outs[0]);
                                             for (size_t k = 0; k < i.ins.size(); ++k)
                                               for (int t = 0; t < block.threads; ++t)
                                                 if (block.acts(i, t))
                                                   std::memcpy(reinterpret_cast<uint8_t*>(to + t) + k * sizeof(Part),
                                                               block.row(i.ins[k]) + t, sizeof(Part));
                                           },
                                           1, -1});
  all.emplace_back("unpack.b" + width,
                   Known{[](Block& block, const Instruction& i) {
                           const auto* row = block.row(i.ins[0]);
                           const std::vector<uint64_t> from(row, row + block.threads);  // may be one of the outs
                           for (size_t k = 0; k < i.outs.size(); ++k)
                             for (int t = 0; t < block.threads; ++t)
                               if (block.acts(i, t))
                                 std::memcpy(block.row(i.outs[k]) + t,
                                             reinterpret_cast<const uint8_t*>(&from[t]) + k * sizeof(Part), sizeof(Part));
                         },
                         -1, 1});
}

template <class T>
Known parameter() {
  return {[](Block& block, const Instruction& i) {
            auto* to = block.row(i.outs[0]);
            for (int t = 0; t < block.threads; ++t) write<T>(to[t], read<T>(block.parameters[i.offset]));
          },
          1, 0};
}

// All threads of a warp get what `f` makes of their numbers. The last operand says which threads take part: all.
template <class T, class F>
Known reduced(F f) {
  return {[f](Block& block, const Instruction& i) {
            refuse_guard(i);
            const auto* from = block.row(i.ins[0]);
            auto* to = block.row(i.outs[0]);
            for (int first = 0; first < block.threads; first += WARP) {
              T result = read<T>(from[first]);
              for (int t = first + 1; t < first + WARP; ++t) result = f(result, read<T>(from[t]));
              for (int t = first; t < first + WARP; ++t) write<T>(to[t], result);
            }
          },
          1, 2};
}

void butterfly(Block& block, const Instruction& i) {
  refuse_guard(i);
  const auto* row = block.row(i.ins[0]);
  const std::vector<uint64_t> from(row, row + block.threads);
  auto* to = block.row(i.outs[0]);
  for (int t = 0; t < block.threads; ++t) {
    const auto distance = read<uint32_t>(block.row(i.ins[1])[t]);
    write<uint32_t>(to[t], read<uint32_t>(from[t ^ static_cast<int>(distance & (WARP - 1))]));
  }
}

// Matrices of 8 rows of 16 bytes, one for each operand: thread 8k + r says where row r of the k-th begins, and thread t
// gets the 4 bytes in row t / 4 and column t % 4.
void matrices(Block& block, const Instruction& i) {
  refuse_guard(i);
  for (size_t k = 0; k < i.outs.size(); ++k)
    for (int t = 0; t < block.threads; ++t) {
      const int asked = t / WARP * WARP + static_cast<int>(k) * 8 + t % WARP / 4;
      std::memcpy(&block.row(i.outs[k])[t], place(block, i, asked, true, 16) + t % 4 * 4, 4);
    }
}

template <class T>
void add_reductions(std::vector<std::pair<std::string, Known>>& all, const std::string& type) {
  all.emplace_back("redux.sync.max." + type, reduced<T>([](T a, T b) { return a < b ? b : a; }));
  all.emplace_back("redux.sync.min." + type, reduced<T>([](T a, T b) { return a < b ? a : b; }));
  all.emplace_back("redux.sync.add." + type, reduced<T>([](T a, T b) { return static_cast<T>(uint32_t(a) + uint32_t(b)); }));
}

}  // namespace

void add_memory(std::vector<std::pair<std::string, Known>>& all) {
  for (bool shared : {false, true}) {
    const std::string space = shared ? "shared." : "global.";
    auto add = [&]<class T>(const char* type, T) {
      all.emplace_back("ld." + space + type, loads<T>(shared));
      all.emplace_back("st." + space + type, stores<T>(shared));
    };
    add("b8", uint8_t{}), add("b16", uint16_t{}), add("b32", uint32_t{}), add("b64", uint64_t{});
    add("u8", uint8_t{}), add("u16", uint16_t{}), add("u32", uint32_t{}), add("u64", uint64_t{});
    add("s8", int8_t{}), add("s16", int16_t{}), add("s32", int32_t{}), add("s64", int64_t{});
    add("f32", uint32_t{}), add("f64", uint64_t{});
  }
  for (const char* type : {"b32", "u32", "s32", "f32"})
    all.emplace_back(std::string("ld.param.") + type, parameter<uint32_t>());
  for (const char* type : {"b64", "u64", "s64", "f64"})
    all.emplace_back(std::string("ld.param.") + type, parameter<uint64_t>());
  for (const char* count : {"x1", "x2", "x4"})
    all.emplace_back(std::string("ldmatrix.sync.aligned.m8n8.") + count + ".shared.b16", Known{matrices, -1, 1});
  add_parts<uint16_t>(all, "32"), add_parts<uint32_t>(all, "64");
}

void add_exchanges(std::vector<std::pair<std::string, Known>>& all) {
  all.emplace_back("shfl.sync.bfly.b32", Known{butterfly, 1, 4});
  add_reductions<int32_t>(all, "s32"), add_reductions<uint32_t>(all, "u32");
  all.emplace_back("bar.sync", Known{[](Block&, const Instruction&) {}, 0, 1});
}

}  // namespace emulator
