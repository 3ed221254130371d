// Weights of 4 or 8 bits an input. Those of rows of floats are unpacked before they are multiplied; integer.h has the others.
//
//   a weight = code * scale + minimum, rounded to a float, where `group` inputs of an output share the last two
//
//   packed:   [blocks of 16 outputs][groups of inputs] { scales [16], minimums [16] or none, codes [group vectors of 16] }
//
// A vector of codes has an input of each output. 4-bit codes lie eight vectors together, as the digits of sixteen numbers.
#pragma once

#include <algorithm>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "team.h"
#include "tile.h"

namespace kvrelay {

// How codes, scales and minimums are stored. Products of a code and a scale must be exact in a float.
struct Form {
  int32_t bits;        // 4 or 8; 0: the weight is not quantised
  int32_t group;       // 16 or 32
  int32_t half;        // whether scales and minimums are float16, not float; they are finite then
  int32_t minimums;    // whether there are any
  int32_t first_code;  // what a stored 0 of 4 bits stands for
};

constexpr int kTogether = 8;      // vectors whose codes are unpacked at a time
constexpr int64_t kAhead = 4096;  // bytes that are asked for before they are read; may lie behind the weight

// Whether products of rows of this type with quantised weights are computed in whole numbers (integer.h).
template <class E>
constexpr bool kInIntegers = E::kPerUnit == 2;

inline int64_t group_bytes(const Form& form) {
  return kLanes * (1 + form.minimums) * (form.half ? 2 : 4) + kLanes * form.group * form.bits / 8;
}

inline int64_t quantised_bytes(const Form& form, int64_t num_outputs, int64_t num_inputs) {
  return ceil_div(num_outputs, kLanes) * ceil_div(num_inputs, form.group) * group_bytes(form);
}

// From codes [num_outputs, num_inputs], scales and minimums [num_outputs, groups] to the layout above; what is beyond is 0.
inline void pack_quantised(Member& member, const Form& form, const int8_t* codes, const void* scales, const void* minimums,
                           int64_t num_outputs, int64_t num_inputs, uint8_t* to) {
  const int64_t groups = ceil_div(num_inputs, form.group);
  const int64_t value_bytes = form.half ? 2 : 4;
  member.share(ceil_div(num_outputs, kLanes), [&](int64_t block) {
    const int64_t first = block * kLanes, outputs = std::min<int64_t>(kLanes, num_outputs - first);
    uint8_t* at = to + block * groups * group_bytes(form);
    memset(at, 0, groups * group_bytes(form));
    for (int64_t group = 0; group < groups; ++group) {
      for (const void* from : {scales, minimums}) {
        if (!from) continue;
        for (int64_t o = 0; o < outputs; ++o)
          memcpy(at + o * value_bytes, static_cast<const uint8_t*>(from) + ((first + o) * groups + group) * value_bytes,
                 value_bytes);
        at += kLanes * value_bytes;
      }
      for (int vector = 0; vector < form.group; ++vector)
        for (int lane = 0; lane < kLanes; ++lane) {
          const int64_t o = lane, i = group * form.group + vector;
          if (o >= outputs || i >= num_inputs) continue;
          const int8_t code = codes[(first + o) * num_inputs + i];
          if (form.bits == 8)
            at[vector * kLanes + lane] = static_cast<uint8_t>(code);
          else  // digits of numbers that are little-endian
            at[vector / kTogether * kLanes * 4 + lane * 4 + vector % kTogether / 2] |=
                (code - form.first_code) << (vector % 2 * 4);
        }
      at += kLanes * form.group * form.bits / 8;
    }
  });
}

// Sixteen scales or minimums.
inline f32x16 load_values(const uint8_t* from, bool half) {
  if (!half) return Float::load(reinterpret_cast<const float*>(from));
#ifdef __AVX512F__
  return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
  u16x16 x;
  memcpy(&x, from, sizeof x);
  const u32x16 bits = __builtin_convertvector(x, u32x16);
  const f32x16 size = as_float((bits & 0x7fff) << 13) * 0x1p112f;  // by so much the exponents' zeros differ
  return as_float(as_bits(size) | (bits & 0x8000) << 16);
#endif
}

// The next kTogether vectors of codes.
template <int kBits>
inline void load_codes(const uint8_t* from, f32x16 digits, f32x16* to) {
  if constexpr (kBits == 8) {
#pragma GCC unroll 8
    for (int k = 0; k < kTogether; ++k) {
#ifdef __AVX512F__
      const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + k * kLanes));
      to[k] = (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
#else
      typedef int8_t i8x16 __attribute__((vector_size(16)));
      i8x16 codes;
      memcpy(&codes, from + k * kLanes, sizeof codes);
      to[k] = __builtin_convertvector(__builtin_convertvector(codes, i32x16), f32x16);
#endif
    }
  } else {
    u32x16 numbers;
    memcpy(&numbers, from, sizeof numbers);
#pragma GCC unroll 8
    for (int k = 0; k < kTogether; ++k) {
#ifdef __AVX512F__
      to[k] = (f32x16)_mm512_permutexvar_ps((__m512i)(numbers >> 4 * k), (__m512)digits);  // by the lowest four bits
#else
      to[k] = __builtin_convertvector((i32x16)(numbers >> 4 * k & 15), f32x16) + digits[0];
#endif
    }
  }
}

// `count` groups of one block as the weights of a product: [units][16 outputs].
template <int kBits>
void unpack_groups(const Form& form, const uint8_t* from, int64_t count, float* to) {
  const f32x16 digits = f32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + float(form.first_code);
  const int64_t values_bytes = kLanes * (form.half ? 2 : 4);
  for (int64_t group = 0; group < count; ++group) {
    const f32x16 scales = load_values(from, form.half);
    from += values_bytes;
    f32x16 minimums = as_float(splat(0x80000000u));  // -0: it leaves zeros of either sign as they are
    if (form.minimums) {
      minimums = load_values(from, form.half);
      from += values_bytes;
    }
    for (int vector = 0; vector < form.group; vector += kTogether) {
      f32x16 x[kTogether];
      load_codes<kBits>(from, digits, x);
      for (int i = 0; i < kTogether * kLanes * kBits / 8; i += 64) __builtin_prefetch(from + kAhead + i);
      from += kTogether * kLanes * kBits / 8;
#pragma GCC unroll 8
      for (int k = 0; k < kTogether; ++k, to += kLanes) Float::store(to, x[k] * scales + minimums);
    }
  }
}

inline void unpack_groups(const Form& form, const uint8_t* from, int64_t count, float* to) {
  if (form.bits == 4)
    unpack_groups<4>(form, from, count, to);
  else
    unpack_groups<8>(form, from, count, to);
}

}  // namespace kvrelay
