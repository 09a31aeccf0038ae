// Random numbers and weights, made of bits: no arithmetic that an environment could change.
#include "digest.h"

namespace digest {

namespace {

float of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// A float of any sign whose exponent lies in [low, low + count) of the biased ones.
uint32_t bits_between(Random& random, uint32_t low, uint32_t count) {
  const uint32_t exponent = low + random.below(count);
  return random.below(2) << 31 | exponent << 23 | random.below(1 << 23);
}

constexpr uint32_t kEdges[] = {
    0x00000000, 0x80000000,              // zeros
    0x00000001, 0x80000001, 0x007FFFFF,  // denormals
    0x00800000, 0x7F7FFFFF, 0xFF7FFFFF,  // the least and the most
    0x7F800000, 0xFF800000, 0x7FC00000,  // infinities and NaN
    0x20800000, 0x207FFFFF, 0x55000000,  // 2^-62, just below it, 2^43
};

// Scales and biases as they are stored. Half precision has denormals of its own, which must not be
// lost; bf16's are those of f32, as the least power of two is.
uint32_t stored_number(Random& random, DType dtype) {
  const bool rare = random.below(16) == 0;
  if (dtype == DType::e8m0) return rare ? random.below(2) : 114 + random.below(12);
  if (dtype == DType::f16) {
    const uint32_t exponent = rare ? 0 : 5 + random.below(9);
    return random.below(2) << 15 | exponent << 10 | random.below(1 << 10);
  }
  const uint32_t bits = rare ? random.below(1 << 23) : bits_between(random, 114, 12);
  return dtype == DType::bf16 ? bits >> 16 : bits;
}

void store_number(uint8_t* at, uint32_t number, DType dtype) {
  LinearDesc format;
  format.dtype = dtype;
  std::memcpy(at, &number, static_cast<size_t>(format.number_nbytes()));  // little endian
}

}  // namespace

const char* name_of(Range range) {
  constexpr const char* names[] = {"ordinary", "wide", "tiny", "edges"};
  return names[static_cast<int>(range)];
}

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::affine2: return "2bit";
    case Kind::affine3: return "3bit";
    case Kind::affine4: return "4bit";
    case Kind::affine5: return "5bit";
    case Kind::affine6: return "6bit";
    case Kind::affine8: return "8bit";
    case Kind::mxfp4: return "mxfp4";
    default: return "dense";
  }
}

const char* name_of(DType dtype) {
  constexpr const char* names[] = {"bf16", "f16", "f32", "e8m0"};
  return names[static_cast<int>(dtype)];
}

float number(Random& random, Range range) {
  switch (range) {
    case Range::ordinary: return of_bits(bits_between(random, 119, 9));
    case Range::wide: return of_bits(bits_between(random, 40, 160));
    case Range::tiny: return of_bits(bits_between(random, 0, 24));
    default: break;
  }
  if (random.below(24)) return of_bits(bits_between(random, 119, 9));
  return of_bits(kEdges[random.below(sizeof kEdges / sizeof *kEdges)]);
}

std::vector<float> numbers(Random& random, int64_t count, Range range) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = number(random, range);
  return values;
}

void fill_weight(Random& random, const LinearDesc& desc, uint8_t* data) {
  const int64_t number = desc.number_nbytes(), block = desc.block_nbytes();
  const int64_t head = desc.kind == Kind::dense ? block : 2 * aegis::kLanes * number;
  for (int64_t at = 0; at < desc.nbytes(); at += block) {
    for (int64_t i = 0; i < head; i += number)
      store_number(data + at + i, stored_number(random, desc.dtype), desc.dtype);
    for (int64_t i = head; i < block; i += 8) {
      const uint64_t codes = random.next();
      std::memcpy(data + at + i, &codes, 8);
    }
  }
}

Weight::Weight(Random& random, int64_t rows, int64_t in_features, Kind kind, DType dtype,
               bool with_bias, int64_t group_size)
    : desc([&] {
        LinearDesc made;
        made.rows = rows;
        made.in_features = in_features;
        made.kind = kind;
        made.dtype = dtype;
        made.group_size = group_size;
        return made;
      }()),
      bytes(desc.nbytes()) {
  fill_weight(random, desc, bytes.data());
  desc.data = bytes.data();
  if (!with_bias) return;
  bias = numbers(random, rows);
  desc.bias = bias.data();
}

}  // namespace digest
