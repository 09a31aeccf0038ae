// The experts block: one row and many, all at once and as they arrive, with and without a shared
// expert; and checksums.
#include <algorithm>
#include <string>

#include "crc32.h"
#include "digest.h"
#include "experts.h"

namespace digest {

namespace {

constexpr int64_t kHidden = 128, kInner = 64, kSharedInner = 128, kExperts = 9, kChoices = 3;

// Experts in slots, behind each other in reverse order.
struct Slots {
  Slots(Random& random, Kind gate, Kind down, DType dtype, int64_t group_size, bool biases)
      : stride(0), bytes((make(gate, down, dtype, group_size, biases), kExperts * stride)) {
    for (int64_t slot = 0; slot < kExperts; ++slot)
      for (const LinearDesc* each : {&parts.gate, &parts.up, &parts.down}) {
        uint8_t* record = bytes.data() + slot * stride;
        fill_weight(random, *each, record + reinterpret_cast<uintptr_t>(each->data));
        if (!each->bias) continue;
        const std::vector<float> bias = numbers(random, each->rows);
        std::memcpy(record + reinterpret_cast<uintptr_t>(each->bias), bias.data(), bias.size() * 4);
      }
  }

  void make(Kind gate, Kind down, DType dtype, int64_t group_size, bool biases) {
    for (LinearDesc* each : {&parts.gate, &parts.up, &parts.down}) {
      const bool last = each == &parts.down;
      each->rows = last ? kHidden : kInner;
      each->in_features = last ? kInner : kHidden;
      each->kind = last ? down : gate;
      each->dtype = dtype;
      each->group_size = last ? std::min(group_size, kInner) : group_size;
      each->data = reinterpret_cast<const uint8_t*>(static_cast<uintptr_t>(stride));
      stride += (each->nbytes() + 63) / 64 * 64;
    }
    for (LinearDesc* each : {&parts.gate, &parts.up, &parts.down}) {
      if (!biases) break;
      each->bias = reinterpret_cast<const float*>(static_cast<uintptr_t>(stride));
      stride += each->rows * 4;
    }
    stride += 64;
  }

  aegis::ExpertDescs parts;
  int64_t stride;
  Bytes bytes;
};

struct Call {
  std::vector<float> x, normed, weights;
  std::vector<int32_t> chosen, ids, slots;
};

Call make_call(Random& random, int64_t tokens, Range range) {
  Call call{numbers(random, tokens * kHidden), numbers(random, tokens * kHidden, range), {}, {}, {}, {}};
  for (int64_t t = 0; t < tokens; ++t) {
    std::vector<int32_t> row;
    while (row.size() < kChoices) {
      const int32_t id = static_cast<int32_t>(random.below(kExperts));
      if (std::find(row.begin(), row.end(), id) == row.end()) row.push_back(id);
    }
    std::sort(row.begin(), row.end());
    for (int32_t id : row) {
      call.chosen.push_back(id);
      call.weights.push_back(number(random, Range::ordinary));
    }
  }
  for (int32_t id = 0; id < kExperts; ++id)
    if (std::find(call.chosen.begin(), call.chosen.end(), id) != call.chosen.end()) {
      call.ids.push_back(id);
      call.slots.push_back(static_cast<int32_t>(kExperts) - 1 - id);
    }
  return call;
}

// The whole call at once; or expert by expert, from the last where any order will do.
std::vector<float> run(aegis::Experts& block, const Call& call, int64_t tokens, bool at_once) {
  std::vector<float> x = call.x;
  const int64_t count = static_cast<int64_t>(call.ids.size());
  const Foreign environment;
  if (at_once) {
    block.run(x.data(), call.normed.data(), call.chosen.data(), call.weights.data(), tokens,
              call.ids.data(), call.slots.data(), count);
    return x;
  }
  block.begin(x.data(), call.normed.data(), call.chosen.data(), call.weights.data(), tokens);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = tokens <= aegis::kUnorderedRows ? count - 1 - i : i;
    block.add(call.ids.data() + at, call.slots.data() + at, 1);
  }
  block.finish();
  return x;
}

void experts_case(aegis::Pool& pool, Random& random, Kind gate, Kind down, DType dtype, int shared,
                  int64_t group_size = aegis::kGroup, bool clamped = false) {
  Slots slots(random, gate, down, dtype, group_size, clamped);
  const Weight shared_gate(random, kSharedInner, kHidden, gate, dtype, false, group_size);
  const Weight shared_up(random, kSharedInner, kHidden, gate, dtype);
  const Weight shared_down(random, kHidden, kSharedInner, down, dtype, false, group_size);
  const Weight sigmoid_gate(random, 1, kHidden, Kind::affine8, DType::bf16);
  const aegis::ExpertDescs shared_parts{shared_gate.desc, shared_up.desc, shared_down.desc};
  constexpr int64_t most = 70;
  const aegis::ExpertsShape shape{kHidden, kInner, shared ? kSharedInner : 0, kExperts, kChoices, most};
  const int64_t nbytes = aegis::Experts::scratch_nbytes(shape);
  Bytes scratch(nbytes);
  aegis::Experts block(pool, shape, {slots.bytes.data(), slots.stride, kExperts}, slots.parts,
                       shared ? &shared_parts : nullptr, shared == 2 ? &sigmoid_gate.desc : nullptr,
                       scratch.data(), nbytes, shared == 1 ? 0.22f : 1.0f,
                       clamped ? std::optional<aegis::SwigluClamp>({0.75f, 1.702f}) : std::nullopt);
  const std::string name = std::string("experts ") + name_of(gate) + " " + name_of(down) + " " +
                           name_of(dtype) + (shared == 2 ? " gated" : shared ? " shared" : "") +
                           (group_size == aegis::kGroup ? "" : " in groups of " + std::to_string(group_size));
  for (Range range : {Range::ordinary, Range::wide, Range::tiny})
    for (int64_t tokens : {int64_t{1}, int64_t{2}, int64_t{9}, most}) {
      if (tokens == most && range != Range::ordinary) continue;
      const Call call = make_call(random, tokens, range);
      const std::vector<float> whole = run(block, call, tokens, true);
      Digest digest, pieces;
      digest.add(whole.data(), tokens * kHidden);
      pieces.add(run(block, call, tokens, false).data(), tokens * kHidden);
      const std::string full = name + " " + name_of(range) + " " + std::to_string(tokens);
      report(full, digest);
      if (digest.value() != pieces.value()) fail(full + ": experts one by one give other bits");
    }
}

}  // namespace

void experts_cases(aegis::Pool& pool) {
  Random random(11);
  experts_case(pool, random, Kind::affine4, Kind::affine4, DType::bf16, 0);
  experts_case(pool, random, Kind::affine4, Kind::affine4, DType::f16, 2);
  experts_case(pool, random, Kind::affine3, Kind::affine4, DType::bf16, 1);
  experts_case(pool, random, Kind::affine3, Kind::affine3, DType::f32, 0);
  experts_case(pool, random, Kind::affine8, Kind::dense, DType::bf16, 2);
  experts_case(pool, random, Kind::affine2, Kind::affine6, DType::bf16, 2);
  experts_case(pool, random, Kind::affine4, Kind::affine4, DType::bf16, 2, 32);
  experts_case(pool, random, Kind::affine4, Kind::affine2, DType::bf16, 1, 128);
  experts_case(pool, random, Kind::mxfp4, Kind::mxfp4, DType::e8m0, 0, aegis::kGroup, true);
}

void crc_cases() {
  Random random(12);
  std::vector<unsigned char> data(5000);
  for (unsigned char& byte : data) byte = static_cast<unsigned char>(random.next());
  Digest digest;
  for (size_t offset = 0; offset < 17; ++offset)
    for (size_t nbytes = 0; nbytes < 5000 - offset; nbytes += nbytes < 200 ? 1 : 301) {
      const uint32_t crc = aegis::crc32_table(0, data.data() + offset, nbytes);
      digest.add(uint64_t{crc});
      for (int n = 0; aegis::crc32_method(n) != nullptr; ++n)
        if (aegis::crc32_method(n)->run(0, data.data() + offset, nbytes) != crc)
          fail(std::string("crc32 by ") + aegis::crc32_method(n)->name + " of " +
               std::to_string(nbytes) + " bytes differs from the table's");
    }
  report("crc32", digest);
}

}  // namespace digest
