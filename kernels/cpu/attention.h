// Causal attention over paged keys and values, in splits of 256 keys cut at absolute positions.
//
//   a task: the queries of one KV head's heads, of up to kTaskRows rows, over one split after the other
//   few rows over many splits: a task a split, whose results the last one to end merges in the splits' order
//
// Of each split a row has its largest score, the sum of its weights and the weighted values; they are merged in order:
// so a row's bits depend on its own sequence up to it alone, wherever it is computed. A key that a row does not see weighs
// an exact zero.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "batch.h"
#include "team.h"
#include "tile.h"

namespace kvrelay {

constexpr int64_t kSplit = 256;
constexpr int64_t kTaskRows = 96;     // of one KV head: queries times the heads that share it
constexpr int64_t kFewRows = 16;      // may be cut by splits
constexpr float kNothing = -std::numeric_limits<float>::infinity();

struct Attention {
  const void* queries;  // [T, query_stride]: heads one after the other
  void* out;            // [T, out_stride]
  int64_t query_stride;
  int64_t out_stride;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t layer;
  int64_t window;  // a row sees itself and the window - 1 tokens before it; 0: all
  float scale;
  float softcap;  // 0: none
};

// Some of a sequence's queries, over all splits that they see, or over one of them.
struct Piece {
  int64_t sequence;
  int64_t first_row;
  int64_t num_queries;
  int64_t first_position;
  int64_t first_split;
  int64_t num_splits;
  int64_t group;  // pieces whose results are merged; -1: it is all there is
};

// How a batch is cut: the same for every layer, in the order of falling cost, so that the last to end are short.
struct Cut {
  std::vector<Piece> pieces;
  std::vector<int64_t> group_sizes;
  int64_t most_rows = 0;
};

inline void cut_batch(const Batch& batch, int64_t heads_a_group, Cut& cut) {
  cut.pieces.clear();
  cut.group_sizes.clear();
  const int64_t most_queries = std::max<int64_t>(1, kTaskRows / heads_a_group);
  for (int64_t s = 0; s < batch.num_sequences; ++s) {
    const int64_t end = batch.query_starts[s + 1];
    for (int64_t row = batch.query_starts[s]; row < end; row += most_queries) {
      Piece piece{s, row, std::min(most_queries, end - row), batch.seq_lens[s] - (end - row), 0, 0, -1};
      piece.num_splits = ceil_div(piece.first_position + piece.num_queries, kSplit);
      if (piece.num_splits == 1 || piece.num_queries * heads_a_group > kFewRows) {
        cut.pieces.push_back(piece);
        continue;
      }
      piece.group = static_cast<int64_t>(cut.group_sizes.size());
      cut.group_sizes.push_back(piece.num_splits);
      const int64_t num_splits = piece.num_splits;
      piece.num_splits = 1;
      for (; piece.first_split < num_splits; ++piece.first_split) cut.pieces.push_back(piece);
    }
  }
  std::stable_sort(cut.pieces.begin(), cut.pieces.end(), [](const Piece& a, const Piece& b) {
    return a.num_queries * a.num_splits > b.num_queries * b.num_splits;
  });
}

// What a row has of some splits: the largest score, the sum of e^(score - largest), and the values weighted so.
struct Partial {
  float largest;
  float total;
};

// Merge what comes after into what came before. Not inlined: the same instructions wherever it is called.
__attribute__((noinline)) inline void merge(Partial& before, float* before_values, const Partial& after, const float* after_values, int64_t size) {
  if (after.largest == kNothing) return;
  const float largest = std::max(before.largest, after.largest);
  const float keep = before.largest == kNothing ? 0.f : exp(splat(before.largest - largest))[0];
  const float take = exp(splat(after.largest - largest))[0];
  before.largest = largest;
  before.total = before.total * keep + after.total * take;
  for (int64_t i = 0; i < size; i += kLanes)
    Float::store(before_values + i, Float::load(before_values + i) * keep + Float::load(after_values + i) * take);
}

// Results of pieces that are merged by the last of their group to end.
class Partials {
 public:
  // For so many pieces and groups, of `num_kv_heads` times `rows` rows each.
  void prepare(const Cut& cut, int64_t num_kv_heads, int64_t padded_dim) {
    rows_ = kFewRows;
    padded_dim_ = padded_dim;
    first_.clear();
    int64_t num_partials = 0;
    for (int64_t size : cut.group_sizes) {
      first_.push_back(num_partials);
      num_partials += size;
    }
    partials_.resize(num_partials * num_kv_heads * rows_);
    values_.resize(num_partials * num_kv_heads * rows_ * padded_dim);
    if (counts_.size() < cut.group_sizes.size() * num_kv_heads)
      counts_ = std::vector<std::atomic<int64_t>>(cut.group_sizes.size() * num_kv_heads);
    num_kv_heads_ = num_kv_heads;
  }

  Partial* partials(int64_t group, int64_t split, int64_t kv_head) { return &partials_[at(group, split, kv_head)]; }
  float* values(int64_t group, int64_t split, int64_t kv_head) {
    return &values_[at(group, split, kv_head) * padded_dim_];
  }

  // Count one that has ended. Returns: whether it was the last of `num_splits`; the count is then ready for the next.
  bool is_last(int64_t group, int64_t kv_head, int64_t num_splits) {
    std::atomic<int64_t>& count = counts_[group * num_kv_heads_ + kv_head];
    if (count.fetch_add(1, std::memory_order_acq_rel) + 1 < num_splits) return false;
    count.store(0, std::memory_order_relaxed);
    return true;
  }

 private:
  int64_t at(int64_t group, int64_t split, int64_t kv_head) const {
    return ((first_[group] + split) * num_kv_heads_ + kv_head) * rows_;
  }

  int64_t rows_ = 0, padded_dim_ = 0, num_kv_heads_ = 0;
  std::vector<int64_t> first_;
  std::vector<Partial> partials_;
  std::vector<float> values_;
  std::vector<std::atomic<int64_t>> counts_;
};

// A thread's room for one piece.
template <class E>
struct Room {
  using Unit = typename E::Unit;
  int64_t dim_units, padded_dim, key_units, rows;
  Unit* queries;   // [rows, dim_units]
  Unit* columns;   // [dim_units, 16]: the first sixteen as the weights of a product
  Unit* keys;      // [kSplit / 16 blocks, dim_units, 16]
  Unit* values;    // [padded_dim / 16 blocks, key_units, 16]
  float* scores;   // [rows, kSplit]
  Unit* weights;   // [rows, key_units]
  float* sums;     // [rows, padded_dim]: of the split at hand
  float* totals;   // [rows, padded_dim]: of all so far
  Partial* split;  // [rows]
  Partial* all;    // [rows]

  Room(Scratch& scratch, int64_t head_dim, int64_t most_rows)
      : dim_units(num_units<E>(head_dim)),
        padded_dim(ceil_div(head_dim, kLanes) * kLanes),
        key_units(num_units<E>(kSplit)),
        rows(most_rows) {
    const int64_t sizes[] = {rows * dim_units * 4,  dim_units * kLanes * 4, kSplit * dim_units * 4,
                             padded_dim * key_units * 4, rows * kSplit * 4, rows * key_units * 4,
                             rows * padded_dim * 4, rows * padded_dim * 4,
                             rows * int64_t(sizeof(Partial)), rows * int64_t(sizeof(Partial))};
    int64_t total = 0;
    for (int64_t size : sizes) total += ceil_div(size, 64) * 64;
    char* at = static_cast<char*>(scratch.at_least(total));
    void** pointers[] = {(void**)&queries, (void**)&columns, (void**)&keys,   (void**)&values, (void**)&scores,
                         (void**)&weights, (void**)&sums,    (void**)&totals, (void**)&split,  (void**)&all};
    for (size_t i = 0; i < std::size(sizes); ++i) {
      *pointers[i] = at;
      at += ceil_div(sizes[i], 64) * 64;
    }
  }
};

// Sixteen rows of sixteen units, transposed in place.
template <class Vector>
inline void transpose(Vector (&x)[kLanes]) {
  Vector y[kLanes];
#define KVRELAY_PAIRS(source, target, distance, low, high)                       \
  _Pragma("GCC unroll 16") for (int i = 0; i < kLanes; ++i) if (!(i & distance)) { \
    target[i] = __builtin_shuffle(source[i], source[i + distance], low);          \
    target[i + distance] = __builtin_shuffle(source[i], source[i + distance], high); \
  }
  const i32x16 low1 = {0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30};
  const i32x16 low2 = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
  const i32x16 low4 = {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27};
  const i32x16 low8 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
  KVRELAY_PAIRS(x, y, 1, low1, low1 + 1)
  KVRELAY_PAIRS(y, x, 2, low2, low2 + 2)
  KVRELAY_PAIRS(x, y, 4, low4, low4 + 4)
  KVRELAY_PAIRS(y, x, 8, low8, low8 + 8)
#undef KVRELAY_PAIRS
}

// Where the keys of one KV head lie that a split has of a sequence; each one's value lies `kv_stride` further.
template <class E>
struct Keys {
  const typename E::Value* at[kSplit];
  int64_t count, head_dim, kv_stride;

  // Of positions [start, end).
  Keys(const Attention& op, const Batch& batch, int64_t sequence, int64_t kv_head, int64_t start, int64_t end)
      : count(end - start), head_dim(op.head_dim), kv_stride(batch.pool.kv_stride) {
    const Pool& pool = batch.pool;
    const int64_t* table = batch.block_tables + sequence * batch.table_width;
    int64_t entry = start / pool.block_size, offset = start % pool.block_size;
    for (int64_t i = 0; i < count; ++entry, offset = 0) {
      const typename E::Value* slot =
          slot_of<E>(pool, op.layer, table[entry] * pool.block_size + offset, head_dim) + kv_head * pool.head_stride;
      for (; offset < pool.block_size && i < count; ++offset, slot += head_dim) at[i++] = slot;
    }
  }
};

// The same where blocks are of whole sixteens of slots: where each sixteen keys begin.
template <class E>
struct Runs {
  const typename E::Value* at[kSplit / kLanes];
  int64_t count = 0;  // of runs: the last one may not be full
  int64_t kv_stride = 0;

  Runs() = default;
  Runs(const Attention& op, const Batch& batch, int64_t sequence, int64_t kv_head, int64_t start, int64_t num_keys)
      : count(ceil_div(num_keys, kLanes)), kv_stride(batch.pool.kv_stride) {
    const Pool& pool = batch.pool;
    const int64_t* table = batch.block_tables + sequence * batch.table_width;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t key = start + i * kLanes, slot = table[key / pool.block_size] * pool.block_size + key % pool.block_size;
      at[i] = slot_of<E>(pool, op.layer, slot, op.head_dim) + kv_head * pool.head_stride;
    }
  }
};

// What a thread will read after the split at hand, if anything: it asks for that while it computes.
template <class E>
struct Ahead {
  Runs<E> runs;
  int64_t row_bytes = 0;

  void ask_for_keys(int64_t run) const {
    if (run < runs.count) ask(runs.at[run], 0, row_bytes);
  }
  // Of some of the dimensions.
  void ask_for_values(int64_t run, int64_t first_byte, int64_t num_bytes) const {
    if (run < runs.count) ask(runs.at[run] + runs.kv_stride, first_byte, std::min(num_bytes, row_bytes - first_byte));
  }

 private:
  void ask(const typename E::Value* keys, int64_t first_byte, int64_t num_bytes) const {
    const char* from = reinterpret_cast<const char*>(keys) + first_byte;
    for (int64_t key = 0; key < kLanes; ++key, from += row_bytes)
      for (int64_t byte = 0; byte < num_bytes; byte += 64) __builtin_prefetch(from + byte, 0, 2);
  }
};

// A split's keys as the weights of a product; what is beyond the end is zero.
template <class E>
void pack_keys(const Keys<E>& keys, const Ahead<E>& ahead, Room<E>& room) {
  typedef typename E::Unit Vector __attribute__((vector_size(64)));
  for (int64_t block = 0; block < keys.count; block += kLanes) {
    ahead.ask_for_keys(block / kLanes);
    for (int64_t unit = 0; unit < room.dim_units; unit += kLanes) {
      const int64_t left = (keys.head_dim - unit * E::kPerUnit) * sizeof(typename E::Value);
      const size_t num_bytes = std::clamp<int64_t>(left, 0, sizeof(Vector));
      Vector rows[kLanes];
      if (block + kLanes <= keys.count && num_bytes == sizeof(Vector)) {
        for (int64_t i = 0; i < kLanes; ++i)
          memcpy(&rows[i], keys.at[block + i] + unit * E::kPerUnit, sizeof rows[i]);
      } else {
        memset(rows, 0, sizeof rows);
        for (int64_t i = 0; i < std::min<int64_t>(kLanes, keys.count - block); ++i)
          memcpy(&rows[i], keys.at[block + i] + unit * E::kPerUnit, num_bytes);
      }
      transpose(rows);
      const int64_t num = std::min<int64_t>(kLanes, room.dim_units - unit);
      memcpy(room.keys + (block / kLanes * room.dim_units + unit) * kLanes, rows, num * sizeof rows[0]);
    }
  }
}

// Its values as the weights of a product over `units` units of keys.
template <class E>
void pack_values(const Keys<E>& keys, int64_t units, const Ahead<E>& ahead, Room<E>& room) {
  using Unit = typename E::Unit;
  for (int64_t unit = 0; unit < units; ++unit) {
    if (const int64_t key = unit * E::kPerUnit; key % kLanes == 0)
      ahead.ask_for_values(key / kLanes, 0, ahead.row_bytes);
    const typename E::Value* from[E::kPerUnit];
    for (int i = 0; i < E::kPerUnit; ++i) {
      const int64_t key = unit * E::kPerUnit + i;
      from[i] = key < keys.count ? keys.at[key] + keys.kv_stride : nullptr;
    }
    int64_t d = 0;
    const auto place = [&] { return room.values + (d / kLanes * units + unit) * kLanes; };
    if constexpr (E::kPerUnit == 1) {
      for (; d < room.padded_dim; d += kLanes) {
        const int count = static_cast<int>(std::min<int64_t>(kLanes, keys.head_dim - d));
        const f32x16 row = from[0] ? load<E>(from[0] + d, count) : f32x16{};
        memcpy(place(), &row, sizeof row);
      }
    } else {
#ifdef __AVX512BW__
      typedef uint16_t u16x32 __attribute__((vector_size(64)));
      const u16x32 low = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                          8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
      for (; d + 2 * kLanes <= keys.head_dim && from[0]; d += kLanes) {
        u16x32 first, second = {};
        memcpy(&first, from[0] + d, sizeof first);
        if (from[1]) memcpy(&second, from[1] + d, sizeof second);
        const u16x32 pairs = __builtin_shuffle(first, second, low), more = __builtin_shuffle(first, second, low + 16);
        memcpy(place(), &pairs, sizeof pairs);
        d += kLanes;
        memcpy(place(), &more, sizeof more);
      }
#endif
      for (; d < room.padded_dim; d += kLanes) {
        const int count = static_cast<int>(std::min<int64_t>(kLanes, keys.head_dim - d));
        // A bfloat16 is the upper half of a float.
        const u32x16 first = as_bits(from[0] ? load<E>(from[0] + d, count) : f32x16{});
        const u32x16 second = as_bits(from[1] ? load<E>(from[1] + d, count) : f32x16{});
        const u32x16 pair = (first >> 16) | second;
        memcpy(place(), &pair, sizeof pair);
      }
    }
  }
}

// What a piece's rows have of a split, from the products of queries and keys in room.scores: room.weights, room.split.
template <class E>
void weigh(const Attention& op, const Piece& piece, int64_t start, int64_t count, Room<E>& room) {
  const int64_t group = op.num_heads / op.num_kv_heads, num_rows = piece.num_queries * group;
  const int64_t num_blocks = ceil_div(count, kLanes), units = num_units<E>(count);
  const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int64_t row = 0; row < num_rows; ++row) {
    float* scores = room.scores + row * kSplit;
    const int64_t position = piece.first_position + row / group;
    const int last = static_cast<int>(std::min(position - start, kSplit));  // of the split's keys that it sees
    const int hidden = op.window ? static_cast<int>(std::clamp<int64_t>(position - op.window - start + 1, 0, kSplit)) : 0;
    f32x16 most = splat(kNothing);
    for (int64_t i = 0; i < num_blocks * kLanes; i += kLanes) {
      const i32x16 index = lanes + static_cast<int>(i);
      f32x16 x = Float::load(scores + i) * op.scale;
      if (op.softcap != 0.f) x = op.softcap * tanh(x / op.softcap);
      x = (index <= last) & (index >= hidden) ? x : splat(kNothing);
      Float::store(scores + i, x);
      most = max(most, x);
    }
    Partial& partial = room.split[row];
    partial = {largest(most), 0.f};
    auto* weights = reinterpret_cast<typename E::Value*>(room.weights + row * room.key_units);
    const float base = partial.largest == kNothing ? 0.f : partial.largest;
    f32x16 total = {};
    for (int64_t i = 0; i < units * E::kPerUnit; i += kLanes) {
      const f32x16 weight = i < num_blocks * kLanes ? exp(Float::load(scores + i) - base) : f32x16{};
      E::store(weights + i, weight);
      total += E::load(weights + i);
    }
    partial.total = sum(total);
  }
}

// One split for all rows of a piece: room.split and room.sums.
template <class E>
void attend_split(const Attention& op, const Batch& batch, const Piece& piece, int64_t kv_head, int64_t split,
                  const Ahead<E>& ahead, Room<E>& room) {
  using Unit = typename E::Unit;
  constexpr int kTileRows = Tiles<E>::kTileRows;
  const int64_t num_rows = piece.num_queries * (op.num_heads / op.num_kv_heads);
  const int64_t start = split * kSplit;
  const int64_t end = std::min(start + kSplit, piece.first_position + piece.num_queries);
  const int64_t num_blocks = ceil_div(end - start, kLanes), units = num_units<E>(end - start);
  const Keys<E> keys(op, batch, piece.sequence, kv_head, start, end);
  pack_keys(keys, ahead, room);
  alignas(64) f32x16 sums[kTileRows][kMostBlocks];

  for (int64_t first = 0; first < num_rows; first += kTileRows) {
    const int rows = static_cast<int>(std::min<int64_t>(kTileRows, num_rows - first));
    for (int64_t block = 0; block < num_blocks; block += kMostBlocks) {
      const int blocks = static_cast<int>(std::min<int64_t>(kMostBlocks, num_blocks - block));
      multiply<E>(rows, room.queries + first * room.dim_units, room.dim_units,
                  room.keys + block * room.dim_units * kLanes, room.dim_units * kLanes, room.dim_units, blocks, sums);
      for (int m = 0; m < rows; ++m)
        for (int n = 0; n < blocks; ++n)
          Float::store(room.scores + (first + m) * kSplit + (block + n) * kLanes, sums[m][n]);
    }
  }
  weigh(op, piece, start, end - start, room);
  pack_values(keys, units, ahead, room);

  for (int64_t first = 0; first < num_rows; first += kTileRows) {
    const int rows = static_cast<int>(std::min<int64_t>(kTileRows, num_rows - first));
    const int64_t dim_blocks = room.padded_dim / kLanes;
    for (int64_t block = 0; block < dim_blocks; block += kMostBlocks) {
      const int blocks = static_cast<int>(std::min<int64_t>(kMostBlocks, dim_blocks - block));
      multiply<E>(rows, static_cast<Unit*>(room.weights) + first * room.key_units, room.key_units,
                  room.values + block * units * kLanes, units * kLanes, units, blocks, sums);
      for (int m = 0; m < rows; ++m)
        for (int n = 0; n < blocks; ++n)
          Float::store(room.sums + (first + m) * room.padded_dim + (block + n) * kLanes, sums[m][n]);
    }
  }
}

// Whether `attend_split_in_place` can stand in for `attend_split`, and for which pieces: it has the same bits.
template <class E>
constexpr bool kHasInPlace = false;

inline bool fits_in_place(const Attention& op, const Pool& pool, int64_t num_rows) {
  return num_rows <= kLanes && op.head_dim % 32 == 0 && pool.block_size % kLanes == 0;
}

#ifdef KVRELAY_AMX
template <>
constexpr bool kHasInPlace<BFloat16> = true;

// The first queries as the weights of a product.
inline void turn_queries(int num_rows, Room<BFloat16>& room) {
  for (int64_t unit = 0; unit < room.dim_units; unit += kLanes) {
    u32x16 x[kLanes] = {};
    for (int row = 0; row < num_rows; ++row) memcpy(&x[row], room.queries + row * room.dim_units + unit, sizeof x[row]);
    transpose(x);
    memcpy(room.columns + unit * kLanes, x, sizeof x);
  }
}

// Sums [16 keys, 4 or 16 columns], each column to its row of scores.
inline void store_columns(const float* sums, int columns, int num_rows, float* scores) {
  if (columns == 4) {
    const i32x16 even = {0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29};
    const i32x16 front = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
    f32x16 x[4];
    memcpy(x, sums, sizeof x);
    for (int pair = 0; 2 * pair < num_rows; ++pair) {  // two columns
      const f32x16 low = __builtin_shuffle(x[0], x[1], even + 2 * pair), high = __builtin_shuffle(x[2], x[3], even + 2 * pair);
      Float::store(scores + 2 * pair * kSplit, __builtin_shuffle(low, high, front));
      if (2 * pair + 1 < num_rows) Float::store(scores + (2 * pair + 1) * kSplit, __builtin_shuffle(low, high, front + 8));
    }
    return;
  }
  f32x16 x[kLanes];
  memcpy(x, sums, sizeof x);
  transpose(x);
  for (int row = 0; row < num_rows; ++row) Float::store(scores + row * kSplit, x[row]);
}

// Values of 32 keys and 32 dimensions as weights of a product, two blocks of sixteen outputs. `from`: the keys' values at
// these dimensions, sixteen after sixteen. The outputs come in another order: a unit takes two instructions then.
inline void pair_values(const uint16_t* const* from, int64_t stride, int64_t count, uint32_t* to) {
  typedef uint16_t u16x32 __attribute__((vector_size(64)));
  for (int64_t unit = 0; unit < kLanes; ++unit) {
    u16x32 first = {}, second = {};
    const uint16_t* at = from[unit / 8] + unit % 8 * 2 * stride;
    if (2 * unit < count) memcpy(&first, at, sizeof first);
    if (2 * unit + 1 < count) memcpy(&second, at + stride, sizeof second);
    const __m512i low = _mm512_unpacklo_epi16((__m512i)first, (__m512i)second);
    const __m512i high = _mm512_unpackhi_epi16((__m512i)first, (__m512i)second);
    memcpy(to + unit * kLanes, &low, sizeof low);
    memcpy(to + (kLanes + unit) * kLanes, &high, sizeof high);
  }
}

// A split for up to sixteen rows, where sixteen keys lie together: keys are the rows of a product whose weights are the
// queries, so that none is moved, and values are paired on their way into the next.
inline void attend_split_in_place(const Attention& op, const Batch& batch, const Piece& piece, int64_t kv_head,
                                  int64_t split, const Ahead<BFloat16>& ahead, Room<BFloat16>& room) {
  const int num_rows = static_cast<int>(piece.num_queries * (op.num_heads / op.num_kv_heads));
  const int columns = num_rows <= 4 ? 4 : kLanes;
  const int64_t start = split * kSplit, count = std::min(kSplit, piece.first_position + piece.num_queries - start);
  const Runs<BFloat16> runs(op, batch, piece.sequence, kv_head, start, count);
  const int64_t stride = op.head_dim, row_bytes = stride * sizeof(uint16_t);
  Amx::configure_both_ways(num_rows, columns);

  alignas(64) float sums[2][kLanes * kLanes];
  for (int64_t run = 0; run < runs.count; run += 2) {
    const uint16_t* keys[] = {runs.at[run], runs.at[std::min(run + 1, runs.count - 1)]};
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t unit = 0; unit < room.dim_units; unit += kLanes) {
      _tile_loadd(5, room.columns + unit * kLanes, 64);
      _tile_loadd(6, keys[0] + 2 * unit, row_bytes);
      _tile_dpbf16ps(2, 6, 5);
      _tile_loadd(7, keys[1] + 2 * unit, row_bytes);
      _tile_dpbf16ps(3, 7, 5);
    }
    _tile_stored(2, sums[0], columns * 4);
    _tile_stored(3, sums[1], columns * 4);
    ahead.ask_for_keys(run);
    ahead.ask_for_keys(run + 1);
    store_columns(sums[0], columns, num_rows, room.scores + run * kLanes);
    if (run + 1 < runs.count) store_columns(sums[1], columns, num_rows, room.scores + (run + 1) * kLanes);
  }
  weigh(op, piece, start, count, room);

  const i32x16 low = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
  const int64_t num_steps = ceil_div(count, 32);
  alignas(64) uint32_t pairs[2][2][kLanes * kLanes];
  for (int64_t d = 0; d < op.head_dim; d += 32) {
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t step = 0; step < num_steps; ++step) {
      const uint16_t* from[2];
      for (int i = 0; i < 2; ++i) from[i] = runs.at[std::min(2 * step + i, runs.count - 1)] + runs.kv_stride + d;
      pair_values(from, stride, count - 32 * step, pairs[step % 2][0]);
      ahead.ask_for_values(2 * step, 2 * d, 64);
      ahead.ask_for_values(2 * step + 1, 2 * d, 64);
      _tile_loadd(4, room.weights + step * kLanes, room.key_units * sizeof(uint32_t));
      _tile_loadd(6, pairs[step % 2][0], 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, pairs[step % 2][1], 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    for (int row = 0; row < num_rows; ++row) {
      const f32x16 first = Float::load(sums[0] + row * kLanes), second = Float::load(sums[1] + row * kLanes);
      float* to = room.sums + row * room.padded_dim + d;
      Float::store(to, __builtin_shuffle(first, second, low));
      Float::store(to + kLanes, __builtin_shuffle(first, second, low + 8));
    }
  }
}
#endif

template <class E>
void write_row(const Attention& op, int64_t row, int64_t head, const Partial& partial, const float* values) {
  auto* out = static_cast<typename E::Value*>(op.out) + row * op.out_stride + head * op.head_dim;
  for (int64_t d = 0; d < op.head_dim; d += kLanes)
    store<E>(out + d, Float::load(values + d) / partial.total,
             static_cast<int>(std::min<int64_t>(kLanes, op.head_dim - d)));
}

template <class E>
void attend_piece(const Attention& op, const Batch& batch, const Piece& piece, int64_t kv_head, int64_t num_splits,
                  const Ahead<E>& ahead, Partials& partials, Room<E>& room) {
  using Value = typename E::Value;
  const int64_t group = op.num_heads / op.num_kv_heads, num_rows = piece.num_queries * group;
  for (int64_t row = 0; row < num_rows; ++row) {
    const Value* from = static_cast<const Value*>(op.queries) + (piece.first_row + row / group) * op.query_stride +
                        (kv_head * group + row % group) * op.head_dim;
    auto* to = reinterpret_cast<Value*>(room.queries + row * room.dim_units);
    memcpy(to, from, op.head_dim * sizeof *to);
    memset(to + op.head_dim, 0, (room.dim_units * E::kPerUnit - op.head_dim) * sizeof *to);
    room.all[row] = {kNothing, 0.f};
  }
  memset(room.totals, 0, num_rows * room.padded_dim * sizeof(float));
  bool in_place = false;
  if constexpr (kHasInPlace<E>)
    if ((in_place = fits_in_place(op, batch.pool, num_rows))) turn_queries(static_cast<int>(num_rows), room);
  const int64_t first_seen = op.window ? std::max<int64_t>(0, piece.first_position - op.window + 1) / kSplit : 0;
  for (int64_t split = piece.first_split; split < piece.first_split + piece.num_splits; ++split) {
    if (split < first_seen) continue;
    if constexpr (kHasInPlace<E>)
      if (in_place) attend_split_in_place(op, batch, piece, kv_head, split, ahead, room);
    if (!in_place) attend_split(op, batch, piece, kv_head, split, ahead, room);
    for (int64_t row = 0; row < num_rows; ++row)
      merge(room.all[row], room.totals + row * room.padded_dim, room.split[row], room.sums + row * room.padded_dim,
            room.padded_dim);
  }
  if (piece.group >= 0) {
    memcpy(partials.partials(piece.group, piece.first_split, kv_head), room.all, num_rows * sizeof(Partial));
    memcpy(partials.values(piece.group, piece.first_split, kv_head), room.totals,
           num_rows * room.padded_dim * sizeof(float));
    if (!partials.is_last(piece.group, kv_head, num_splits)) return;
    for (int64_t row = 0; row < num_rows; ++row) {
      room.all[row] = {kNothing, 0.f};
      memset(room.totals + row * room.padded_dim, 0, room.padded_dim * sizeof(float));
      for (int64_t split = 0; split < num_splits; ++split)
        merge(room.all[row], room.totals + row * room.padded_dim, partials.partials(piece.group, split, kv_head)[row],
              partials.values(piece.group, split, kv_head) + row * room.padded_dim, room.padded_dim);
    }
  }
  for (int64_t row = 0; row < num_rows; ++row)
    write_row<E>(op, piece.first_row + row / group, kv_head * group + row % group, room.all[row],
                 room.totals + row * room.padded_dim);
}

// What the task of this number will read, if it is about a single split.
template <class E>
Ahead<E> look_ahead(const Attention& op, const Batch& batch, const Cut& cut, int64_t task) {
  if (task == static_cast<int64_t>(cut.pieces.size()) * op.num_kv_heads || batch.pool.block_size % kLanes) return {};
  const Piece& piece = cut.pieces[task / op.num_kv_heads];
  const int64_t start = piece.first_split * kSplit, last = piece.first_position + piece.num_queries;
  const bool is_seen = !op.window || piece.first_position - op.window + 1 < start + kSplit;
  if (piece.num_splits > 1 || !is_seen) return {};
  return {{op, batch, piece.sequence, task % op.num_kv_heads, start, std::min(kSplit, last - start)},
          op.head_dim * static_cast<int64_t>(sizeof(typename E::Value))};
}

template <class E>
void run_attention(Member& member, const Attention& op, const Batch& batch, const Cut& cut, Partials& partials) {
  const int64_t group = op.num_heads / op.num_kv_heads;
  const int64_t most_rows = std::max<int64_t>(1, kTaskRows / group) * group;
  Room<E> room(member.scratch(), op.head_dim, most_rows);
  member.share_ahead(static_cast<int64_t>(cut.pieces.size()) * op.num_kv_heads, [&](int64_t task, int64_t next) {
    const Piece& piece = cut.pieces[task / op.num_kv_heads];
    const int64_t num_splits = piece.group < 0 ? 0 : cut.group_sizes[piece.group];
    attend_piece<E>(op, batch, piece, task % op.num_kv_heads, num_splits, look_ahead<E>(op, batch, cut, next), partials,
                    room);
  });
}

}  // namespace kvrelay
