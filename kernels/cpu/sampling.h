// Drawing tokens: what kernels/sampling.py defines, to the bit, without sorting a vocabulary.
//
// A row is walked in blocks. The largest logit of each is found first; a block that has nothing to say then costs a
// comparison. The tokens that a filter keeps are the first ones in the order of the logits (of equals the lower ids
// first), so one number and a count say which they are: `Kept`. A block is weighed when somebody first asks for it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "team.h"

namespace kvrelay {

typedef float f32x8 __attribute__((vector_size(32)));
typedef double f64x8 __attribute__((vector_size(64)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef int64_t i64x8 __attribute__((vector_size(64)));
typedef uint64_t u64x8 __attribute__((vector_size(64)));

constexpr int kBlock = 64;  // logits
constexpr int kPart = 8;    // of a block: those of one vector
constexpr int kBuckets = 1024;
constexpr int kFewEntries = 64;  // sorted outright
constexpr float kNoLogit = -std::numeric_limits<float>::infinity();

// The constants of kernels/sampling.py.
constexpr float kLeastScore = -43.5f;
constexpr double kLog2E = 387270501.0 / (1 << 28);
constexpr uint64_t kPower[] = {1u << 30, 744260972, 257944253, 59576866, 10388937, 1338725, 232067};

// The product of the low halves of each lane.
inline u64x8 multiply_low_halves(u64x8 a, u64x8 b) {
#if defined(__AVX512F__)
  return (u64x8)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  __m256i x[2], y[2];
  memcpy(x, &a, sizeof x);
  memcpy(y, &b, sizeof y);
  for (int i = 0; i < 2; ++i) x[i] = _mm256_mul_epu32(x[i], y[i]);
  memcpy(&a, x, sizeof x);
  return a;
#elif defined(__SSE2__)
  __m128i x[4], y[4];
  memcpy(x, &a, sizeof x);
  memcpy(y, &b, sizeof y);
  for (int i = 0; i < 4; ++i) x[i] = _mm_mul_epu32(x[i], y[i]);
  memcpy(&a, x, sizeof x);
  return a;
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

// A place in the order of the logits: kept are those above `least`, and of those that equal it the first `num_equal`.
struct Kept {
  float least = kNoLogit;
  int64_t num_equal = 0;
};

// A token that may be the last one kept, and what it counts.
struct Entry {
  uint32_t key;  // in the order of the logits
  uint32_t id;
  int64_t amount;
};

inline uint32_t key_of(float x) {
  x += 0.f;  // -0 equals 0
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

inline float logit_of(uint32_t key) {
  const uint32_t bits = key & 0x80000000u ? key & 0x7fffffffu : ~key;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// The last token of the fewest, the largest first, whose amounts reach `enough`; of equals the lower ids first. The
// entries are in the order of the ids, and there are enough of them. They are not kept.
inline Kept cut(Entry* entries, int64_t count, int64_t enough) {
  int64_t sums[kBuckets];
  bool are_equal = false;
  while (count > kFewEntries && !are_equal) {
    uint32_t low = entries[0].key, high = low;
    for (int64_t i = 0; i < count; ++i) {
      low = std::min(low, entries[i].key);
      high = std::max(high, entries[i].key);
    }
    are_equal = low == high;
    int shift = 0;
    while ((high - low) >> shift >= kBuckets) ++shift;
    memset(sums, 0, sizeof sums);
    for (int64_t i = 0; i < count; ++i) sums[(entries[i].key - low) >> shift] += entries[i].amount;
    uint32_t bucket = (high - low) >> shift;
    for (; bucket && sums[bucket] < enough; --bucket) enough -= sums[bucket];
    int64_t num_left = 0;
    for (int64_t i = 0; i < count; ++i) {
      entries[num_left] = entries[i];
      num_left += (entries[i].key - low) >> shift == bucket;
    }
    count = num_left;
  }
  if (!are_equal)
    std::sort(entries, entries + count, [](const Entry& a, const Entry& b) {
      return a.key != b.key ? a.key > b.key : a.id < b.id;
    });
  int64_t last = 0, num_equal = 1;
  for (; last + 1 < count && (enough -= entries[last].amount) > 0; ++last)
    num_equal = entries[last + 1].key == entries[last].key ? num_equal + 1 : 1;
  return {logit_of(entries[last].key), num_equal};
}

// One row's logits and what they weigh. Its memory is the thread's, and lasts until the next row.
class WeighedRow {
 public:
  // What a row of `size` logits needs.
  static int64_t scratch_bytes(int64_t size) {
    const int64_t num_blocks = (size + kBlock - 1) / kBlock;
    return num_blocks * (kBlock * (sizeof(Entry) + sizeof(i64x8) / kPart) + sizeof(Block)) + 2 * (num_blocks + kPart) * sizeof(float);
  }

  // Finite logits, or some -inf among them. `scale`: what differences of logits are multiplied by.
  WeighedRow(const float* logits, int64_t size, float scale, void* scratch)
      : logits_(logits), size_(size), num_blocks_((size + kBlock - 1) / kBlock), scale_(scale) {
    weights_ = static_cast<int64_t*>(scratch);
    entries_ = reinterpret_cast<Entry*>(weights_ + num_blocks_ * kBlock);
    blocks_ = reinterpret_cast<Block*>(entries_ + num_blocks_ * kBlock);
    highest_ = reinterpret_cast<float*>(blocks_ + num_blocks_);
    for (int64_t b = 0; b < num_blocks_; ++b) {
      float padded[kBlock];
      const float* x = block(b, padded);
      f32x8 most = load(x);
      for (int i = kPart; i < kBlock; i += kPart) {
        const f32x8 next = load(x + i);
        most = next > most ? next : most;
      }
      float of_block = most[0];
      for (int lane = 1; lane < kPart; ++lane) of_block = most[lane] > of_block ? most[lane] : of_block;
      highest_[b] = of_block;
      largest_ = of_block > largest_ ? of_block : largest_;
    }
    shift_ = 32;
    for (int64_t left = size; left; left >>= 1) --shift_;
    for (int64_t b = 0; b < num_blocks_; b += kPart) {
      const u64x8 weights = weigh(load(highest_ + b));
      for (int64_t i = 0; i < kPart && b + i < num_blocks_; ++i)
        blocks_[b + i] = {static_cast<int64_t>(weights[i]), 0, 0, false};
    }
  }

  int64_t one() const { return int64_t{1} << (30 + shift_); }

  // The first `count` tokens.
  Kept first(int64_t count) {
    if (count >= size_) return {};
    float least = kNoLogit;
    if (count <= num_blocks_) {  // so many blocks have a logit as large as that
      float* ordered = highest_ + num_blocks_;
      std::copy_n(highest_, num_blocks_, ordered);
      std::nth_element(ordered, ordered + count - 1, ordered + num_blocks_, std::greater<float>());
      least = ordered[count - 1];
    }
    int64_t num_entries = 0;
    for (int64_t b = 0; b < num_blocks_; ++b) {
      if (!(highest_[b] >= least)) continue;
      const int64_t end = std::min(size_, (b + 1) * kBlock);
      for (int64_t id = b * kBlock; id < end; ++id) {
        entries_[num_entries] = {key_of(logits_[id]), static_cast<uint32_t>(id), 1};
        num_entries += logits_[id] >= least;
      }
    }
    return cut(entries_, num_entries, count);
  }

  // Of the tokens that are kept and weigh `lightest` or more: the fewest, the largest first, with that share of the
  // weight.
  Kept share(double top_p, Kept kept, int64_t lightest) {
    const int64_t total = add_up(kept, lightest);
    const int64_t enough = std::max<int64_t>(1, static_cast<int64_t>(std::ceil(top_p * static_cast<double>(total))));
    if (enough >= total) return kept;
    // All that weigh less than this do not reach what may be missing.
    const int64_t least = std::max(lightest, (total - enough + size_ - 1) / size_);
    int64_t num_entries = 0;
    for_blocks(kept, least, [&](int64_t b, const int64_t* weights) {
      const int64_t count = std::min<int64_t>(kBlock, size_ - b * kBlock);
      for (int i = 0; i < count; ++i) {
        const int64_t id = b * kBlock + i;
        entries_[num_entries] = {key_of(logits_[id]), static_cast<uint32_t>(id), weights[i]};
        num_entries += weights[i] > 0;
      }
    });
    return cut(entries_, num_entries, enough);
  }

  // The tokens at some numbers in [0, 1), which say how far into all the weight that is kept, in the order of the ids.
  void draw(Kept kept, int64_t lightest, const double* numbers, int64_t count, int64_t* ids) {
    const int64_t total = add_up(kept, lightest);
    for (int64_t n = 0; n < count; ++n) {
      int64_t left = static_cast<int64_t>(numbers[n] * static_cast<double>(total));
      int64_t b = 0;
      while (left >= blocks_[b].sum) left -= blocks_[b++].sum;
      int64_t weights[kBlock], num_equal = blocks_[b].num_equal;
      weigh_block(b, {kept.least, num_equal}, lightest, num_equal, weights);
      int64_t i = 0;
      while (left >= weights[i]) left -= weights[i++];
      ids[n] = b * kBlock + i;
    }
  }

  // All the weight that is kept; leaves each block's behind.
  int64_t add_up(Kept kept, int64_t lightest) {
    int64_t total = 0;
    for (int64_t b = 0; b < num_blocks_; ++b) blocks_[b].sum = 0;
    for_blocks(kept, lightest, [&](int64_t b, const int64_t* weights) {
      i64x8 sums = {};
      for (int i = 0; i < kBlock; i += kPart) {
        i64x8 part;
        memcpy(&part, weights + i, sizeof part);
        sums += part;
      }
      for (int lane = 0; lane < kPart; ++lane) blocks_[b].sum += sums[lane];
      total += blocks_[b].sum;
    });
    return total;
  }

  // The ids of the first `count` tokens, in their order.
  void list_first(int64_t count, int64_t* ids) {
    const Kept kept = first(count);
    int64_t num_entries = 0, num_equal = kept.num_equal;
    const bool all = count >= size_;
    for (int64_t b = 0; b < num_blocks_; ++b) {
      if (!(highest_[b] >= kept.least)) continue;
      const int64_t end = std::min(size_, (b + 1) * kBlock);
      for (int64_t id = b * kBlock; id < end; ++id)
        if (all || logits_[id] > kept.least || (logits_[id] == kept.least && num_equal-- > 0))
          entries_[num_entries++] = {key_of(logits_[id]), static_cast<uint32_t>(id), 0};
    }
    std::sort(entries_, entries_ + num_entries, [](const Entry& a, const Entry& b) {
      return a.key != b.key ? a.key > b.key : a.id < b.id;
    });
    for (int64_t i = 0; i < num_entries; ++i) ids[i] = entries_[i].id;
  }

 private:
  struct Block {
    int64_t highest;    // what its largest logit weighs
    int64_t sum;        // what its kept tokens weigh
    int64_t num_equal;  // those that equal the least logit kept and still count, at its beginning
    bool is_weighed;
  };

  static f32x8 load(const float* from) {
    f32x8 x;
    memcpy(&x, from, sizeof x);
    return x;
  }

  // A block's logits; beyond the row's end there is nothing.
  const float* block(int64_t b, float* padded) const {
    const int64_t count = size_ - b * kBlock;
    if (count >= kBlock) return logits_ + b * kBlock;
    std::fill_n(std::copy_n(logits_ + b * kBlock, count, padded), kBlock - count, kNoLogit);
    return padded;
  }

  // The product of score and kLog2E is exact, and so the sum is rounded once, whether or not they are made one step.
  u64x8 weigh(f32x8 logits) const {
    const f32x8 scores = (logits - largest_) * scale_;
    const f64x8 held = __builtin_convertvector(scores > kLeastScore ? scores : f32x8{} + kLeastScore, f64x8);
    constexpr double kToFixed = 1.5 * (1 << 20);  // beside it a double's last bit stands for 2^-32
    constexpr uint64_t kHigh = 0x41380000;        // its own high half
    const u64x8 bits = reinterpret_cast<u64x8>(held * kLog2E + kToFixed);
    u64x8 power = u64x8{} + kPower[6];
    for (int i = 5; i >= 0; --i) power = (multiply_low_halves(power, bits) >> 32) + kPower[i];
    return (power << shift_) >> (kHigh - (bits >> 32));
  }

  // The weights of a block's kept tokens, zero for all others. Counts down `num_equal`.
  void weigh_block(int64_t b, Kept kept, int64_t lightest, int64_t& num_equal, int64_t* weights) {
    float padded[kBlock];
    const float* x = block(b, padded);
    int64_t* all = weights_ + b * kBlock;
    if (!blocks_[b].is_weighed)
      for (int i = 0; i < kBlock; i += kPart) {
        const u64x8 of_part = weigh(load(x + i));
        memcpy(all + i, &of_part, sizeof of_part);
      }
    blocks_[b].is_weighed = true;
    i32x8 any_equal = {};
    for (int i = 0; i < kBlock; i += kPart) {
      const f32x8 logits = load(x + i);
      i64x8 of_part;
      memcpy(&of_part, all + i, sizeof of_part);
      of_part &= of_part >= lightest;
      of_part &= __builtin_convertvector(logits > kept.least, i64x8);
      memcpy(weights + i, &of_part, sizeof of_part);
      any_equal |= logits == kept.least;
    }
    int any = 0;
    for (int lane = 0; lane < kPart; ++lane) any |= any_equal[lane];
    if (!any || !num_equal) return;
    for (int i = 0; i < kBlock && num_equal; ++i)
      if (x[i] == kept.least) {
        weights[i] = all[i] >= lightest ? all[i] : 0;
        --num_equal;
      }
  }

  // `use(b, weights)` for the blocks that have any of what is kept.
  template <class Use>
  void for_blocks(Kept kept, int64_t lightest, const Use& use) {
    int64_t num_equal = kept.num_equal;
    for (int64_t b = 0; b < num_blocks_; ++b) {
      blocks_[b].num_equal = num_equal;
      if (highest_[b] < kept.least || blocks_[b].highest < lightest) continue;
      int64_t weights[kBlock];
      weigh_block(b, kept, lightest, num_equal, weights);
      use(b, weights);
    }
  }

  const float* logits_;
  int64_t size_;
  int64_t num_blocks_;
  float scale_;
  float largest_ = kNoLogit;
  int shift_;  // from a power in units of 2^-30 to a weight
  int64_t* weights_;  // all tokens', where the block is weighed
  Entry* entries_;
  Block* blocks_;
  float* highest_;  // each block's largest logit, and room for as many and a vector's end
};

// What one row's tokens are drawn by.
struct Draw {
  int64_t row;
  float scale;
  double min_p;
  double top_p;
  int64_t top_k;
  int64_t first;  // of its numbers and tokens
  int64_t count;
};

inline void run_draws(Member& member, const float* logits, int64_t size, const Draw* draws, int64_t num_draws,
                      const double* numbers, int64_t* ids) {
  member.share(num_draws, [&](int64_t i) {
    const Draw& draw = draws[i];
    void* scratch = member.scratch().at_least(WeighedRow::scratch_bytes(size));
    WeighedRow row(logits + draw.row * size, size, draw.scale, scratch);
    const int64_t lightest =
        std::max<int64_t>(1, static_cast<int64_t>(std::ceil(draw.min_p * static_cast<double>(row.one()))));
    Kept kept;
    if (draw.top_k) kept = row.first(draw.top_k);
    if (draw.top_p < 1) kept = row.share(draw.top_p, kept, lightest);
    row.draw(kept, lightest, numbers + draw.first, draw.count, ids + draw.first);
  });
}

// What each row weighs.
inline void run_total_weights(Member& member, const float* logits, int64_t num_rows, int64_t size, int64_t* totals) {
  member.share(num_rows, [&](int64_t row) {
    void* scratch = member.scratch().at_least(WeighedRow::scratch_bytes(size));
    totals[row] = WeighedRow(logits + row * size, size, 1.f, scratch).add_up({}, 1);
  });
}

// The ids of each row's `count` largest logits.
inline void run_likeliest(Member& member, const float* logits, int64_t num_rows, int64_t size, int64_t count,
                          int64_t* ids) {
  member.share(num_rows, [&](int64_t row) {
    void* scratch = member.scratch().at_least(WeighedRow::scratch_bytes(size));
    WeighedRow(logits + row * size, size, 1.f, scratch).list_first(count, ids + row * count);
  });
}

}  // namespace kvrelay
