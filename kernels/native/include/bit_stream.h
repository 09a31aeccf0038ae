// Codes of 2, 5 and 6 bits. A row's words are one stream of bits, lowest first: 32 codes of BITS bits
// are BITS words, and where BITS does not divide 32 some begin in one word and end in the next.
#pragma once

#include <utility>

#include "masked.h"

namespace aegis::AEGIS_ISA {

// Where code k of 32 begins: its word and the bit in that; and whether it ends in the next word.
template <int BITS>
struct BitStream {
  static constexpr int word(int k) { return BITS * k / 32; }
  static constexpr int shift(int k) { return BITS * k % 32; }
  static constexpr bool straddles(int k) { return shift(k) + BITS > 32; }
};

// Every bit from bit SHIFT of `word` on, over those of the next.
template <int SHIFT, int N>
AEGIS_INLINE Words<N> joined(Words<N> word, Words<N> next) {
  Words<N> w;
  for (int n = 0; n < N; ++n) w.v[n] = ior(ishr<SHIFT>(word.v[n]), ishl<32 - SHIFT>(next.v[n]));
  return w;
}

// f(K, a, b) with what `take` makes of the words that code K begins in; then these are the next code's.
template <int BITS, int K, int N, class Take, class F>
AEGIS_INLINE void step(const Take& take, const uint8_t* a, const uint8_t* b, int64_t stride,
                       Words<N>& wa, Words<N>& wb, const F& f) {
  using Stream = BitStream<BITS>;
  constexpr int next = Stream::word(K) + 1;
  if constexpr (Stream::straddles(K)) {
    constexpr int shift = Stream::shift(K);
    const Words<N> a1 = load_words<N>(a + 64 * next, stride);
    const Words<N> b1 = load_words<N>(b + 64 * next, stride);
    f(K, take.first(joined<shift>(wa, a1)), take.first(joined<shift>(wb, b1)));
    wa = a1;
    wb = b1;
  } else {
    f(K, take.template inside<K>(wa), take.template inside<K>(wb));
    if constexpr (K < 31 && Stream::word(K + 1) != Stream::word(K)) {
      wa = load_words<N>(a + 64 * next, stride);
      wb = load_words<N>(b + 64 * next, stride);
    }
  }
}

// Calls f(k, a, b) for k = 0..31; each word is loaded once. One step behind the other, since steps
// within steps would take a compiler minutes.
template <int BITS, int N, class Take, class F, int... K>
AEGIS_INLINE void walk(const Take& take, const uint8_t* a, const uint8_t* b, int64_t stride,
                       const F& f, std::integer_sequence<int, K...>) {
  Words<N> wa = load_words<N>(a, stride), wb = load_words<N>(b, stride);
  (step<BITS, K>(take, a, b, stride, wa, wb, f), ...);
}

template <int BITS>
struct AffineStream {
  static constexpr bool affine = true, scaled = false, sized = false;
  static constexpr int groups_at_once = kGroupsAtOnce;
  CodeTable<BITS> table = CodeTable<BITS>::make();

  template <int K, int N>
  __attribute__((always_inline)) Codes<N> inside(Words<N> w) const {
    return table.template get<BitStream<BITS>::shift(K)>(w);
  }
  template <int N>
  __attribute__((always_inline)) Codes<N> first(Words<N> w) const {
    return table.template get<0>(w);
  }

  template <int N, class F>
  __attribute__((always_inline)) void codes(const uint8_t* words, int64_t stride, int64_t half,
                                            F f) const {
    walk<BITS, N>(*this, words, words + half, stride, f, std::make_integer_sequence<int, 32>());
  }
};

// As in masked.h: what does not lie in the 23 bits of a mantissa is moved down with its neighbours.
template <int BITS>
struct MaskedStream {
  static constexpr bool affine = true, scaled = true, sized = false;
  static constexpr int groups_at_once = kGroupsAtOnce;

  // How far the word of code k is moved: to the first code that does not fit.
  static constexpr int moved(int k) {
    using Stream = BitStream<BITS>;
    if (Stream::straddles(k)) return Stream::shift(k);
    int first = k;
    while (first > 0 && Stream::word(first - 1) == Stream::word(k) &&
           Stream::shift(first - 1) + BITS > 23)
      --first;
    return Stream::shift(k) + BITS > 23 ? Stream::shift(first) : 0;
  }
  static constexpr int bit(int k) { return BitStream<BITS>::shift(k % 32) - moved(k % 32); }

  template <int K, int N>
  __attribute__((always_inline)) Codes<N> inside(Words<N> w) const {
    return masked<bit(K), BITS>(shifted<moved(K)>(w));
  }
  template <int N>
  __attribute__((always_inline)) Codes<N> first(Words<N> w) const {
    return masked<0, BITS>(w);
  }

  template <int N, class F>
  __attribute__((always_inline)) void codes(const uint8_t* words, int64_t stride, int64_t half,
                                            F f) const {
    walk<BITS, N>(*this, words, words + half, stride, f, std::make_integer_sequence<int, 32>());
  }
};

}  // namespace aegis::AEGIS_ISA
