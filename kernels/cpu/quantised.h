// Weights of 4 or 8 bits an input, which products unpack as they go.
//
//   a weight = the element type's rounding of code * scale + minimum, where `group` inputs of an output share the last two
//
//   packed:   [blocks of 16 outputs][groups of inputs] { scales [16], minimums [16] or none, codes [group vectors of 16] }
//
// A vector of codes is what one vector of floats is made of: for floats an input of each output; for bfloat16, whose units
// are pairs of inputs, a unit of outputs 0 to 7 or of 8 to 15, so that two vectors of floats round to the unit in place.
// 4-bit codes lie eight vectors together, as the digits of sixteen numbers.
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

// Vectors of one unit, and where their lanes belong.
template <class E>
struct Halves {
  static constexpr int kCount = E::kPerUnit;  // of a unit
  static int output(int vector, int lane) { return kCount == 1 ? lane : vector % 2 * 8 + lane / 2; }
  static int input(int vector, int lane) { return kCount == 1 ? vector : vector / 2 * 2 + lane % 2; }
};

inline int64_t group_bytes(const Form& form) {
  return kLanes * (1 + form.minimums) * (form.half ? 2 : 4) + kLanes * form.group * form.bits / 8;
}

template <class E>
int64_t num_groups(const Form& form, int64_t num_inputs) {
  return ceil_div(num_units<E>(num_inputs) * E::kPerUnit, form.group);
}

template <class E>
int64_t quantised_bytes(const Form& form, int64_t num_outputs, int64_t num_inputs) {
  return ceil_div(num_outputs, kLanes) * num_groups<E>(form, num_inputs) * group_bytes(form);
}

// From codes [num_outputs, num_inputs], scales and minimums [num_outputs, groups] to the layout above; what is beyond is 0.
template <class E>
void pack_quantised(Member& member, const Form& form, const int8_t* codes, const void* scales, const void* minimums,
                    int64_t num_outputs, int64_t num_inputs, uint8_t* to) {
  const int64_t given = ceil_div(num_inputs, form.group), groups = num_groups<E>(form, num_inputs);
  const int64_t value_bytes = form.half ? 2 : 4;
  member.share(ceil_div(num_outputs, kLanes), [&](int64_t block) {
    const int64_t first = block * kLanes, outputs = std::min<int64_t>(kLanes, num_outputs - first);
    uint8_t* at = to + block * groups * group_bytes(form);
    memset(at, 0, groups * group_bytes(form));
    for (int64_t group = 0; group < given; ++group) {
      for (const void* from : {scales, minimums}) {
        if (!from) continue;
        for (int64_t o = 0; o < outputs; ++o)
          memcpy(at + o * value_bytes, static_cast<const uint8_t*>(from) + ((first + o) * given + group) * value_bytes,
                 value_bytes);
        at += kLanes * value_bytes;
      }
      for (int vector = 0; vector < form.group; ++vector)
        for (int lane = 0; lane < kLanes; ++lane) {
          const int64_t o = Halves<E>::output(vector, lane), i = group * form.group + Halves<E>::input(vector, lane);
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

// For each vector of a unit those of its lanes' outputs.
template <class E>
void spread(f32x16 values, f32x16* to) {
  if constexpr (Halves<E>::kCount == 1) {
    to[0] = values;
  } else {
    const i32x16 low = {0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7};
    to[0] = __builtin_shuffle(values, low);
    to[1] = __builtin_shuffle(values, low + 8);
  }
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

inline void store_unit(uint32_t* to, const f32x16* x) {
#ifdef __AVX512BF16__
  const __m512bh pairs = _mm512_cvtne2ps_pbh((__m512)x[1], (__m512)x[0]);
  memcpy(to, &pairs, sizeof pairs);
#else
  auto* values = reinterpret_cast<uint16_t*>(to);
  BFloat16::store(values, x[0]);
  BFloat16::store(values + kLanes, x[1]);
#endif
}
inline void store_unit(float* to, const f32x16* x) { Float::store(to, x[0]); }

// `count` groups of one block as the weights of a product: [units][16 outputs].
template <class E, int kBits>
void unpack_groups(const Form& form, const uint8_t* from, int64_t count, typename E::Unit* to) {
  constexpr int kCount = Halves<E>::kCount;
  const f32x16 digits = f32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + float(form.first_code);
  const int64_t values_bytes = kLanes * (form.half ? 2 : 4);
  for (int64_t group = 0; group < count; ++group) {
    f32x16 scales[kCount], minimums[kCount];
    spread<E>(load_values(from, form.half), scales);
    from += values_bytes;
    if (form.minimums) {
      spread<E>(load_values(from, form.half), minimums);
      from += values_bytes;
    } else {
      spread<E>(as_float(splat(0x80000000u)), minimums);  // -0: it leaves zeros of either sign as they are
    }
    for (int vector = 0; vector < form.group; vector += kTogether) {
      f32x16 x[kTogether];
      load_codes<kBits>(from, digits, x);
      for (int i = 0; i < kTogether * kLanes * kBits / 8; i += 64) __builtin_prefetch(from + kAhead + i);
      from += kTogether * kLanes * kBits / 8;
#pragma GCC unroll 8
      for (int k = 0; k < kTogether; ++k) x[k] = x[k] * scales[k % kCount] + minimums[k % kCount];
#pragma GCC unroll 8
      for (int k = 0; k < kTogether; k += kCount, to += kLanes) store_unit(to, x + k);
    }
  }
}

template <class E>
void unpack_groups(const Form& form, const uint8_t* from, int64_t count, typename E::Unit* to) {
  if (form.bits == 4)
    unpack_groups<E, 4>(form, from, count, to);
  else
    unpack_groups<E, 8>(form, from, count, to);
}

// Rows up to which a product goes on with what is unpacked at once, instead of unpacking whole blocks first.
template <class E>
constexpr int kMostRowsAtOnce = 0;

// sums[m][n] = row m times block n, as `multiply` has them, for up to kMostRowsAtOnce rows of a quantised weight.
template <class E>
void multiply_at_once(int num_rows, const typename E::Unit* x, int64_t row_stride, const Form& form, const uint8_t* from,
                      int64_t num_units, int num_blocks, Sums sums);

#ifdef KVRELAY_AMX
template <>
constexpr int kMostRowsAtOnce<BFloat16> = 16;

// A tile of weights at a time, which is multiplied while the next one is unpacked.
template <>
inline void multiply_at_once<BFloat16>(int num_rows, const uint32_t* x, int64_t row_stride, const Form& form,
                                       const uint8_t* from, int64_t num_units, int num_blocks, Sums sums) {
  constexpr int kUnits = Tiles<BFloat16>::kUnits;
  alignas(64) uint32_t tiles[2][kUnits * kLanes];
  Amx::configure(num_rows, 0);
  const int64_t groups = kUnits * BFloat16::kPerUnit / form.group, bytes = groups * group_bytes(form);
  const int64_t num_tiles = num_units / kUnits;
  for (int n = 0; n < num_blocks; ++n) {
    _tile_zero(0);
    for (int64_t tile = 0; tile <= num_tiles; ++tile) {
      if (tile < num_tiles) {
        unpack_groups<BFloat16>(form, from, groups, tiles[tile % 2]);
        from += bytes;
      }
      if (tile) {
        _tile_loadd(4, x + (tile - 1) * kUnits, row_stride * sizeof *x);
        _tile_loadd(6, tiles[(tile - 1) % 2], 64);
        _tile_dpbf16ps(0, 4, 6);
      }
    }
    _tile_stored(0, &sums[0][n], kMostBlocks * sizeof(f32x16));
  }
}
#endif

}  // namespace kvrelay
