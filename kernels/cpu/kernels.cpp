// What Python calls: a team of threads runs a program, a list of operations over buffers, for one batch of rows.
//
// The structs are those of native.py, field by field.
#include <unistd.h>

#include "attention.h"
#include "copies.h"
#include "linear.h"
#include "rows.h"
#include "sampling.h"

namespace kvrelay {

enum OpKind : int32_t { kEmbed, kTurns, kNorm, kLinear, kRotate, kAttention, kPointwise, kPick };
enum Dtype : int32_t { kFloat32, kBFloat16 };

struct Op {
  int32_t kind;
  int32_t dtype;
  union {
    Embed embed;
    Turns turns;
    Norm norm;
    Linear linear;
    // Both rotations (of no heads: none) and the cache's writes, a row after the other.
    struct {
      Rotate queries;
      Rotate keys;
      Cache cache;
      int32_t caches;
    } rotate;
    Attention attention;
    Pointwise pointwise;
  };
};

// One team, and what its operations need from run to run.
struct Machine {
  Machine(int num_threads, int nice) : team(num_threads, nice) {}

  Team team;
  Cut cut;
  Partials partials;
  Scratch rounded;  // rows of a product in whole numbers
};

// `num_rows`: those that the operation is about.
template <class E>
void run_op(Member& member, const Op& op, const Batch& batch, int64_t num_rows, Machine& machine) {
  switch (op.kind) {
    case kEmbed:
      return run_embed<E>(member, op.embed, batch.token_ids, num_rows);
    case kTurns:
      return run_turns(member, op.turns, batch.positions, num_rows);
    case kNorm:
      return run_norm<E>(member, op.norm, num_rows);
    case kLinear:
      return run_linear<E>(member, op.linear, num_rows, machine.team.num_threads(),
                           static_cast<uint32_t*>(machine.rounded.at_least(0)));
    case kRotate:
      return share_rows(member, num_rows, [&](int64_t row) {
        rotate_row<E>(op.rotate.queries, row);
        rotate_row<E>(op.rotate.keys, row);
        if (op.rotate.caches) cache_row<E>(op.rotate.cache, batch.pool, batch.slots[row], row);
      });
    case kAttention:
      return run_attention<E>(member, op.attention, batch, machine.cut, machine.partials);
    case kPointwise:
      return run_pointwise<E>(member, op.pointwise, num_rows);
    case kPick:  // rows of a table that is the rows so far
      return run_embed<E>(member, op.embed, batch.picked, num_rows);
  }
}

}  // namespace kvrelay

using namespace kvrelay;

extern "C" {

// Whether this CPU and kernel let this process use what the code was compiled for.
int kvrelay_may_run() {
#ifdef KVRELAY_AMX
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return 1;
#endif
}

Machine* kvrelay_new(int num_threads, int nice) { return new Machine(num_threads, nice); }

void kvrelay_free(Machine* machine) { delete machine; }

// Elements from one row to the next that a product's input needs: zeros from its end up to there.
int64_t kvrelay_row_stride(int dtype, int64_t num_inputs) {
  return dtype == kBFloat16 ? num_units<BFloat16>(num_inputs) * 2 : num_units<Float>(num_inputs);
}

// Bytes of a packed weight.
int64_t kvrelay_packed_bytes(int dtype, int64_t num_outputs, int64_t num_inputs) {
  const int64_t units = dtype == kBFloat16 ? num_units<BFloat16>(num_inputs) : num_units<Float>(num_inputs);
  return ceil_div(num_outputs, kLanes) * units * kLanes * 4;
}

void kvrelay_pack(Machine* machine, int dtype, const void* weight, int64_t num_outputs, int64_t num_inputs, void* to) {
  machine->team.run([=](Member& member) {
    if (dtype == kBFloat16)
      pack<BFloat16>(member, static_cast<const uint16_t*>(weight), num_outputs, num_inputs, static_cast<uint32_t*>(to));
    else
      pack<Float>(member, static_cast<const float*>(weight), num_outputs, num_inputs, static_cast<float*>(to));
  });
}

// Bytes of a quantised weight.
int64_t kvrelay_quantised_bytes(int dtype, const Form* form, int64_t num_outputs, int64_t num_inputs) {
  return dtype == kBFloat16 ? integer_bytes(*form, num_outputs, num_inputs)
                            : quantised_bytes(*form, num_outputs, num_inputs);
}

void kvrelay_pack_quantised(Machine* machine, int dtype, const Form* form, const int8_t* codes, const void* scales,
                            const void* minimums, int64_t num_outputs, int64_t num_inputs, uint8_t* to) {
  machine->team.run([=](Member& member) {
    if (dtype == kBFloat16)
      pack_integer(member, *form, codes, scales, minimums, num_outputs, num_inputs, to);
    else
      pack_quantised(member, *form, codes, scales, minimums, num_outputs, num_inputs, to);
  });
}

void kvrelay_copy_pieces(const CopyPiece* pieces, int64_t num_pieces) { copy_pieces(pieces, num_pieces); }

void kvrelay_scan(Machine* machine, const float* x, int64_t num_rows, int64_t size, float* largest, int64_t* place,
                  uint8_t* finite) {
  machine->team.run([=](Member& member) { run_scan(member, x, num_rows, size, largest, place, finite); });
}

void kvrelay_draw(Machine* machine, const float* logits, int64_t size, const Draw* draws, int64_t num_draws,
                  const double* numbers, int64_t* ids) {
  machine->team.run([=](Member& member) { run_draws(member, logits, size, draws, num_draws, numbers, ids); });
}

void kvrelay_total_weights(Machine* machine, const float* logits, int64_t num_rows, int64_t size, int64_t* totals) {
  machine->team.run([=](Member& member) { run_total_weights(member, logits, num_rows, size, totals); });
}

void kvrelay_likeliest(Machine* machine, const float* logits, int64_t num_rows, int64_t size, int64_t count,
                       int64_t* ids) {
  machine->team.run([=](Member& member) { run_likeliest(member, logits, num_rows, size, count, ids); });
}

// The operations from a pick on are about the rows picked; where there are none, none of them is run.
// Returns: 0, or -1 for a slot outside the pool, with nothing written.
int kvrelay_run(Machine* machine, const Op* ops, int64_t num_ops, const Batch* batch) {
  const int64_t num_slots = batch->pool.num_blocks * batch->pool.block_size;
  for (int64_t row = 0; batch->slots && row < batch->num_rows; ++row)
    if (batch->slots[row] >= num_slots) return -1;
  const Op* attention = std::find_if(ops, ops + num_ops, [](const Op& op) { return op.kind == kAttention; });
  if (attention != ops + num_ops) {
    const Attention& op = attention->attention;
    cut_batch(*batch, op.num_heads / op.num_kv_heads, machine->cut);
    machine->partials.prepare(machine->cut, op.num_kv_heads, ceil_div(op.head_dim, kLanes) * kLanes);
  }
  int64_t words = 0;
  for (const Op* op = ops; op != ops + num_ops; ++op)
    if (op->kind == kLinear)
      words = std::max(words, rounded_room(op->linear, batch->num_rows, machine->team.num_threads()));
  machine->rounded.at_least(words * sizeof(uint32_t));
  machine->team.run([=](Member& member) {
    int64_t num_rows = batch->num_rows;
    for (const Op* op = ops; op != ops + num_ops; ++op) {
      if (op->kind == kPick) num_rows = batch->num_picked;
      if (num_rows == 0) break;
      op->dtype == kBFloat16 ? run_op<BFloat16>(member, *op, *batch, num_rows, *machine)
                             : run_op<Float>(member, *op, *batch, num_rows, *machine);
    }
    Tiles<BFloat16>::release();
  });
  return 0;
}
}
