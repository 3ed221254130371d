// Operations on rows, each by itself: embedding, norms, rotation, the cache, sums and activations.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "batch.h"
#include "team.h"
#include "vec.h"

namespace kvrelay {

constexpr int64_t kRows = 8;  // a task

template <class Row>
void share_rows(Member& member, int64_t num_rows, const Row& compute) {
  member.share((num_rows + kRows - 1) / kRows, [&](int64_t task) {
    const int64_t end = std::min(num_rows, (task + 1) * kRows);
    for (int64_t row = task * kRows; row < end; ++row) compute(row);
  });
}

// `compute(i, count)` for each vector of a row of `size` elements.
template <class Vector>
void for_vectors(int64_t size, const Vector& compute) {
  for (int64_t i = 0; i < size; i += kLanes) compute(i, static_cast<int>(std::min<int64_t>(kLanes, size - i)));
}

// The rows of a table, times `scale`.
struct Embed {
  const void* table;  // [.., size]
  void* out;          // [T, out_stride]
  int64_t size;
  int64_t out_stride;
  float scale;
};

template <class E>
void run_embed(Member& member, const Embed& embed, const int64_t* ids, int64_t num_rows) {
  using Value = typename E::Value;
  share_rows(member, num_rows, [&](int64_t row) {
    const Value* from = static_cast<const Value*>(embed.table) + ids[row] * embed.size;
    Value* to = static_cast<Value*>(embed.out) + row * embed.out_stride;
    if (embed.scale == 1.f) {
      memcpy(to, from, embed.size * sizeof *to);
      return;
    }
    for_vectors(embed.size,
                [&](int64_t i, int count) { store<E>(to + i, load<E>(from + i, count) * embed.scale, count); });
  });
}

// RMSNorm or LayerNorm of each row's `num_groups` pieces of `size` elements. May be done in place.
struct Norm {
  const void* x;
  void* out;
  const float* weight;  // [size]; null: ones
  const float* bias;    // [size]; null: zeros
  int64_t x_stride;
  int64_t out_stride;
  int64_t num_groups;
  int64_t size;
  int32_t is_layer_norm;
  float eps;
};

template <class E>
void run_norm(Member& member, const Norm& norm, int64_t num_rows) {
  using Value = typename E::Value;
  const int64_t size = norm.size;
  const auto compute = [&](const Value* x, Value* out) {
    float mean = 0.f;
    f32x16 sums = {};
    if (norm.is_layer_norm) {
      for_vectors(size, [&](int64_t i, int count) { sums += load<E>(x + i, count); });
      mean = sum(sums) / size;
      sums = f32x16{};
    }
    for_vectors(size, [&](int64_t i, int count) {
      f32x16 centred = load<E>(x + i, count) - mean;
      if (count < kLanes)
        for (int lane = count; lane < kLanes; ++lane) centred[lane] = 0.f;
      sums += centred * centred;
    });
    const float scale = 1.f / std::sqrt(sum(sums) / size + norm.eps);
    for_vectors(size, [&](int64_t i, int count) {
      f32x16 y = (load<E>(x + i, count) - mean) * scale;
      if (norm.weight) y = y * load<Float>(norm.weight + i, count);
      if (norm.bias) y = y + load<Float>(norm.bias + i, count);
      store<E>(out + i, y, count);
    });
  };
  share_rows(member, num_rows, [&](int64_t row) {
    for (int64_t group = 0; group < norm.num_groups; ++group)
      compute(static_cast<const Value*>(norm.x) + row * norm.x_stride + group * size,
              static_cast<Value*>(norm.out) + row * norm.out_stride + group * size);
  });
}

// Cosines and sines of each row's position, times `magnitude`: the angle in float, its cosine rounded from double.
struct Turns {
  const float* frequencies;  // [num_pairs]
  float* cosines;            // [T, num_pairs]
  float* sines;
  int64_t num_pairs;
  float magnitude;
};

inline void run_turns(Member& member, const Turns& turns, const int64_t* positions, int64_t num_rows) {
  share_rows(member, num_rows, [&](int64_t row) {
    for (int64_t i = 0; i < turns.num_pairs; ++i) {
      const double angle = static_cast<float>(positions[row]) * turns.frequencies[i];
      turns.cosines[row * turns.num_pairs + i] = static_cast<float>(std::cos(angle)) * turns.magnitude;
      turns.sines[row * turns.num_pairs + i] = static_cast<float>(std::sin(angle)) * turns.magnitude;
    }
  });
}

// Turn the pairs (i, i + num_pairs) of each head, in place: of the queries, and of the keys before they are cached.
struct Rotate {
  void* x;  // [T, stride]: heads one after the other
  int64_t stride;
  int64_t num_heads;
  int64_t head_dim;
  int64_t num_pairs;
  const float* cosines;  // [T, num_pairs]
  const float* sines;
};

template <class E>
void rotate_row(const Rotate& rotate, int64_t row) {
  const int64_t num_pairs = rotate.num_pairs;
  for (int64_t head = 0; head < rotate.num_heads; ++head) {
    auto* x = static_cast<typename E::Value*>(rotate.x) + row * rotate.stride + head * rotate.head_dim;
    for_vectors(num_pairs, [&](int64_t i, int count) {
      const f32x16 cosine = load<Float>(rotate.cosines + row * num_pairs + i, count);
      const f32x16 sine = load<Float>(rotate.sines + row * num_pairs + i, count);
      const f32x16 first = load<E>(x + i, count), second = load<E>(x + num_pairs + i, count);
      store<E>(x + i, first * cosine - second * sine, count);
      store<E>(x + num_pairs + i, second * cosine + first * sine, count);
    });
  }
}

// Write each row's keys and values into its slot of one layer.
struct Cache {
  const void* keys;  // [T, stride]: KV heads one after the other
  const void* values;
  int64_t key_stride;
  int64_t value_stride;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t layer;
};

template <class E>
void cache_row(const Cache& cache, const Pool& pool, int64_t slot, int64_t row) {
  using Value = typename E::Value;
  if (slot < 0) return;
  Value* to = slot_of<E>(pool, cache.layer, slot, cache.head_dim);
  const Value* key = static_cast<const Value*>(cache.keys) + row * cache.key_stride;
  const Value* value = static_cast<const Value*>(cache.values) + row * cache.value_stride;
  for (int64_t head = 0; head < cache.num_kv_heads; ++head) {
    memcpy(to + head * pool.head_stride, key + head * cache.head_dim, cache.head_dim * sizeof *to);
    memcpy(to + pool.kv_stride + head * pool.head_stride, value + head * cache.head_dim, cache.head_dim * sizeof *to);
  }
}

// Elementwise, in place or not: out = activation(x) * up, or out += x * scale, or clipped, or capped.
enum PointwiseKind : int32_t { kActivate, kActivateTimes, kAddScaled, kClip, kSoftCap };

struct Pointwise {
  const void* x;
  const void* up;
  void* out;
  int64_t x_stride;
  int64_t up_stride;
  int64_t out_stride;
  int64_t size;
  int32_t kind;
  int32_t activation;
  float scale;  // what is added is scaled by it; the limit, where it is clipped or capped
};

template <class E>
void run_pointwise(Member& member, const Pointwise& op, int64_t num_rows) {
  using Value = typename E::Value;
  const auto activation = static_cast<Activation>(op.activation);
  share_rows(member, num_rows, [&](int64_t row) {
    const Value* from = static_cast<const Value*>(op.x) + row * op.x_stride;
    const Value* up = static_cast<const Value*>(op.up) + row * op.up_stride;
    Value* out = static_cast<Value*>(op.out) + row * op.out_stride;
    for_vectors(op.size, [&](int64_t i, int count) {
      const f32x16 x = load<E>(from + i, count);
      f32x16 y = x;
      switch (op.kind) {
        case kActivate:
          y = activate(activation, x);
          break;
        case kActivateTimes:
          y = activate(activation, x) * load<E>(up + i, count);
          break;
        case kAddScaled:
          y = load<E>(out + i, count) + x * op.scale;
          break;
        case kClip:
          y = x > op.scale ? splat(op.scale) : x < -op.scale ? splat(-op.scale) : x;
          break;
        case kSoftCap:
          y = op.scale * tanh(x / op.scale);
          break;
      }
      store<E>(out + i, y, count);
    });
  });
}

// Each row's largest element, the first place that has it, and whether all are finite. `largest` is that of no NaN.
inline void run_scan(Member& member, const float* x, int64_t num_rows, int64_t size, float* largest, int64_t* place,
                     uint8_t* finite) {
  member.share(num_rows, [&](int64_t row) {
    const float* from = x + row * size;
    constexpr int64_t kPiece = 1024;
    float found = -std::numeric_limits<float>::infinity();
    int64_t piece = 0;  // the first that has it
    i32x16 broken = {};
    for (int64_t start = 0; start < size; start += kPiece) {
      f32x16 most = splat(found);
      for_vectors(std::min(kPiece, size - start), [&](int64_t i, int count) {
        f32x16 values = load<Float>(from + start + i, count);
        const f32x16 magnitude = values < 0.f ? -values : values;
        broken |= ~(magnitude <= std::numeric_limits<float>::max());
        for (int lane = count; lane < kLanes; ++lane) values[lane] = most[lane];
        most = max(values, most);
      });
      const float of_piece = kvrelay::largest(most);
      if (of_piece > found) {
        found = of_piece;
        piece = start;
      }
    }
    int any = 0;
    for (int lane = 0; lane < kLanes; ++lane) any |= broken[lane];
    largest[row] = found;
    place[row] = std::find(from + piece, from + size, found) - from;
    finite[row] = !any;
  });
}

}  // namespace kvrelay
