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
    const int64_t sizes[] = {rows * dim_units * 4, kSplit * dim_units * 4,  padded_dim * key_units * 4,
                             rows * kSplit * 4,    rows * key_units * 4,    rows * padded_dim * 4,
                             rows * padded_dim * 4, rows * int64_t(sizeof(Partial)), rows * int64_t(sizeof(Partial))};
    int64_t total = 0;
    for (int64_t size : sizes) total += ceil_div(size, 64) * 64;
    char* at = static_cast<char*>(scratch.at_least(total));
    void** pointers[] = {(void**)&queries, (void**)&keys, (void**)&values, (void**)&scores, (void**)&weights,
                         (void**)&sums,    (void**)&totals, (void**)&split, (void**)&all};
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

// A split's keys as the weights of a product; what is beyond the end is zero.
template <class E>
void pack_keys(const Keys<E>& keys, Room<E>& room) {
  typedef typename E::Unit Vector __attribute__((vector_size(64)));
  for (int64_t block = 0; block < keys.count; block += kLanes) {
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
void pack_values(const Keys<E>& keys, int64_t units, Room<E>& room) {
  using Unit = typename E::Unit;
  for (int64_t unit = 0; unit < units; ++unit) {
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

// One split for all rows of a piece: room.split and room.sums.
template <class E>
void attend_split(const Attention& op, const Batch& batch, const Piece& piece, int64_t kv_head, int64_t split,
                  Room<E>& room) {
  using Unit = typename E::Unit;
  constexpr int kTileRows = Tiles<E>::kTileRows;
  const int64_t group = op.num_heads / op.num_kv_heads, num_rows = piece.num_queries * group;
  const int64_t start = split * kSplit;
  const int64_t end = std::min(start + kSplit, piece.first_position + piece.num_queries);
  const int64_t num_blocks = ceil_div(end - start, kLanes), units = num_units<E>(end - start);
  const Keys<E> keys(op, batch, piece.sequence, kv_head, start, end);
  pack_keys(keys, room);
  pack_values(keys, units, room);
  alignas(64) f32x16 sums[kTileRows][kMostBlocks];

  for (int64_t first = 0; first < num_rows; first += kTileRows) {
    const int rows = static_cast<int>(std::min<int64_t>(kTileRows, num_rows - first));
    for (int64_t block = 0; block < num_blocks; block += kMostBlocks) {
      const int blocks = static_cast<int>(std::min<int64_t>(kMostBlocks, num_blocks - block));
      multiply<E>(rows, room.queries + first * room.dim_units, room.dim_units,
                  room.keys + block * room.dim_units * kLanes, room.dim_units * kLanes, room.dim_units, blocks, sums);
      for (int m = 0; m < rows; ++m)
        for (int n = 0; n < blocks; ++n) {
          f32x16 scores = sums[m][n] * op.scale;
          if (op.softcap != 0.f) scores = op.softcap * tanh(scores / op.softcap);
          Float::store(room.scores + (first + m) * kSplit + (block + n) * kLanes, scores);
        }
    }
  }

  const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int64_t row = 0; row < num_rows; ++row) {
    float* scores = room.scores + row * kSplit;
    const int64_t position = piece.first_position + row / group;
    const int last = static_cast<int>(std::min(position - start, kSplit));  // of the split's keys that it sees
    const int hidden = op.window ? static_cast<int>(std::clamp<int64_t>(position - op.window - start + 1, 0, kSplit)) : 0;
    f32x16 most = splat(kNothing);
    for (int64_t i = 0; i < num_blocks * kLanes; i += kLanes) {
      const i32x16 index = lanes + static_cast<int>(i);
      f32x16 x = Float::load(scores + i);
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

template <class E>
void write_row(const Attention& op, int64_t row, int64_t head, const Partial& partial, const float* values) {
  auto* out = static_cast<typename E::Value*>(op.out) + row * op.out_stride + head * op.head_dim;
  for (int64_t d = 0; d < op.head_dim; d += kLanes)
    store<E>(out + d, Float::load(values + d) / partial.total,
             static_cast<int>(std::min<int64_t>(kLanes, op.head_dim - d)));
}

template <class E>
void attend_piece(const Attention& op, const Batch& batch, const Piece& piece, int64_t kv_head, int64_t num_splits,
                  Partials& partials, Room<E>& room) {
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
  const int64_t first_seen = op.window ? std::max<int64_t>(0, piece.first_position - op.window + 1) / kSplit : 0;
  for (int64_t split = piece.first_split; split < piece.first_split + piece.num_splits; ++split) {
    if (split < first_seen) continue;
    attend_split(op, batch, piece, kv_head, split, room);
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

template <class E>
void run_attention(Member& member, const Attention& op, const Batch& batch, const Cut& cut, Partials& partials) {
  const int64_t group = op.num_heads / op.num_kv_heads;
  const int64_t most_rows = std::max<int64_t>(1, kTaskRows / group) * group;
  Room<E> room(member.scratch(), op.head_dim, most_rows);
  member.share(static_cast<int64_t>(cut.pieces.size()) * op.num_kv_heads, [&](int64_t task) {
    const Piece& piece = cut.pieces[task / op.num_kv_heads];
    const int64_t num_splits = piece.group < 0 ? 0 : cut.group_sizes[piece.group];
    attend_piece<E>(op, batch, piece, task % op.num_kv_heads, num_splits, partials, room);
  });
}

}  // namespace kvrelay
