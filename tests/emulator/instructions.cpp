// Arithmetic of single threads. Only what is rounded in one way by every device is here under PTX's name for it: an
// `add.f32` without `.rn` may be contracted with a product, which `enable_fp_fusion=False` at every launch forbids.

#include "machine.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <limits>
#include <map>

namespace emulator {
namespace {

std::vector<std::pair<std::string, Known>> all;

void name(const std::string& opcode, Known what) {
  all.emplace_back(opcode, std::move(what));
}

// An instruction that computes one number from others of its own thread.
template <class D, class... S, class F>
Known each(F f) {
  return {[f](Block& block, const Instruction& i) {
            auto* to = block.row(i.outs[0]);
            const uint64_t* from[sizeof...(S) + 1] = {};
            for (size_t k = 0; k < sizeof...(S); ++k) from[k] = block.row(i.ins[k]);
            auto one = [&]<size_t... K>(int t, std::index_sequence<K...>) { write<D>(to[t], f(read<S>(from[K][t])...)); };
            for (int t = 0; t < block.threads; ++t)
              if (block.acts(i, t)) one(t, std::index_sequence_for<S...>{});
          },
          1, sizeof...(S)};
}

template <class T>
T flushed(T x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(T(0), x) : x;
}

// ---- whole numbers

template <class T>
void whole(const std::string& type) {
  using U = std::make_unsigned_t<T>;
  constexpr int width = 8 * sizeof(T);
  auto wrapping = [&](const char* opcode, auto f) {  // in 64 bits, of which the low ones are right for every type
    name(opcode + type, each<U, U, U>([f](U a, U b) { return static_cast<U>(f(uint64_t{a}, uint64_t{b})); }));
  };
  wrapping("add.", std::plus<>{});
  wrapping("sub.", std::minus<>{});
  wrapping("mul.lo.", std::multiplies<>{});
  name("mad.lo." + type, each<U, U, U, U>([](U a, U b, U c) {
         return static_cast<U>(uint64_t{a} * uint64_t{b} + uint64_t{c});
       }));
  name("min." + type, each<T, T, T>([](T a, T b) { return a < b ? a : b; }));
  name("max." + type, each<T, T, T>([](T a, T b) { return a < b ? b : a; }));
  name("neg." + type, each<U, U>([](U a) { return static_cast<U>(-uint64_t{a}); }));
  name("abs." + type, each<U, T>([](T a) { return static_cast<U>(a < 0 ? -uint64_t(a) : uint64_t(a)); }));
  auto shifted = [&](const char* opcode, auto f) {  // by more than the width is by the width
    name(opcode + type, each<T, T, uint32_t>([f](T a, uint32_t by) { return f(a, by); }));
  };
  shifted("shr.", [](T a, uint32_t by) -> T { return by < width ? a >> by : a < 0 ? -1 : 0; });
  shifted("shl.", [](T a, uint32_t by) -> T { return by < width ? static_cast<U>(uint64_t(a) << by) : 0; });
}

template <class T, class Wide>
void widened(const std::string& type) {
  using U = std::make_unsigned_t<Wide>;
  name("mul.wide." + type, each<Wide, T, T>([](T a, T b) { return Wide{a} * Wide{b}; }));
  name("mad.wide." + type, each<U, T, T, U>([](T a, T b, U c) { return static_cast<U>(Wide{a} * Wide{b}) + c; }));
  name("mul.hi." + type, each<T, T, T>([](T a, T b) { return static_cast<T>((Wide{a} * Wide{b}) >> (8 * sizeof(T))); }));
}

template <class U>
void plain_bits(const std::string& width) {
  const std::string type = "b" + width;
  name("and." + type, each<U, U, U>([](U a, U b) { return static_cast<U>(a & b); }));
  name("or." + type, each<U, U, U>([](U a, U b) { return static_cast<U>(a | b); }));
  name("xor." + type, each<U, U, U>([](U a, U b) { return static_cast<U>(a ^ b); }));
  name("not." + type, each<U, U>([](U a) { return static_cast<U>(~a); }));
  name("shl." + type, each<U, U, uint32_t>([](U a, uint32_t by) {
         return by < 8 * sizeof(U) ? static_cast<U>(uint64_t{a} << by) : U{0};
       }));
  for (const char* kind : {"b", "u", "s"}) {
    name("mov." + (kind + width), each<U, U>([](U a) { return a; }));
    name("selp." + (kind + width), each<U, U, U, uint8_t>([](U a, U b, uint8_t p) { return p ? a : b; }));
  }
}

// The bytes of two registers, picked by four digits; with 8 added, the byte's sign all over.
uint32_t permuted(uint32_t a, uint32_t b, uint32_t digits) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t result = 0;
  for (int k = 0; k < 4; ++k) {
    const auto digit = digits >> (4 * k) & 15;
    const auto byte = static_cast<int8_t>(bytes >> (8 * (digit & 7)));
    result |= uint32_t{static_cast<uint8_t>(digit & 8 ? byte >> 7 : byte)} << (8 * k);
  }
  return result;
}

void add_bits() {
  plain_bits<uint16_t>("16"), plain_bits<uint32_t>("32"), plain_bits<uint64_t>("64");
  name("and.pred", each<uint8_t, uint8_t, uint8_t>([](uint8_t a, uint8_t b) { return uint8_t(a && b); }));
  name("or.pred", each<uint8_t, uint8_t, uint8_t>([](uint8_t a, uint8_t b) { return uint8_t(a || b); }));
  name("xor.pred", each<uint8_t, uint8_t, uint8_t>([](uint8_t a, uint8_t b) { return uint8_t(!a != !b); }));
  name("not.pred", each<uint8_t, uint8_t>([](uint8_t a) { return uint8_t(!a); }));
  name("mov.pred", each<uint8_t, uint8_t>([](uint8_t a) { return uint8_t(a != 0); }));
  name("popc.b32", each<uint32_t, uint32_t>([](uint32_t a) { return __builtin_popcount(a); }));
  name("prmt.b32", each<uint32_t, uint32_t, uint32_t, uint32_t>(permuted));
  name("bfe.u32", each<uint32_t, uint32_t, uint32_t, uint32_t>([](uint32_t a, uint32_t from, uint32_t length) {
         from &= 255, length &= 255;
         const auto rest = from < 32 ? a >> from : 0;
         return length < 32 ? rest & ((1u << length) - 1) : rest;
       }));
}

// ---- comparisons

template <class T>
void compared(const std::string& type) {
  auto add = [&](const std::string& which, auto f) {
    name("setp." + which + "." + type, each<uint8_t, T, T>([f](T a, T b) { return uint8_t(f(a, b)); }));
  };
  auto both = [&](const std::string& which, auto f) {  // with NaN the first is false, the second true
    if constexpr (std::is_floating_point_v<T>) {
      auto nan = [](T a, T b) { return std::isnan(a) || std::isnan(b); };
      add(which, [=](T a, T b) { return !nan(a, b) && f(a, b); });
      add(which + "u", [=](T a, T b) { return nan(a, b) || f(a, b); });
    } else {
      add(which, f);
    }
  };
  both("eq", std::equal_to<T>{}), both("ne", std::not_equal_to<T>{});
  both("lt", std::less<T>{}), both("le", std::less_equal<T>{});
  both("gt", std::greater<T>{}), both("ge", std::greater_equal<T>{});
  if constexpr (std::is_floating_point_v<T>) {
    add("nan", [](T a, T b) { return std::isnan(a) || std::isnan(b); });
    add("num", [](T a, T b) { return !std::isnan(a) && !std::isnan(b); });
  } else if constexpr (std::is_unsigned_v<T>) {
    add("lo", std::less<T>{}), add("ls", std::less_equal<T>{});
    add("hi", std::greater<T>{}), add("hs", std::greater_equal<T>{});
  }
}

// Of two 16-bit numbers in each half of a register.
template <class T>
void packed(const std::string& type) {
  for (bool larger : {false, true})
    name((larger ? "max." : "min.") + type, each<uint32_t, uint32_t, uint32_t>([=](uint32_t a, uint32_t b) {
           auto one = [=](T x, T y) { return uint16_t((x > y) == larger ? x : y); };
           return uint32_t(one(T(a >> 16), T(b >> 16))) << 16 | one(T(a), T(b));
         }));
}

// ---- floating point

// The larger, or the smaller: -0 is below 0; a NaN gives way to the other number, or with `lasting` does not.
template <class T>
T extreme(T a, T b, bool larger, bool lasting) {
  if (std::isnan(a) || std::isnan(b))
    return lasting ? std::numeric_limits<T>::quiet_NaN() : std::isnan(a) ? b : a;
  if (a == b) return std::signbit(a) == larger ? b : a;
  return (a > b) == larger ? a : b;
}

template <class T, class U>
void floating(const std::string& type) {
  name("add.rn." + type, each<T, T, T>(std::plus<T>{}));
  name("sub.rn." + type, each<T, T, T>(std::minus<T>{}));
  name("mul.rn." + type, each<T, T, T>(std::multiplies<T>{}));
  name("div.rn." + type, each<T, T, T>(std::divides<T>{}));
  name("fma.rn." + type, each<T, T, T, T>([](T a, T b, T c) { return std::fma(a, b, c); }));
  name("sqrt.rn." + type, each<T, T>([](T a) { return std::sqrt(a); }));
  name("abs." + type, each<T, T>([](T a) { return std::fabs(a); }));
  name("neg." + type, each<T, T>([](T a) { return -a; }));
  for (bool larger : {false, true}) {
    const std::string opcode = larger ? "max." : "min.";
    name(opcode + type, each<T, T, T>([=](T a, T b) { return extreme(a, b, larger, false); }));
    name(opcode + "NaN." + type, each<T, T, T>([=](T a, T b) { return extreme(a, b, larger, true); }));
  }
  name("mov." + type, each<U, U>([](U a) { return a; }));
  name("selp." + type, each<U, U, U, uint8_t>([](U a, U b, uint8_t p) { return p ? a : b; }));
}

// What a GPU computes to a few units in the last place, here to the last bit. `div.full` is Triton's plain `/`.
void add_approximate() {
  for (const std::string ftz : {"", ".ftz"}) {
    auto low = [flush = !ftz.empty()](float x) { return flush ? flushed(x) : x; };
    auto one = [&](const char* opcode, auto f) {
      name(opcode + ftz + ".f32", each<float, float>([=](float a) { return low(f(low(a))); }));
    };
    one("sqrt.approx", [](float a) { return std::sqrt(a); });
    one("rsqrt.approx", [](float a) { return 1 / std::sqrt(a); });
    one("rcp.approx", [](float a) { return 1 / a; });
    one("ex2.approx", [](float a) { return std::exp2(a); });
    one("lg2.approx", [](float a) { return std::log2(a); });
    for (const char* opcode : {"div.full", "div.approx"})
      name(opcode + ftz + ".f32", each<float, float, float>([=](float a, float b) { return low(low(a) / low(b)); }));
  }
}

// ---- conversions

template <class D>
D cut(double x, D lowest, D highest) {  // to a whole number: NaN is zero, what is too large the largest
  if (std::isnan(x)) return 0;
  if (x >= std::ldexp(1.0, std::numeric_limits<D>::digits)) return highest;
  return x < static_cast<double>(lowest) ? lowest : static_cast<D>(x);
}

template <class D>
void from_floating(const std::string& to) {
  const auto lowest = std::numeric_limits<D>::min(), highest = std::numeric_limits<D>::max();
  auto add = [&](const std::string& how, auto f) {
    name("cvt." + how + "." + to + ".f32", each<D, float>([=](float a) { return cut<D>(f(a), lowest, highest); }));
    name("cvt." + how + "." + to + ".f64", each<D, double>([=](double a) { return cut<D>(f(a), lowest, highest); }));
  };
  add("rzi", [](double a) { return std::trunc(a); });
  add("rni", [](double a) { return std::nearbyint(a); });
}

template <class S>
void from_whole(const std::string& from) {
  auto add = [&]<class D>(const char* to, D) {
    name("cvt." + (to + ("." + from)), each<D, S>([](S a) { return static_cast<D>(a); }));
  };
  add("u8", uint8_t{}), add("u16", uint16_t{}), add("u32", uint32_t{}), add("u64", uint64_t{});
  add("s8", int8_t{}), add("s16", int16_t{}), add("s32", int32_t{}), add("s64", int64_t{});
  name("cvt.rn.f32." + from, each<float, S>([](S a) { return static_cast<float>(a); }));
  name("cvt.rn.f64." + from, each<double, S>([](S a) { return static_cast<double>(a); }));
}

template <class Low>
uint16_t lowered(float x) {
  return std::isnan(x) ? 0x7fff : Low(x).x;  // a GPU has one NaN of 16 bits
}

template <class Low>
float raised(uint16_t x) {
  return static_cast<float>(Low(x, Low::from_bits()));
}

template <class Low>
void from_low(const std::string& type) {
  name("cvt.f32." + type, each<float, uint16_t>(raised<Low>));
  name("cvt.rn." + type + ".f32", each<uint16_t, float>([](float a) { return lowered<Low>(a); }));
  name("cvt.rn." + type + "x2.f32", each<uint32_t, float, float>([](float high, float low) {
         return uint32_t{lowered<Low>(high)} << 16 | lowered<Low>(low);
       }));
}

// 16-bit numbers, with which kernels compute nothing that rounds. `x2`: two of them in one register.
template <class Low>
void low(const std::string& type) {
  name("abs." + type, each<uint16_t, uint16_t>([](uint16_t a) { return uint16_t(a & 0x7fff); }));
  name("abs." + type + "x2", each<uint32_t, uint32_t>([](uint32_t a) { return a & 0x7fff7fff; }));
  for (const bool larger : {false, true}) {
    const std::string opcode = larger ? "max." : "min.";
    auto one = [=](uint16_t a, uint16_t b) {
      return lowered<Low>(extreme(raised<Low>(a), raised<Low>(b), larger, false));
    };
    name(opcode + type, each<uint16_t, uint16_t, uint16_t>(one));
    name(opcode + type + "x2", each<uint32_t, uint32_t, uint32_t>([=](uint32_t a, uint32_t b) {
           return uint32_t{one(a >> 16, b >> 16)} << 16 | one(a & 0xffff, b & 0xffff);
         }));
  }
}

void add_conversions() {
  from_low<c10::Half>("f16"), from_low<c10::BFloat16>("bf16");
  low<c10::Half>("f16"), low<c10::BFloat16>("bf16");
  name("cvt.f64.f32", each<double, float>([](float a) { return static_cast<double>(a); }));
  name("cvt.rn.f32.f64", each<float, double>([](double a) { return static_cast<float>(a); }));
  name("cvt.rmi.f32.f32", each<float, float>([](float a) { return std::floor(a); }));
  name("cvt.rmi.ftz.f32.f32", each<float, float>([](float a) { return std::floor(flushed(a)); }));
}

template <class T>
void of_type(const std::string& type) {
  whole<T>(type), compared<T>(type), from_floating<T>(type), from_whole<T>(type);
}

std::map<std::string, Known> made() {
  of_type<uint16_t>("u16"), of_type<uint32_t>("u32"), of_type<uint64_t>("u64");
  of_type<int16_t>("s16"), of_type<int32_t>("s32"), of_type<int64_t>("s64");
  from_whole<uint8_t>("u8"), from_whole<int8_t>("s8");  // PTX computes nothing in 8 bits
  widened<uint16_t, uint32_t>("u16"), widened<uint32_t, uint64_t>("u32");
  widened<int16_t, int32_t>("s16"), widened<int32_t, int64_t>("s32");
  add_bits();
  compared<uint16_t>("b16"), compared<uint32_t>("b32"), compared<uint64_t>("b64");
  compared<float>("f32"), compared<double>("f64");
  packed<uint16_t>("u16x2"), packed<int16_t>("s16x2");
  floating<float, uint32_t>("f32"), floating<double, uint64_t>("f64");
  add_approximate(), add_conversions();
  add_memory(all), add_exchanges(all);
  return {all.begin(), all.end()};
}

}  // namespace

const Known& known(const std::string& opcode) {
  static const std::map<std::string, Known> instructions = made();
  const auto found = instructions.find(opcode);
  if (found == instructions.end()) throw std::runtime_error("no instruction of the emulator is called " + opcode);
  return found->second;
}

}  // namespace emulator
