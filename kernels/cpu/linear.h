// Matrix products with weights packed once: y = x times the weight transposed.
//
//   packed:  [blocks of 16 outputs][units of inputs][16 outputs], or quantised (quantised.h) and unpacked to that
#pragma once

#include <algorithm>

#include "quantised.h"
#include "team.h"
#include "tile.h"

namespace kvrelay {

struct Weight {
  const void* packed;
  int64_t num_inputs;
  int64_t num_outputs;
  Form form;
};

// From [num_outputs, num_inputs] to the layout above; what is beyond either number is zero.
template <class E>
void pack(Member& member, const typename E::Value* from, int64_t num_outputs, int64_t num_inputs,
          typename E::Unit* to) {
  const int64_t units = num_units<E>(num_inputs);
  member.share(ceil_div(num_outputs, kLanes), [&](int64_t block) {
    typename E::Unit* at = to + block * units * kLanes;
    for (int lane = 0; lane < kLanes; ++lane) {
      const int64_t output = block * kLanes + lane;
      const typename E::Value* row = from + output * num_inputs;
      for (int64_t unit = 0; unit < units; ++unit) {
        typename E::Unit value = 0;
        const int64_t count = std::clamp<int64_t>(num_inputs - unit * E::kPerUnit, 0, E::kPerUnit);
        if (output < num_outputs) memcpy(&value, row + unit * E::kPerUnit, count * sizeof *row);
        at[unit * kLanes + lane] = value;
      }
    }
  });
}

// What becomes of the sums of a row.
enum Epilogue : int32_t {
  kStore,       // written, after the activation
  kAdd,         // times `scale`, and added to what is there
  kGate,        // of two weights: activation(first) times second is written
  kStoreFloat,  // written as float, times `scale`, whatever the element type
};

constexpr int kMostWeights = 3;

// Up to three products with the same rows, side by side in the output: their outputs start at `columns`.
struct Linear {
  const void* x;  // [T, x_stride]: zeros from the inputs' end up to num_units
  void* out;      // [T, out_stride]
  int64_t x_stride;
  int64_t out_stride;
  int32_t num_weights;
  int32_t epilogue;
  int32_t activation;
  float scale;
  int64_t columns[kMostWeights];
  Weight weights[kMostWeights];
  const float* biases[kMostWeights];
};

template <class E>
f32x16 with_bias(f32x16 sums, const float* bias, int64_t column, int count) {
  return bias ? sums + load<Float>(bias + column, count) : sums;
}

template <class E>
void finish(const Linear& linear, int weight, int64_t row, int64_t column, f32x16 sums, f32x16 second) {
  const int count = static_cast<int>(std::min<int64_t>(kLanes, linear.weights[weight].num_outputs - column));
  const auto activation = static_cast<Activation>(linear.activation);
  const int64_t place = row * linear.out_stride + linear.columns[weight] + column;
  typename E::Value* out = static_cast<typename E::Value*>(linear.out) + place;
  sums = with_bias<E>(sums, linear.biases[weight], column, count);
  switch (linear.epilogue) {
    case kStore:
      return store<E>(out, activate(activation, sums), count);
    case kAdd:
      return store<E>(out, load<E>(out, count) + sums * linear.scale, count);
    case kGate:
      second = with_bias<E>(second, linear.biases[1], column, count);
      return store<E>(out, activate(activation, sums) * second, count);
    case kStoreFloat:
      return store<Float>(static_cast<float*>(linear.out) + place, sums * linear.scale, count);
  }
}

// Some blocks of a weight, as a task's products take them: as they lie, unpacked once for all rows, or on the way.
template <class E>
struct Blocks {
  using Unit = typename E::Unit;

  Blocks(const Weight& weight, int64_t first_block, int num_blocks, int64_t num_rows)
      : weight_(weight), num_blocks_(num_blocks), units_(num_units<E>(weight.num_inputs)), stride_(units_ * kLanes) {
    if (!weight.form.bits) {
      from_ = static_cast<const Unit*>(weight.packed) + first_block * stride_;
      return;
    }
    const int64_t groups = num_groups<E>(weight.form, weight.num_inputs);
    codes_ = static_cast<const uint8_t*>(weight.packed) + first_block * groups * group_bytes(weight.form);
    if (num_rows <= kMostRowsAtOnce<E>) return;
    num_groups_ = groups * num_blocks;
    stride_ = groups * weight.form.group / E::kPerUnit * kLanes;
  }

  // Elements of the room that `unpack` fills.
  int64_t room() const { return num_groups_ ? num_blocks_ * stride_ : 0; }

  void unpack(Unit* room) {
    if (!num_groups_) return;
    unpack_groups<E>(weight_.form, codes_, num_groups_, room);
    from_ = room;
  }

  void multiply(int num_rows, const Unit* x, int64_t row_stride, Sums sums) const {
    if constexpr (kMostRowsAtOnce<E> > 0) {
      if (!from_)
        return multiply_at_once<E>(num_rows, x, row_stride, weight_.form, codes_, units_, num_blocks_, sums);
    }
    kvrelay::multiply<E>(num_rows, x, row_stride, from_, stride_, units_, num_blocks_, sums);
  }

 private:
  const Weight& weight_;
  int num_blocks_;
  int64_t units_;
  int64_t stride_;          // from one block to the next
  int64_t num_groups_ = 0;  // to unpack
  const uint8_t* codes_ = nullptr;
  const Unit* from_ = nullptr;
};

template <class E>
void run_linear(Member& member, const Linear& linear, int64_t num_rows, int num_threads) {
  constexpr int kTileRows = Tiles<E>::kTileRows, kRowsPerTask = 128 / kTileRows * kTileRows;
  using Unit = typename E::Unit;
  const bool gates = linear.epilogue == kGate;
  const int num_parts = gates ? 2 : 1;
  int64_t num_blocks[kMostWeights], all_blocks = 0;
  for (int w = 0; w < (gates ? 1 : linear.num_weights); ++w)
    all_blocks += num_blocks[w] = ceil_div(linear.weights[w].num_outputs, kLanes);
  // Blocks a task: whole tiles, and tasks enough for the threads to end together.
  const int tile = Tiles<E>::tile_blocks(static_cast<int>(std::min<int64_t>(num_rows, kTileRows)));
  int width = tile;
  while (width > 1 && all_blocks < 8 * width * num_threads) width /= 2;
  const int64_t row_tasks = ceil_div(num_rows, kRowsPerTask);
  int64_t groups[kMostWeights], all_groups = 0;
  for (int w = 0; w < (gates ? 1 : linear.num_weights); ++w) all_groups += groups[w] = ceil_div(num_blocks[w], width);

  member.share(row_tasks * all_groups, [&](int64_t task) {
    int64_t group = task % all_groups;
    int w = 0;
    while (group >= groups[w]) group -= groups[w++];
    const int64_t first_block = group * width;
    const int blocks = static_cast<int>(std::min<int64_t>(width, num_blocks[w] - first_block));
    const int64_t end = std::min(num_rows, (task / all_groups + 1) * kRowsPerTask);
    Blocks<E> parts[] = {{linear.weights[w], first_block, blocks, num_rows},
                         {linear.weights[w + num_parts - 1], first_block, blocks, num_rows}};
    const int64_t first_room = parts[0].room(), room = first_room + (gates ? parts[1].room() : 0);
    auto* unpacked = static_cast<Unit*>(member.scratch().at_least(room * sizeof(Unit)));
    for (int part = 0; part < num_parts; ++part) parts[part].unpack(unpacked + part * first_room);
    for (int64_t row = task / all_groups * kRowsPerTask; row < end; row += kTileRows) {
      const int rows = static_cast<int>(std::min<int64_t>(kTileRows, end - row));
      const auto* x = reinterpret_cast<const Unit*>(static_cast<const typename E::Value*>(linear.x) + row * linear.x_stride);
      alignas(64) f32x16 sums[2][kTileRows][kMostBlocks];
      for (int part = 0; part < num_parts; ++part)
        parts[part].multiply(rows, x, linear.x_stride / E::kPerUnit, sums[part]);
      for (int m = 0; m < rows; ++m)
        for (int n = 0; n < blocks; ++n)
          finish<E>(linear, w, row + m, (first_block + n) * kLanes, sums[0][m][n], sums[1][m][n]);
    }
  });
}

}  // namespace kvrelay
