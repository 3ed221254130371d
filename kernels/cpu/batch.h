// What a step's operations are told: which rows there are, where they belong, and where keys and values lie.
#pragma once

#include <cstdint>

namespace kvrelay {

// A pool of KV blocks, seen as [blocks, layers, keys and values, KV heads, slots, head dim]. Strides in elements.
struct Pool {
  void* data;
  int64_t num_blocks;
  int64_t block_size;
  int64_t block_stride;
  int64_t layer_stride;
  int64_t kv_stride;
  int64_t head_stride;
};

// Rows [query_starts[s], query_starts[s + 1]) are the last tokens of sequence s, which has seq_lens[s] with them. Rows
// from query_starts[num_sequences] on are padding. Some rows may be picked, which the last operations are about alone.
struct Batch {
  int64_t num_rows;
  int64_t num_sequences;
  const int64_t* token_ids;     // [num_rows]
  const int64_t* positions;     // [num_rows]
  const int64_t* slots;         // [num_rows]: block * block size + offset; -1: padding
  const int64_t* query_starts;  // [num_sequences + 1]
  const int64_t* seq_lens;      // [num_sequences]
  const int64_t* block_tables;  // [num_sequences, table_width]
  int64_t table_width;
  int64_t num_picked;
  const int64_t* picked;  // [num_picked]: rows
  Pool pool;
};

// Where the first KV head's key in a slot of a layer begins.
template <class E>
typename E::Value* slot_of(const Pool& pool, int64_t layer, int64_t slot, int64_t head_dim) {
  return static_cast<typename E::Value*>(pool.data) + slot / pool.block_size * pool.block_stride +
         layer * pool.layer_stride + slot % pool.block_size * head_dim;
}

}  // namespace kvrelay
