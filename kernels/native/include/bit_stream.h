// Codes of 2, 5 and 6 bits. A row's words are one stream of bits, lowest first: 32 codes of BITS bits
// are BITS words, and where BITS does not divide 32 some begin in one word and end in the next.
#pragma once

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

// Calls f(k, a, b) for k = K..31 with what `take` makes of the words. a0 and b0 are those that code K
// begins in: each word is loaded once.
template <int BITS, int K, int N, class Take, class F>
AEGIS_INLINE void walk(const Take& take, const uint8_t* a, const uint8_t* b, int64_t stride,
                       Words<N> a0, Words<N> b0, F f) {
  using Stream = BitStream<BITS>;
  constexpr int next = Stream::word(K) + 1;
  if constexpr (Stream::straddles(K)) {
    constexpr int shift = Stream::shift(K);
    const Words<N> a1 = load_words<N>(a + 64 * next, stride);
    const Words<N> b1 = load_words<N>(b + 64 * next, stride);
    f(K, take.first(joined<shift>(a0, a1)), take.first(joined<shift>(b0, b1)));
    walk<BITS, K + 1>(take, a, b, stride, a1, b1, f);
  } else {
    f(K, take.template inside<K>(a0), take.template inside<K>(b0));
    if constexpr (K < 31 && Stream::word(K + 1) == Stream::word(K))
      walk<BITS, K + 1>(take, a, b, stride, a0, b0, f);
    else if constexpr (K < 31)
      walk<BITS, K + 1>(take, a, b, stride, load_words<N>(a + 64 * next, stride),
                        load_words<N>(b + 64 * next, stride), f);
  }
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
    walk<BITS, 0>(*this, words, words + half, stride, load_words<N>(words, stride),
                  load_words<N>(words + half, stride), f);
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
    walk<BITS, 0>(*this, words, words + half, stride, load_words<N>(words, stride),
                  load_words<N>(words + half, stride), f);
  }
};

}  // namespace aegis::AEGIS_ISA
