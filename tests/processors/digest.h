// Numbers that are the same on every processor, and digests of what the kernels make of them.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "linear.h"
#include "pool.h"

namespace digest {

using aegis::DType;
using aegis::Kind;
using aegis::LinearDesc;

// The same stream everywhere: splitmix64, and floats made of its bits without rounding.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  uint32_t below(uint32_t n) { return static_cast<uint32_t>((next() >> 32) % n); }

 private:
  uint64_t state_;
};

// How large the numbers of an array are.
enum class Range { ordinary, wide, tiny, edges };
const char* name_of(Range range);

float number(Random& random, Range range);
std::vector<float> numbers(Random& random, int64_t count, Range range = Range::ordinary);

// Bytes on a cache line with as much to read behind them as stores give.
class Bytes {
 public:
  explicit Bytes(int64_t nbytes) : memory_(static_cast<size_t>(nbytes) + 128) {}
  uint8_t* data() {
    const uintptr_t address = reinterpret_cast<uintptr_t>(memory_.data());
    return memory_.data() + (64 - address % 64) % 64;
  }

 private:
  std::vector<uint8_t> memory_;
};

// A weight with random codes, and numbers of every kind that a store may hold.
struct Weight {
  Weight(Random& random, int64_t rows, int64_t in_features, Kind kind, DType dtype,
         bool with_bias = false, int64_t group_size = aegis::kGroup);
  Weight(const Weight&) = delete;
  Weight& operator=(const Weight&) = delete;

  LinearDesc desc;
  Bytes bytes;
  std::vector<float> bias;
};

// Fills a weight's blocks, wherever they lie.
void fill_weight(Random& random, const LinearDesc& desc, uint8_t* data);

const char* name_of(Kind kind);
const char* name_of(DType dtype);
constexpr Kind kKinds[] = {Kind::affine3, Kind::affine4, Kind::affine8, Kind::dense,
                           Kind::affine2, Kind::affine5, Kind::affine6};
constexpr DType kDTypes[] = {DType::bf16, DType::f16, DType::f32};

// FNV-1a. Which NaN an operation returns is the one thing that processors may differ in.
class Digest {
 public:
  void add(uint64_t word) {
    for (int byte = 0; byte < 8; ++byte) hash_ = (hash_ ^ (word >> 8 * byte & 255)) * 0x100000001B3u;
  }
  void add(const float* values, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      uint32_t bits;
      std::memcpy(&bits, values + i, 4);
      add(uint64_t{(bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC00000 : bits});
    }
  }
  void add(const int32_t* values, int64_t count) {
    for (int64_t i = 0; i < count; ++i) add(static_cast<uint64_t>(values[i]));
  }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0xCBF29CE484222325u;
};

// What a run was asked for: the threads of its pool, and what the host process has made of the
// floating-point environment.
struct Settings {
  int threads = 1;
  std::string environment = "default";
};
extern Settings settings;

// The environment that the settings name, as a foreign library would leave it.
class Foreign {
 public:
  Foreign();
  ~Foreign();
  static bool known(const std::string& name);

 private:
  uint64_t before_;
};

// Calls of kernels outside of a block, on this thread, from within the foreign environment.
template <class F>
void kernels_only(F&& body) {
  const Foreign environment;
  aegis::Pool::run_inline([&](aegis::Team&) { body(); });
}

// Prints a line.
void report(const std::string& name, const Digest& digest);
// Ends the run: something that must hold on one processor alone does not.
[[noreturn]] void fail(const std::string& what);

void linear_cases(aegis::Pool& pool);
void vector_cases();
void table_cases();
void attention_cases(aegis::Pool& pool);
void delta_cases(aegis::Pool& pool);
void mlp_cases(aegis::Pool& pool);
void router_cases(aegis::Pool& pool);
void experts_cases(aegis::Pool& pool);
void crc_cases();

}  // namespace digest
