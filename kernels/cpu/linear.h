// Matrix products with weights packed once: y = x times the weight transposed.
//
//   packed:  [blocks of 16 outputs][units of inputs][16 outputs], or quantised: unpacked to that (quantised.h), or multiplied as it is (integer.h)
#pragma once

#include <algorithm>

#include "integer.h"
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

// Some blocks of a weight, as a task's products take them: as they lie, or unpacked once for all rows.
template <class E>
struct Blocks {
  using Unit = typename E::Unit;

  Blocks(const Weight& weight, int64_t first_block, int num_blocks, int64_t num_rows)
      : num_inputs_(weight.num_inputs), form_(weight.form), num_blocks_(num_blocks), stride_(num_units<E>(num_inputs_) * kLanes) {
    from_ = static_cast<const uint8_t*>(weight.packed);
    if (!form_.bits) {
      from_ += first_block * stride_ * sizeof(Unit);
    } else if constexpr (kInIntegers<E>) {
      from_ += first_block * IntegerLayout(form_, num_inputs_).block_bytes;
      first_code_ = first_integer_code(form_);
      unpacks_ = form_.bits == 4 && num_rows > kIntegerRows;
    } else {
      const int64_t groups = ceil_div(num_inputs_, form_.group);
      from_ += first_block * groups * group_bytes(form_);
      stride_ = groups * form_.group * kLanes;
      unpacks_ = true;
    }
  }

  // Bytes that `unpack` fills.
  int64_t room() const {
    if (!unpacks_) return 0;
    return num_blocks_ * (kInIntegers<E> ? IntegerLayout(widened(), num_inputs_).block_bytes : stride_ * sizeof(Unit));
  }

  void unpack(uint8_t* room) {
    if (!unpacks_) return;
    if constexpr (kInIntegers<E>) {
      widen_codes(form_, num_inputs_, from_, num_blocks_, room);
      form_ = widened();
    } else {
      unpack_groups(form_, from_, num_blocks_ * ceil_div(num_inputs_, form_.group), reinterpret_cast<Unit*>(room));
    }
    from_ = room;
  }

  // `rounded`: the same rows, where any of the product's weights is multiplied in whole numbers.
  void multiply(int num_rows, const Unit* x, int64_t row_stride, const uint32_t* rounded, Sums sums) const {
    if (kInIntegers<E> && form_.bits)
      return multiply_integer(num_rows, {rounded, rounded_words(num_inputs_), num_inputs_, form_, first_code_, from_},
                              num_blocks_, sums);
    kvrelay::multiply<E>(num_rows, x, row_stride, reinterpret_cast<const Unit*>(from_), stride_, num_units<E>(num_inputs_),
                         num_blocks_, sums);
  }

 private:
  Form widened() const {
    Form form = form_;
    form.bits = 8;
    return form;
  }

  int64_t num_inputs_;
  Form form_;
  int num_blocks_;
  int64_t stride_;  // units from one block to the next
  int32_t first_code_ = 0;
  bool unpacks_ = false;
  const uint8_t* from_;
};

// Words that `round_rows` needs.
inline int64_t rounded_room(const Linear& linear, int64_t num_rows, int num_threads) {
  return std::max<int64_t>(num_rows, kFewRounded * num_threads) * rounded_words(linear.weights[0].num_inputs);
}

// The rows of a product in whole numbers, if any of its weights wants them. All threads share `room`.
template <class E>
const uint32_t* round_rows(Member& member, const Linear& linear, int64_t num_rows, uint32_t* room) {
  if constexpr (kInIntegers<E>) {
    const auto wants = [](const Weight& weight) { return weight.form.bits != 0; };
    if (!std::any_of(linear.weights, linear.weights + linear.num_weights, wants)) return nullptr;
    const int64_t num_inputs = linear.weights[0].num_inputs, words = rounded_words(num_inputs);
    const auto* x = static_cast<const uint16_t*>(linear.x);
    if (num_rows > kFewRounded) {
      member.share(num_rows, [&](int64_t row) { round_row(x + row * linear.x_stride, num_inputs, room + row * words); });
      return room;
    }
    room += member.index() * kFewRounded * words;
    for (int64_t row = 0; row < num_rows; ++row) round_row(x + row * linear.x_stride, num_inputs, room + row * words);
    return room;
  }
  return nullptr;
}

// `room`: as many words as `rounded_room` says.
template <class E>
void run_linear(Member& member, const Linear& linear, int64_t num_rows, int num_threads, uint32_t* room) {
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

  const uint32_t* rounded = round_rows<E>(member, linear, num_rows, room);
  const int64_t words = rounded_words(linear.weights[0].num_inputs);
  member.share(row_tasks * all_groups, [&](int64_t task) {
    int64_t group = task % all_groups;
    int w = 0;
    while (group >= groups[w]) group -= groups[w++];
    const int64_t first_block = group * width;
    const int blocks = static_cast<int>(std::min<int64_t>(width, num_blocks[w] - first_block));
    const int64_t end = std::min(num_rows, (task / all_groups + 1) * kRowsPerTask);
    Blocks<E> parts[] = {{linear.weights[w], first_block, blocks, num_rows},
                         {linear.weights[w + num_parts - 1], first_block, blocks, num_rows}};
    const int64_t first_room = parts[0].room(), all_room = first_room + (gates ? parts[1].room() : 0);
    auto* unpacked = static_cast<uint8_t*>(member.scratch().at_least(all_room));
    for (int part = 0; part < num_parts; ++part) parts[part].unpack(unpacked + part * first_room);
    for (int64_t row = task / all_groups * kRowsPerTask; row < end; row += kTileRows) {
      const int rows = static_cast<int>(std::min<int64_t>(kTileRows, end - row));
      const auto* x = reinterpret_cast<const Unit*>(static_cast<const typename E::Value*>(linear.x) + row * linear.x_stride);
      alignas(64) f32x16 sums[2][kTileRows][kMostBlocks];
      for (int part = 0; part < num_parts; ++part)
        parts[part].multiply(rows, x, linear.x_stride / E::kPerUnit, rounded ? rounded + row * words : nullptr, sums[part]);
      for (int m = 0; m < rows; ++m)
        for (int n = 0; n < blocks; ++n)
          finish<E>(linear, w, row + m, (first_block + n) * kLanes, sums[0][m][n], sums[1][m][n]);
    }
  });
}

}  // namespace kvrelay
