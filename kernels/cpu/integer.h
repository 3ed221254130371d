// Products of bfloat16 rows with quantised weights, in whole numbers: exact within a group, whatever the CPU.
//
//   a row:     32 inputs share a power of two, by which they are rounded to whole numbers of 14 bits and a sign; those of
//              bfloat16 that are within 2^-6 of the largest lose nothing
//   a product: for each group of a weight's inputs S = sum of code * number and X = sum of numbers are exact, and
//              sum += scale * (S * 2^k) + minimum * (X * 2^k), in float, each operation rounded, in the groups' order
//
//   packed:    [blocks of 16 outputs] { codes [groups of inputs], { scales [16], minimums [16] or none } [groups] }
//
// Codes count from 0 and lie as vectors of 64 bytes: four inputs of each of sixteen outputs, which is what `vpdpbusd` takes.
// Of 4-bit codes a vector has in its lower digits the first half of the group's inputs, in its higher ones the second.
// A number is two signed bytes there, high * 256 + low. Where the CPU has no such instruction, it is one of 16 bits.
#pragma once

#include <algorithm>
#include <type_traits>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "quantised.h"
#include "vec.h"

namespace kvrelay {

constexpr int kShared = 32;       // inputs of a row that share a power of two
constexpr int kNumberBits = 14;   // of the largest of them, with its sign 15
constexpr int kSmallest = 27;     // exponent, as a float stores it, below which groups are rounded alike
constexpr int kEach = 4;          // inputs a step
constexpr int kSteps = kShared / kEach;
constexpr int kFewRounded = 8;    // rows that every thread rounds for itself, rather than wait for others

// Words of 32 bits of a rounded row: of each kShared inputs kSteps of one kind and kSteps of the other, then the powers of
// two, then the sums of 16 numbers each.
inline int64_t rounded_words(int64_t num_inputs) { return ceil_div(num_inputs, kShared) * (2 * kSteps + 1 + 2); }

inline int32_t sum(i32x16 x) {
#ifdef __AVX512F__
  return _mm512_reduce_add_epi32((__m512i)x);
#else
  int32_t total = 0;
  for (int i = 0; i < kLanes; ++i) total += x[i];
  return total;
#endif
}

// Sixteen numbers as four words of each kind.
inline void store_steps(i32x16 numbers, uint32_t* to) {
#ifdef __AVX512VNNI__
  const i32x16 high = (numbers + 128) >> 8, low = numbers - (high << 8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)high));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to + kSteps), _mm512_cvtepi32_epi8((__m512i)low));
#else
  for (int step = 0; step < kLanes / kEach; ++step) {
    const auto pair = [&](int first) {
      return static_cast<uint32_t>(static_cast<uint16_t>(numbers[kEach * step + first])) |
             static_cast<uint32_t>(numbers[kEach * step + first + 2]) << 16;
    };
    to[step] = pair(0);
    to[kSteps + step] = pair(1);
  }
#endif
}

inline void round_row(const uint16_t* x, int64_t num_inputs, uint32_t* to) {
  const int64_t count = ceil_div(num_inputs, kShared);
  float* powers = reinterpret_cast<float*>(to + count * 2 * kSteps);
  int32_t* sums = reinterpret_cast<int32_t*>(powers + count);
  for (int64_t group = 0; group < count; ++group) {
    const int64_t left = num_inputs - group * kShared;
    const f32x16 halves[2] = {
        load<BFloat16>(x + group * kShared, static_cast<int>(std::min<int64_t>(left, kLanes))),
        left > kLanes ? load<BFloat16>(x + group * kShared + kLanes, static_cast<int>(std::min<int64_t>(left - kLanes, kLanes)))
                      : f32x16{}};
    // The order of sizes is that of their bits.
    const u32x16 sizes[2] = {as_bits(halves[0]) & 0x7fffffffu, as_bits(halves[1]) & 0x7fffffffu};
    const u32x16 larger = sizes[0] > sizes[1] ? sizes[0] : sizes[1];
#ifdef __AVX512F__
    const uint32_t most = _mm512_reduce_max_epu32((__m512i)larger);
#else
    uint32_t most = 0;
    for (int i = 0; i < kLanes; ++i) most = std::max<uint32_t>(most, larger[i]);
#endif
    const uint32_t exponent = std::max<uint32_t>(most >> 23, kSmallest);
    const bool finite = exponent < 255;
    const uint32_t up_bits = (2 * 127 + kNumberBits - 1 - exponent) << 23, down_bits = (exponent + 1 - kNumberBits) << 23;
    float up;
    memcpy(&up, &up_bits, sizeof up);
    const uint32_t power = finite ? down_bits : 0x7fc00000u;  // a NaN is what all of its outputs become
    memcpy(powers + group, &power, sizeof power);
    for (int half = 0; half < 2; ++half) {
      constexpr float kWhole = 0x1.8p23f;  // added to a small number it leaves no digits behind the point
      const i32x16 whole = (i32x16)(as_bits(halves[half] * up + kWhole) - as_bits(splat(kWhole)));
      const i32x16 numbers = finite ? whole : i32x16{};
      sums[2 * group + half] = sum(numbers);
      store_steps(numbers, to + group * 2 * kSteps + half * kSteps / 2);
    }
  }
}

inline int first_integer_code(const Form& form) { return form.bits == 8 ? -128 : form.first_code; }

// Where the parts of a packed weight lie. Codes begin at whole cache lines.
struct IntegerLayout {
  IntegerLayout(const Form& form, int64_t num_inputs)
      : groups(ceil_div(num_inputs, form.group)),
        code_bytes(kLanes * form.group * form.bits / 8),
        minimums_place(kLanes * (form.half ? 2 : 4)),
        value_bytes(minimums_place * (1 + form.minimums)),
        block_bytes(groups * code_bytes + ceil_div(groups * value_bytes, 64) * 64) {}

  int64_t groups;
  int64_t code_bytes;      // of a group
  int64_t minimums_place;  // after its scales
  int64_t value_bytes;     // of a group
  int64_t block_bytes;
};

inline int64_t integer_bytes(const Form& form, int64_t num_outputs, int64_t num_inputs) {
  return ceil_div(num_outputs, kLanes) * IntegerLayout(form, num_inputs).block_bytes;
}

// From codes [num_outputs, num_inputs], scales and minimums [num_outputs, groups] to the layout above. What is beyond has
// scales of 0, or is multiplied with numbers that are.
inline void pack_integer(Member& member, const Form& form, const int8_t* codes, const void* scales, const void* minimums,
                         int64_t num_outputs, int64_t num_inputs, uint8_t* to) {
  const IntegerLayout layout(form, num_inputs);
  const int first_code = first_integer_code(form), together = form.group / 2, value_bytes = form.half ? 2 : 4;
  member.share(ceil_div(num_outputs, kLanes), [&](int64_t block) {
    const int64_t first = block * kLanes, outputs = std::min<int64_t>(kLanes, num_outputs - first);
    uint8_t* at = to + block * layout.block_bytes;
    memset(at, 0, layout.block_bytes);
    for (int64_t group = 0; group < layout.groups; ++group, at += layout.code_bytes) {
      const int64_t inputs = std::min<int64_t>(form.group, num_inputs - group * form.group);
      for (int64_t o = 0; o < outputs; ++o)
        for (int64_t i = 0; i < inputs; ++i) {
          const int code = codes[(first + o) * num_inputs + group * form.group + i] - first_code;
          const int64_t in_half = form.bits == 8 ? i : i % together;
          uint8_t& byte = at[in_half / kEach * kLanes * kEach + o * kEach + in_half % kEach];
          byte = static_cast<uint8_t>(byte | code << (form.bits == 4 && i >= together ? 4 : 0));
        }
    }
    for (int64_t group = 0; group < layout.groups; ++group, at += layout.value_bytes)
      for (int64_t o = 0; o < outputs; ++o) {
        const int64_t from = ((first + o) * layout.groups + group) * value_bytes;
        memcpy(at + o * value_bytes, static_cast<const uint8_t*>(scales) + from, value_bytes);
        if (minimums)
          memcpy(at + layout.minimums_place + o * value_bytes, static_cast<const uint8_t*>(minimums) + from, value_bytes);
      }
  });
}

// Blocks whose 4-bit codes are made to bytes, which is worth it for more than kIntegerRows rows.
inline void widen_codes(const Form& form, int64_t num_inputs, const uint8_t* from, int num_blocks, uint8_t* to) {
  const IntegerLayout layout(form, num_inputs);
  const int64_t value_bytes = layout.block_bytes - layout.groups * layout.code_bytes;
  for (int block = 0; block < num_blocks; ++block) {
    for (int64_t group = 0; group < layout.groups; ++group) {
      for (int64_t end = layout.code_bytes; end > 0; end -= 64, from += 64, to += 64) {
        u32x16 codes;
        memcpy(&codes, from, sizeof codes);
        const u32x16 lower = codes & 0x0f0f0f0fu, higher = codes >> 4 & 0x0f0f0f0fu;
        memcpy(to, &lower, sizeof lower);
        memcpy(to + layout.code_bytes, &higher, sizeof higher);
      }
      to += layout.code_bytes;
    }
    memcpy(to, from, value_bytes);
    from += value_bytes;
    to += value_bytes;
  }
}

// Rounds to a float here: what follows must not become one operation with what was before.
inline f32x16 rounded(f32x16 x) {
#ifdef __AVX512F__
  asm("" : "+v"(x));
#else
  asm("" : "+m"(x));
#endif
  return x;
}

// Sums of codes times a step of a row's numbers.
#ifdef __AVX512VNNI__
struct IntegerSums {
  i32x16 high, low;

  static IntegerSums from(int32_t first) { return {i32x16{}, i32x16{} + first}; }
  void add(u32x16 codes, const uint32_t* step) {
    high = (i32x16)_mm512_dpbusd_epi32((__m512i)high, (__m512i)codes, _mm512_set1_epi32(step[0]));
    low = (i32x16)_mm512_dpbusd_epi32((__m512i)low, (__m512i)codes, _mm512_set1_epi32(step[kSteps]));
  }
  i32x16 total() const { return (high << 8) + low; }
};
#else
struct IntegerSums {
  i32x16 sums;

  static IntegerSums from(int32_t first) { return {i32x16{} + first}; }
  void add(u32x16 codes, const uint32_t* step) {
    add_pairs(codes & 0x00ff00ffu, step[0]);
    add_pairs(codes >> 8 & 0x00ff00ffu, step[kSteps]);
  }
  i32x16 total() const { return sums; }

 private:
  void add_pairs(u32x16 pairs, uint32_t numbers) {
#if defined(__AVX512BW__)
    sums += (i32x16)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi32(numbers));
#elif defined(__AVX2__)
    typedef int32_t i32x8 __attribute__((vector_size(32)));
    i32x8 halves[2];
    __m256i codes[2];
    memcpy(codes, &pairs, sizeof codes);
    for (int i = 0; i < 2; ++i) halves[i] = (i32x8)_mm256_madd_epi16(codes[i], _mm256_set1_epi32(numbers));
    i32x16 products;
    memcpy(&products, halves, sizeof products);
    sums += products;
#elif defined(__SSE2__)
    __m128i quarters[4];
    memcpy(quarters, &pairs, sizeof quarters);
    for (__m128i& quarter : quarters) quarter = _mm_madd_epi16(quarter, _mm_set1_epi32(numbers));
    i32x16 products;
    memcpy(&products, quarters, sizeof products);
    sums += products;
#else
    sums += (i32x16)(pairs & 0xffff) * static_cast<int16_t>(numbers);
    sums += (i32x16)(pairs >> 16) * static_cast<int16_t>(numbers >> 16);
#endif
  }
};
#endif

#ifdef __AVX512F__
constexpr int kIntegerRows = 6, kIntegerBlocks = 2;
#else
constexpr int kIntegerRows = 3, kIntegerBlocks = 1;
#endif

// What a product of whole numbers is told.
struct IntegerProduct {
  const uint32_t* rows;  // as `round_row` has them, words apart
  int64_t words;
  int64_t num_inputs;
  Form form;
  int32_t first_code;  // what a stored 0 stands for
  const uint8_t* blocks;
};

template <int kBits, int kGroup, int kM, int kN>
void multiply_integers(const IntegerProduct& product, Sums sums) {
  constexpr int kGroupSteps = kGroup / kEach, kVectors = kGroupSteps * kBits / 8;
  const Form& form = product.form;
  const IntegerLayout layout(form, product.num_inputs);
  const int64_t shared = ceil_div(product.num_inputs, kShared), powers = shared * 2 * kSteps, totals = powers + shared;
  for (int m = 0; m < kM; ++m)
    for (int n = 0; n < kN; ++n) sums[m][n] = f32x16{};
  const uint8_t* group_codes = product.blocks;
  const uint8_t* group_values = product.blocks + layout.groups * layout.code_bytes;
  for (int64_t group = 0; group < layout.groups; ++group) {
    const int64_t share = group * kGroup / kShared;
    const uint32_t* steps = product.rows + share * 2 * kSteps + (kGroup == kShared ? 0 : group % 2 * kGroupSteps);
    int32_t row_totals[kM];
    IntegerSums found[kM][kN];
#pragma GCC unroll 6
    for (int m = 0; m < kM; ++m) {
      const auto* of_row = reinterpret_cast<const int32_t*>(product.rows + m * product.words + totals);
      row_totals[m] = kGroup == kShared ? of_row[2 * group] + of_row[2 * group + 1] : of_row[group];
#pragma GCC unroll 2
      for (int n = 0; n < kN; ++n) found[m][n] = IntegerSums::from(product.first_code * row_totals[m]);
    }
    const auto add = [&](const u32x16* codes, int step) __attribute__((always_inline)) {
#pragma GCC unroll 6
      for (int m = 0; m < kM; ++m)
#pragma GCC unroll 2
        for (int n = 0; n < kN; ++n) found[m][n].add(codes[n], steps + m * product.words + step);
    };
#pragma GCC unroll 8
    for (int vector = 0; vector < kVectors; ++vector) {
      u32x16 codes[kN];
#pragma GCC unroll 2
      for (int n = 0; n < kN; ++n) {
        const uint8_t* at = group_codes + n * layout.block_bytes + vector * 64;
        memcpy(&codes[n], at, sizeof codes[n]);
        if (kM == 1) __builtin_prefetch(at + kAhead);
      }
      if constexpr (kBits == 8) {
        add(codes, vector);
      } else {
        u32x16 digits[kN];
        for (int n = 0; n < kN; ++n) digits[n] = codes[n] & 0x0f0f0f0fu;
        add(digits, vector);
        for (int n = 0; n < kN; ++n) digits[n] = codes[n] >> 4 & 0x0f0f0f0fu;
        add(digits, kVectors + vector);
      }
    }
#pragma GCC unroll 2
    for (int n = 0; n < kN; ++n) {
      const uint8_t* at = group_values + n * layout.block_bytes;
      if (kM == 1) __builtin_prefetch(at + kAhead);
      const f32x16 scales = load_values(at, form.half);
      const f32x16 minimums = form.minimums ? load_values(at + layout.minimums_place, form.half) : f32x16{};
#pragma GCC unroll 6
      for (int m = 0; m < kM; ++m) {
        float power;
        memcpy(&power, product.rows + m * product.words + powers + share, sizeof power);
        f32x16 part = rounded(scales * (__builtin_convertvector(found[m][n].total(), f32x16) * power));
        if (form.minimums) part += rounded(minimums * (static_cast<float>(row_totals[m]) * power));
        sums[m][n] += part;
      }
    }
    group_codes += layout.code_bytes;
    group_values += layout.value_bytes;
  }
}

template <int kM>
void multiply_integer_blocks(IntegerProduct product, int num_blocks, Sums sums) {
  int n = 0;
  const auto next = [&](auto count) {
    constexpr int kN = decltype(count)::value;
    const bool narrow = product.form.group == 16;
    const Sums at = reinterpret_cast<Sums>(&sums[0][n]);
    if (product.form.bits == 4)
      narrow ? multiply_integers<4, 16, kM, kN>(product, at) : multiply_integers<4, 32, kM, kN>(product, at);
    else
      narrow ? multiply_integers<8, 16, kM, kN>(product, at) : multiply_integers<8, 32, kM, kN>(product, at);
    product.blocks += kN * IntegerLayout(product.form, product.num_inputs).block_bytes;
    n += kN;
  };
  while (n + kIntegerBlocks <= num_blocks) next(std::integral_constant<int, kIntegerBlocks>());
  while (n < num_blocks) next(std::integral_constant<int, 1>());
}

template <int kM = kIntegerRows>
void multiply_integer_rows(int num_rows, const IntegerProduct& product, int num_blocks, Sums sums) {
  if constexpr (kM > 0) {
    if (num_rows == kM)
      multiply_integer_blocks<kM>(product, num_blocks, sums);
    else
      multiply_integer_rows<kM - 1>(num_rows, product, num_blocks, sums);
  }
}

// sums[m][n] = row m times block n, for any number of rows.
inline void multiply_integer(int num_rows, IntegerProduct product, int num_blocks, Sums sums) {
  for (int done = 0; done < num_rows; done += kIntegerRows) {
    multiply_integer_rows(std::min(kIntegerRows, num_rows - done), product, num_blocks, sums + done);
    product.rows += kIntegerRows * product.words;
  }
}

}  // namespace kvrelay
