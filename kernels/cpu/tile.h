// The multiply-add at the heart of every product: some rows times some blocks of sixteen outputs.
//
//   weights:  [blocks][units of inputs][16 outputs]     a unit: one float, or two bfloat16
//
// One step takes a unit of each row and the sixteen outputs' units. A sum runs over the inputs in their order, whatever rows
// and blocks are computed beside it. That is why a CPU with matrix tiles uses them for a single row too.
#pragma once

#include <algorithm>
#include <array>

#include "vec.h"

namespace kvrelay {

constexpr int kMostBlocks = 8;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Sums of up to E::kTileRows rows and kMostBlocks blocks.
using Sums = f32x16 (*)[kMostBlocks];

// In vector registers: as many sums as there is room for beside the operands.
struct Registers {
#ifdef __AVX512F__
  static constexpr int kTileRows = 12;
  static constexpr int tile_blocks(int rows) { return rows <= 2 ? 8 : rows <= 6 ? 4 : 2; }
#else
  static constexpr int kTileRows = 3;
  static constexpr int tile_blocks(int rows) { return rows == 1 ? 4 : 2; }
#endif
  static void release() {}
};

template <class E, int kM, int kN>
void multiply_in_registers(const typename E::Unit* x, int64_t row_stride, const typename E::Unit* weights,
                           int64_t block_stride, int64_t num_units, Sums sums) {
  f32x16 acc[kM][kN] = {};
  for (int64_t unit = 0; unit < num_units; ++unit) {
    typename E::Units block[kN];
#pragma GCC unroll 8
    for (int n = 0; n < kN; ++n) memcpy(&block[n], weights + n * block_stride + unit * kLanes, sizeof block[n]);
#pragma GCC unroll 12
    for (int m = 0; m < kM; ++m) {
      const typename E::Units row = E::broadcast(x[m * row_stride + unit]);
#pragma GCC unroll 8
      for (int n = 0; n < kN; ++n) acc[m][n] = E::multiply_add(acc[m][n], row, block[n]);
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < kM; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < kN; ++n) sums[m][n] = acc[m][n];
}

template <class E, int kM>
void multiply_blocks(const typename E::Unit* x, int64_t row_stride, const typename E::Unit* weights,
                     int64_t block_stride, int64_t num_units, int num_blocks, Sums sums) {
  constexpr int kN = Registers::tile_blocks(kM);
  int n = 0;
  for (; n + kN <= num_blocks; n += kN)
    multiply_in_registers<E, kM, kN>(x, row_stride, weights + n * block_stride, block_stride, num_units,
                                     reinterpret_cast<Sums>(&sums[0][n]));
  for (; n < num_blocks; ++n)
    multiply_in_registers<E, kM, 1>(x, row_stride, weights + n * block_stride, block_stride, num_units,
                                    reinterpret_cast<Sums>(&sums[0][n]));
}

template <class E, int kM = Registers::kTileRows>
void multiply_rows(int num_rows, const typename E::Unit* x, int64_t row_stride, const typename E::Unit* weights,
                   int64_t block_stride, int64_t num_units, int num_blocks, Sums sums) {
  if constexpr (kM > 0) {
    if (num_rows == kM)
      multiply_blocks<E, kM>(x, row_stride, weights, block_stride, num_units, num_blocks, sums);
    else
      multiply_rows<E, kM - 1>(num_rows, x, row_stride, weights, block_stride, num_units, num_blocks, sums);
  }
}

#ifdef KVRELAY_AMX

// In the matrix tiles of Intel's AMX: 16 rows times 16 units times 16 outputs an instruction.
struct Amx {
  static constexpr int kTileRows = 32;
  static constexpr int tile_blocks(int rows) { return rows <= 16 ? 4 : 2; }

  // Tiles 0 to 3 hold sums, 4 and 5 rows, 6 and 7 weights; of the rows' tiles only what there is of rows.
  static void configure(int first_rows, int second_rows) {
    // With second rows: sums (0 1 / 2 3); without: 0 1 2 3 side by side.
    const int below = second_rows ? second_rows : first_rows;
    load(first_rows * 32 + second_rows, {first_rows, first_rows, below, below, first_rows, below, 16, 16}, {}, 16);
  }

  // For products of a few rows both ways: 0 and 1 hold their sums, 4 the rows, 6 and 7 weights; and where the rows are the
  // weights, so many `columns` in tile 5, 6 and 7 hold what is multiplied with them, 2 and 3 the sums.
  static void configure_both_ways(int rows, int columns) {
    load((rows + 32) * 32 + columns, {rows, rows, 16, 16, rows, 16, 16, 16}, {0, 0, 1, 1, 0, 1, 0, 0}, columns);
  }

  // At a run's end: other code in this thread has its own use for the tiles, torch's products among it.
  static void release() {
    if (configured == kNotConfigured) return;
    configured = kNotConfigured;
    _tile_release();
  }

 private:
  static constexpr int kNotConfigured = -1;
  static inline thread_local int configured = kNotConfigured;

  // Rows of each tile, and which are only `columns` wide. `wanted`: a number for all of that.
  static void load(int wanted, const std::array<int, 8>& rows, const std::array<bool, 8>& narrow, int columns) {
    if (configured == wanted) return;
    configured = wanted;
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 8; ++tile) {
      config.row_bytes[tile] = static_cast<uint16_t>(narrow[tile] ? columns * 4 : 64);
      config.rows[tile] = static_cast<uint8_t>(rows[tile]);
    }
    _tile_loadconfig(&config);
  }
};

template <int kBlocks>
inline void multiply_tiles(const uint32_t* x, int64_t row_stride, const uint32_t* weights, int64_t block_stride,
                           int64_t num_units, Sums sums) {
  constexpr int kSumsStride = kMostBlocks * sizeof(f32x16);
  _tile_zero(0);
  if (kBlocks > 1) _tile_zero(1);
  if (kBlocks > 2) _tile_zero(2);
  if (kBlocks > 3) _tile_zero(3);
  for (int64_t unit = 0; unit < num_units; unit += kLanes) {
    const uint32_t* at = weights + unit * kLanes;
    _tile_loadd(4, x + unit, row_stride * sizeof *x);
    _tile_loadd(6, at, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (kBlocks > 1) {
      _tile_loadd(7, at + block_stride, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (kBlocks > 2) {
      _tile_loadd(6, at + 2 * block_stride, 64);
      _tile_dpbf16ps(2, 4, 6);
    }
    if (kBlocks > 3) {
      _tile_loadd(7, at + 3 * block_stride, 64);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  _tile_stored(0, &sums[0][0], kSumsStride);
  if (kBlocks > 1) _tile_stored(1, &sums[0][1], kSumsStride);
  if (kBlocks > 2) _tile_stored(2, &sums[0][2], kSumsStride);
  if (kBlocks > 3) _tile_stored(3, &sums[0][3], kSumsStride);
}

// The same with two tiles of rows.
template <int kBlocks>
inline void multiply_two_tiles(const uint32_t* x, int64_t row_stride, const uint32_t* weights, int64_t block_stride,
                               int64_t num_units, Sums sums) {
  constexpr int kSumsStride = kMostBlocks * sizeof(f32x16);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t unit = 0; unit < num_units; unit += kLanes) {
    const uint32_t* at = weights + unit * kLanes;
    _tile_loadd(4, x + unit, row_stride * sizeof *x);
    _tile_loadd(5, x + 16 * row_stride + unit, row_stride * sizeof *x);
    _tile_loadd(6, at, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
    if (kBlocks > 1) {
      _tile_loadd(7, at + block_stride, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, &sums[0][0], kSumsStride);
  _tile_stored(2, &sums[16][0], kSumsStride);
  if (kBlocks > 1) {
    _tile_stored(1, &sums[0][1], kSumsStride);
    _tile_stored(3, &sums[16][1], kSumsStride);
  }
}

inline void multiply_amx(int num_rows, const uint32_t* x, int64_t row_stride, const uint32_t* weights,
                         int64_t block_stride, int64_t num_units, int num_blocks, Sums sums) {
  const int first = std::min(num_rows, 16), second = num_rows - first;
  Amx::configure(first, second);
  int n = 0;
  const auto at = [&] { return reinterpret_cast<Sums>(&sums[0][n]); };
  if (second) {
    for (; n + 2 <= num_blocks; n += 2)
      multiply_two_tiles<2>(x, row_stride, weights + n * block_stride, block_stride, num_units, at());
    if (n < num_blocks) multiply_two_tiles<1>(x, row_stride, weights + n * block_stride, block_stride, num_units, at());
    return;
  }
  for (; n + 4 <= num_blocks; n += 4)
    multiply_tiles<4>(x, row_stride, weights + n * block_stride, block_stride, num_units, at());
  for (; n < num_blocks; ++n)
    multiply_tiles<1>(x, row_stride, weights + n * block_stride, block_stride, num_units, at());
}

#endif

// Which of the two an element type has, and how many units of inputs it takes at a time: weights are zero from a row's end
// up to there, and rows must be.
template <class E>
struct Tiles : Registers {
  static constexpr int kUnits = 1;
};
#ifdef KVRELAY_AMX
template <>
struct Tiles<BFloat16> : Amx {
  static constexpr int kUnits = 16;
};
#endif

// Units of a row of so many inputs, with those that are zero.
template <class E>
int64_t num_units(int64_t num_inputs) {
  return ceil_div(ceil_div(num_inputs, E::kPerUnit), Tiles<E>::kUnits) * Tiles<E>::kUnits;
}

// sums[m][n] = row m times block n, for up to kTileRows rows and kMostBlocks blocks. Strides in units.
template <class E>
void multiply(int num_rows, const typename E::Unit* x, int64_t row_stride, const typename E::Unit* weights,
              int64_t block_stride, int64_t num_units, int num_blocks, Sums sums) {
  multiply_rows<E>(num_rows, x, row_stride, weights, block_stride, num_units, num_blocks, sums);
}
#ifdef KVRELAY_AMX
template <>
inline void multiply<BFloat16>(int num_rows, const uint32_t* x, int64_t row_stride, const uint32_t* weights,
                               int64_t block_stride, int64_t num_units, int num_blocks, Sums sums) {
  multiply_amx(num_rows, x, row_stride, weights, block_stride, num_units, num_blocks, sums);
}
#endif

}  // namespace kvrelay
