// Vectors of sixteen floats, and the two element types of weights, activations and caches.
//
// GCC's vector types compile on any CPU: one instruction where registers hold 64 bytes, several where not. Every function
// treats all lanes alike, and a row's tail is computed in a whole vector, so that an element's bits do not depend on
// where in a row, a batch or a thread's share it stands.
#pragma once

#include <cstdint>
#include <cstring>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace kvrelay {

constexpr int kLanes = 16;

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

inline f32x16 splat(float value) { return f32x16{} + value; }
inline u32x16 splat(uint32_t value) { return u32x16{} + value; }
inline f32x16 as_float(u32x16 bits) { return reinterpret_cast<f32x16>(bits); }
inline u32x16 as_bits(f32x16 x) { return reinterpret_cast<u32x16>(x); }
inline f32x16 max(f32x16 a, f32x16 b) { return a > b ? a : b; }
inline f32x16 min(f32x16 a, f32x16 b) { return a < b ? a : b; }

// The lanes' sum and maximum, in one fixed order.
inline float sum(f32x16 x) {
  for (int half = kLanes / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) x[i] += x[i + half];
  return x[0];
}
inline float largest(f32x16 x) {
  float found = x[0];
  for (int i = 1; i < kLanes; ++i) found = x[i] > found ? x[i] : found;
  return found;
}

// What an element type has to say. A "unit" is what one multiply-add step takes of a row: one float, or two bfloat16.
struct Float {
  using Value = float;
  using Unit = float;
  using Units = f32x16;
  static constexpr int kPerUnit = 1;

  static f32x16 load(const Value* from) {
    f32x16 x;
    memcpy(&x, from, sizeof x);
    return x;
  }
  static void store(Value* to, f32x16 x) { memcpy(to, &x, sizeof x); }
  static f32x16 multiply_add(f32x16 sums, Units x, Units weights) { return sums + x * weights; }
  static Units broadcast(Unit x) { return splat(x); }
};

struct BFloat16 {
  using Value = uint16_t;
  using Unit = uint32_t;
  using Units = u32x16;
  static constexpr int kPerUnit = 2;

  static f32x16 load(const Value* from) {
    u16x16 x;
    memcpy(&x, from, sizeof x);
    return as_float(__builtin_convertvector(x, u32x16) << 16);
  }
  // To the nearest, ties to even; a NaN stays one.
  static void store(Value* to, f32x16 x) {
    const u32x16 bits = as_bits(x);
    const u32x16 nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const u16x16 rounded = __builtin_convertvector(x == x ? nearest : (bits >> 16) | 0x40, u16x16);
    memcpy(to, &rounded, sizeof rounded);
  }
  static f32x16 multiply_add(f32x16 sums, Units x, Units weights) {
#ifdef __AVX512BF16__
    return (f32x16)_mm512_dpbf16_ps((__m512)sums, (__m512bh)x, (__m512bh)weights);
#else
    sums += as_float(x << 16) * as_float(weights << 16);
    return sums + as_float(x & 0xffff0000u) * as_float(weights & 0xffff0000u);
#endif
  }
  static Units broadcast(Unit x) { return splat(x); }
};

// The first `count` of a vector's elements, the others zero.
template <class E>
f32x16 load(const typename E::Value* from, int count) {
  if (count >= kLanes) return E::load(from);
  typename E::Value padded[kLanes] = {};
  memcpy(padded, from, count * sizeof *from);
  return E::load(padded);
}

template <class E>
void store(typename E::Value* to, f32x16 x, int count) {
  if (count >= kLanes) return E::store(to, x);
  typename E::Value padded[kLanes];
  E::store(padded, x);
  memcpy(to, padded, count * sizeof *to);
}

// e^x to about one unit in the last place; exactly 0 below -87.3, about 2^128 above 88.7.
inline f32x16 exp(f32x16 x) {
  const f32x16 clamped = min(max(x, splat(-87.3f)), splat(88.7f));
  const i32x16 n = __builtin_convertvector(clamped * 1.44269504f + (clamped > 0.f ? splat(0.5f) : splat(-0.5f)), i32x16);
  const f32x16 turns = __builtin_convertvector(n, f32x16);
  const f32x16 r = (clamped - turns * 0.693359375f) + turns * 2.12194440e-4f;
  f32x16 y = splat(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.f;
  const f32x16 half = as_float((u32x16)((n >> 1) + 127) << 23), rest = as_float((u32x16)(n - (n >> 1) + 127) << 23);
  y = y * half * rest;  // in two steps: 2^128 is no float
  return x < -87.3f ? f32x16{} : (x == x ? y : x);
}

inline f32x16 tanh(f32x16 x) { return 1.f - 2.f / (exp(2.f * x) + 1.f); }

// To 1.5e-7 (Abramowitz and Stegun, 7.1.26).
inline f32x16 erf(f32x16 x) {
  const f32x16 size = x < 0.f ? -x : x;
  const f32x16 t = 1.f / (1.f + 0.3275911f * size);
  f32x16 y = splat(1.061405429f);
  y = y * t - 1.453152027f;
  y = y * t + 1.421413741f;
  y = y * t - 0.284496736f;
  y = y * t + 0.254829592f;
  y = 1.f - y * t * exp(-size * size);
  return x < 0.f ? -y : y;
}

enum Activation : int32_t { kNone, kSilu, kGelu, kGeluTanh, kRelu2 };

inline f32x16 activate(Activation activation, f32x16 x) {
  switch (activation) {
    case kSilu:
      return x < -88.7f ? f32x16{} : x / (1.f + exp(-x));  // exp is finite: -3e38 must not come out as -1
    case kGelu:
      return 0.5f * x * (1.f + erf(x * 0.70710678f));
    case kGeluTanh:
      return 0.5f * x * (1.f + tanh(0.79788456f * (x + 0.044715f * (x * x * x))));
    case kRelu2: {
      const f32x16 positive = x < 0.f ? f32x16{} : x;  // a NaN stays one
      return positive * positive;
    }
    case kNone:
      break;
  }
  return x;
}

}  // namespace kvrelay
