// Tensor memory and tensor cores of the simulated machine.
#include <algorithm>
#include <array>
#include <cstring>

#include "mx/e8m0.h"
#include "mx/fp8.h"
#include "ptx/tcgen05_semantics.h"
#include "simulator/machine.h"

namespace mxflash::simulator {
namespace {

using ptx::Fp8Code;
using ptx::Major;

const std::array<float, 256>& decoded(Fp8Code code) {
  static const auto table = [](const Fp8Format& f) {
    std::array<float, 256> t;
    for (int i = 0; i < 256; ++i) t[size_t(i)] = decode_fp8(uint8_t(i), f);
    return t;
  };
  static const std::array<float, 256> e4m3 = table(kE4m3), e5m2 = table(kE5m2);
  return code == Fp8Code::e4m3 ? e4m3 : e5m2;
}

void check_columns(const Cta& c, uint32_t column, uint32_t count, const char* what) {
  if (column + uint64_t(count) > kColumns) fail("%s: columns %u..%u of 512", what, column, column + count - 1);
  for (uint32_t i = column; i < column + count; ++i) {
    if (!c.allocated[i]) fail("%s: column %u of tensor memory is not allocated", what, i);
  }
}

// visit(address, row, k): pieces of an operand [rows][32] that lie together, 16 elements along K or MN.
template <class Visit>
void for_pieces(const ptx::MatrixOperand& m, Major major, uint32_t rows, Visit&& visit) {
  if (major == Major::k) {
    for (uint32_t r = 0; r < rows; ++r) {
      for (uint32_t k = 0; k < 32; k += 16) visit(ptx::operand_address(m, major, r, k), r, k);
    }
  } else {
    for (uint32_t k = 0; k < 32; ++k) {
      for (uint32_t r = 0; r < rows; r += 16) visit(ptx::operand_address(m, major, r, k), r, k);
    }
  }
}

// As fp32.
void gather(const Cta& c, uint64_t descriptor, Major major, Fp8Code code, uint32_t rows, float* to) {
  const auto& table = decoded(code);
  const uint32_t step = major == Major::k ? 1 : 32;
  for_pieces(ptx::decode_matrix(descriptor), major, rows, [&](uint32_t address, uint32_t r, uint32_t k) {
    const uint8_t* const from = c.base + address;
    for (uint32_t i = 0; i < 16; ++i) to[r * 32 + k + i * step] = table[from[i]];
  });
}

// visit(address, row): the 32 rows of 16 bytes of an atom of scales.
template <class Visit>
void for_pieces_of_scales(const TensorWork& w, Visit&& visit) {
  const ptx::MatrixOperand m = ptx::decode_matrix(w.a);
  for (uint32_t row = 0; row < 32; ++row) visit(ptx::operand_address(m, Major::k, row, 0), row);
}

// Of operand rows, as fp64: products of two are then exact. All four quarters of the lanes must hold the same word.
void gather_scales(Cta& c, uint32_t tmem, uint32_t id, uint32_t rows, double* to, const char* what) {
  for (uint32_t r = 0; r < rows; ++r) {
    const uint32_t word = c.word(r % 32, tmem + r / 32);
    for (uint32_t quarter = 1; quarter < 4; ++quarter) {
      if (c.word(r % 32 + 32 * quarter, tmem + r / 32) != word) {
        fail("%s: lanes %u and %u of column %u differ: scales must be the same in all four quarters", what, r % 32,
             r % 32 + 32 * quarter, tmem + r / 32);
      }
    }
    to[r] = decode_e8m0_f64(uint8_t(word >> (8 * id)));
  }
}

// rows x n: acc = a b^T with b transposed to [32][n].
void multiply_rows(const float* a, const float* b, uint32_t n, float* acc) {
  std::fill_n(acc, n, 0.0f);
  for (uint32_t k = 0; k < 32; ++k) {
    const float x = a[k];
    const float* y = b + k * n;
    for (uint32_t i = 0; i < n; ++i) acc[i] += x * y[i];
  }
}

void multiply(Cta& c, const TensorWork& w) {
  const ptx::DecodedInstruction i = ptx::decode_instruction(w.instruction);
  static float a[128 * 32], b[256 * 32], b_transposed[32 * 256], acc[256];
  static double sfa[128], sfb[256];
  if (w.op == TensorOp::multiply_ss) {
    gather(c, w.a, i.a_major, i.a, 128, a);
  } else {
    const auto& table = decoded(i.a);
    for (uint32_t r = 0; r < 128; ++r) {
      for (uint32_t k = 0; k < 32; ++k) {
        a[r * 32 + k] = table[c.word(r, uint32_t(w.a) + k / 4) >> (8 * (k % 4)) & 255];
      }
    }
  }
  gather(c, w.b, i.b_major, i.b, i.n, b);
  gather_scales(c, w.sfa, i.sfa_id, 128, sfa, "tcgen05_mma: scales of A");
  gather_scales(c, w.sfb, i.sfb_id, i.n, sfb, "tcgen05_mma: scales of B");
  for (uint32_t n = 0; n < i.n; ++n) {
    for (uint32_t k = 0; k < 32; ++k) b_transposed[k * i.n + n] = b[n * 32 + k];
  }
  for (uint32_t m = 0; m < 128; ++m) {
    multiply_rows(a + 32 * m, b_transposed, i.n, acc);
    uint32_t* const to = &c.word(m, w.d);
    for (uint32_t n = 0; n < i.n; ++n) {
      float sum = float(double(acc[n]) * (sfa[m] * sfb[n]));
      if (w.accumulate) sum += std::bit_cast<float>(to[n]);
      to[n] = std::bit_cast<uint32_t>(sum);
    }
  }
}

void copy_scales(Cta& c, const TensorWork& w) {
  for_pieces_of_scales(w, [&](uint32_t address, uint32_t row) {
    for (uint32_t quarter = 0; quarter < 4; ++quarter) memcpy(&c.word(row + 32 * quarter, w.d), c.base + address, 16);
  });
}

// ---- what work touches ---------------------------------------------------------------------------------------------

// The columns of tensor memory, checked.
std::vector<TouchedColumns> columns_of(const Cta& c, const TensorWork& w) {
  std::vector<TouchedColumns> ranges;
  const auto add = [&](uint32_t tmem, uint32_t count, bool written, const char* what) {
    if (tmem >> 16) fail("%s: lane must be 0, got %u", what, tmem >> 16);
    check_columns(c, tmem, count, what);
    ranges.push_back({tmem, count, written, what});
  };
  // Those of 64 rows are half of a copy's four columns, either one.
  const auto add_scales = [&](uint32_t tmem, uint32_t rows, bool written, const char* what) {
    const uint32_t align = rows <= 64 ? 2 : 4;
    add(tmem, rows <= 64 ? 2 : (rows + 127) / 128 * 4, written, what);
    if (tmem % align) fail("%s: column must be a multiple of %u, got %u", what, align, tmem);
  };
  if (w.op == TensorOp::copy_scales) {
    add_scales(w.d, 128, true, "tcgen05_cp_scales");
  } else if (w.op != TensorOp::commit) {
    const uint32_t n = ptx::decode_instruction(w.instruction).n;
    add(w.d, n, true, "tcgen05_mma: D");
    if (w.op == TensorOp::multiply_ts) add(uint32_t(w.a), 8, false, "tcgen05_mma: A");
    add_scales(w.sfa, 128, false, "tcgen05_mma: scales of A");
    add_scales(w.sfb, n, false, "tcgen05_mma: scales of B");
    for (size_t i = 1; i < ranges.size(); ++i) {
      if (ranges[i].first < w.d + n && w.d < ranges[i].first + ranges[i].count) {
        fail("%s overlaps D", ranges[i].what);
      }
    }
  }
  return ranges;
}

bool meet(uint32_t first, uint32_t count, uint32_t other, uint32_t other_count) {
  return first < other + other_count && other < first + count;
}

// Registers must not be on their way from or to columns that work touches.
void check_moves(const Cta& c, const std::vector<TouchedColumns>& ranges) {
  for (const Thread& t : c.threads) {
    for (const RegisterMove& m : t.stores) {
      for (const TouchedColumns& r : ranges) {
        if (meet(m.column, m.count, r.first, r.count)) {
          fail("%s: warp %u has not waited for its tcgen05_st to column %u", r.what, t.warp(), m.column);
        }
      }
    }
    for (const RegisterMove& m : t.loads) {
      for (const TouchedColumns& r : ranges) {
        if (r.written && meet(m.column, m.count, r.first, r.count)) {
          fail("%s: warp %u has not waited for its tcgen05_ld of column %u", r.what, t.warp(), m.column);
        }
      }
    }
  }
}

// Work must not be on its way that touches columns which this thread is about to read or write.
void check_work(const Cta& c, uint32_t column, uint32_t count, bool writes, const char* what) {
  for (const TensorWork& w : c.tensor_queue) {
    for (const TouchedColumns& r : w.columns) {
      if ((writes || r.written) && meet(column, count, r.first, r.count)) {
        fail("%s at column %u: work on its way %s it (%s)", what, column, r.written ? "writes" : "reads", r.what);
      }
    }
  }
}

// Work on its way that touches the same columns, one of the two writing, must be ordered by the ISA. Deferred work is
// in order by itself.
void check_order(const Cta& c, const TensorWork& w) {
  if (machine->launch.mode != Mode::reordered) return;
  for (const TensorWork& earlier : c.tensor_queue) {
    if (!may_pass(earlier, w)) continue;
    for (const TouchedColumns& e : earlier.columns) {
      for (const TouchedColumns& r : w.columns) {
        if ((e.written || r.written) && meet(e.first, e.count, r.first, r.count)) {
          fail("%s at column %u: nothing orders it after work on its way that %s it (%s)", r.what, r.first,
               e.written ? "writes" : "reads", e.what);
        }
      }
    }
  }
}

// Rules of descriptors; and claims the shared memory that is read.
void claim_operands(TensorWork& w) {
  const auto claim = [&](uint32_t address, const char* what) {
    claim_read(address / 16, what);
    cta().order->tensor_read(self().index, address / 16, what);
    w.pieces.push_back(address / 16);
  };
  const auto claim_matrix = [&](uint64_t descriptor, Major major, uint32_t rows, const char* what) {
    if (const char* rule = ptx::broken_rule(descriptor, major)) fail("%s: %s", what, rule);
    for_pieces(ptx::decode_matrix(descriptor), major, rows, [&](uint32_t at, uint32_t, uint32_t) { claim(at, what); });
  };
  if (w.op == TensorOp::copy_scales) {
    constexpr const char* kWhat = "tcgen05_cp_scales";
    if (const char* rule = ptx::broken_rule(w.a, Major::k)) fail("%s: %s", kWhat, rule);
    if (ptx::decode_matrix(w.a).swizzle != ptx::Swizzle::none) fail("%s: source must not be swizzled", kWhat);
    for_pieces_of_scales(w, [&](uint32_t address, uint32_t) { claim(address, kWhat); });
  } else if (w.op != TensorOp::commit) {
    if (const char* rule = ptx::broken_rule(w.instruction)) fail("tcgen05_mma: %s", rule);
    const ptx::DecodedInstruction i = ptx::decode_instruction(w.instruction);
    if (w.op == TensorOp::multiply_ss) {
      claim_matrix(w.a, i.a_major, 128, "tcgen05_mma: A");
    } else if (i.a_major != Major::k) {
      fail("tcgen05_mma: A in tensor memory must be K-major");
    }
    claim_matrix(w.b, i.b_major, i.n, "tcgen05_mma: B");
  }
}

// A warp may name its own lanes only.
uint32_t own_lane(uint32_t tmem, uint32_t count, const char* what) {
  const uint32_t want = self().warp() % 4 * 32;
  if (tmem >> 16 != want) {
    fail("%s: warp %u reaches lanes %u..%u, the address names lane %u", what, self().warp(), want, want + 31,
         tmem >> 16);
  }
  check_columns(cta(), tmem & 0xFFFF, count, what);
  return want + self().lane();
}

void check_fence_after(const char* what) {
  if (self().needs_fence_after) fail("%s after a wait for tcgen05 work without tcgen05_fence_after_thread_sync", what);
}

// Whether a move between registers and tensor memory takes effect when it is issued, and not at the wait: the same for
// all lanes of a warp.
bool at_once(const Thread& t) {
  if (machine->launch.mode != Mode::reordered) return false;
  return ((t.history ^ machine->launch.seed) * 0x9E3779B97F4A7C15u) >> 63;
}

}  // namespace

bool may_pass(const TensorWork& earlier, const TensorWork& later) {
  if (earlier.issuer != later.issuer) return true;
  if (later.op == TensorOp::commit) return false;
  if (earlier.op == TensorOp::commit) return true;
  const bool copy_earlier = earlier.op == TensorOp::copy_scales, copy_later = later.op == TensorOp::copy_scales;
  if (copy_earlier != copy_later) return !copy_earlier;  // a product before a copy: not ordered
  if (copy_earlier) return earlier.d != later.d;
  // Products: the same accumulator and shape.
  return earlier.d != later.d || (earlier.instruction >> 17 & 63) != (later.instruction >> 17 & 63);
}

void execute(Cta& c, const TensorWork& w) {
  switch (w.op) {
    case TensorOp::copy_scales: copy_scales(c, w); break;
    case TensorOp::multiply_ss:
    case TensorOp::multiply_ts: multiply(c, w); break;
    case TensorOp::commit: barrier_commit(c, w.d, w.known); break;
  }
  for (const uint32_t piece : w.pieces) release_read(c, piece);
}

void enqueue_tensor(const TensorWork& work) {
  Thread& t = self();
  Cta& c = *t.cta;
  TensorWork w = work;
  w.issuer = &t;
  if (w.op == TensorOp::commit) {
    barrier_check_fenced(c, w.d, "tcgen05_commit");
    w.known = c.order->tensor_release(t.index);
  } else {
    check_fence_after(w.op == TensorOp::copy_scales ? "tcgen05_cp_scales" : "tcgen05_mma");
    claim_operands(w);
    w.columns = columns_of(c, w);
    check_moves(c, w.columns);
    check_order(c, w);
    c.order->tensor_work(t.index, w.columns);
  }
  if (machine->deferred()) {
    c.tensor_queue.push_back(std::move(w));
  } else {
    execute(c, w);
  }
}

void allocate(uint32_t shared, uint32_t columns) {
  aligned("tcgen05_alloc", uint64_t(shared) << 32 | columns);
  Cta& c = cta();
  if (self().lane() == 0) {
    if (!c.may_allocate) fail("tcgen05_alloc after tcgen05_relinquish_alloc_permit");
    // Where the first fit begins need not be column 0 on hardware either.
    uint32_t first = 0;
    for (; first + columns <= kColumns; first += columns) {
      if (std::none_of(c.allocated.begin() + first, c.allocated.begin() + first + columns, [](bool b) { return b; }))
        break;
    }
    if (first + columns > kColumns)
      fail("tcgen05_alloc of %u columns: they are not free, and nobody gives any back", columns);
    std::fill_n(c.allocated.begin() + first, columns, true);
    for (uint32_t lane = 0; lane < kLanes; ++lane) std::fill_n(&c.word(lane, first), columns, kPoison);
    store(shared, &first, 4);
  }
  exchange("tcgen05_alloc", 0);
}

void relinquish() {
  aligned("tcgen05_relinquish_alloc_permit", 0);
  cta().may_allocate = false;
}

void deallocate(uint32_t tmem, uint32_t columns) {
  aligned("tcgen05_dealloc", uint64_t(tmem) << 32 | columns);
  check_fence_after("tcgen05_dealloc");
  exchange("tcgen05_dealloc", 0);
  if (self().lane() != 0) return;
  Cta& c = cta();
  if (!c.tensor_queue.empty()) fail("tcgen05_dealloc while tcgen05 work is on its way");
  check_columns(c, tmem, columns, "tcgen05_dealloc");
  std::fill_n(c.allocated.begin() + tmem, columns, false);
}

void load_registers(uint32_t tmem, uint32_t* r, uint32_t count) {
  Thread& t = self();
  aligned("tcgen05_ld", uint64_t(tmem) << 32 | count);
  check_fence_after("tcgen05_ld");
  const uint32_t lane = own_lane(tmem, count, "tcgen05_ld"), column = tmem & 0xFFFF;
  check_work(*t.cta, column, count, false, "tcgen05_ld");
  if (t.lane() == 0) t.cta->order->load_columns(t.index, column, count);
  const uint32_t* const from = &t.cta->word(lane, column);
  t.loads.push_back({lane, column, count, r, {}});
  if (machine->launch.mode == Mode::eager) {
    memcpy(r, from, 4 * count);
    return;
  }
  if (at_once(t)) t.loads.back().values.assign(from, from + count);
  std::fill_n(r, count, kPoison);
}

void store_registers(uint32_t tmem, const uint32_t* r, uint32_t count) {
  Thread& t = self();
  aligned("tcgen05_st", uint64_t(tmem) << 32 | count);
  check_fence_after("tcgen05_st");
  const uint32_t lane = own_lane(tmem, count, "tcgen05_st"), column = tmem & 0xFFFF;
  check_work(*t.cta, column, count, true, "tcgen05_st");
  if (t.lane() == 0) t.cta->order->store_columns(t.index, column, count);
  t.stores.push_back({lane, column, count, nullptr, {}});
  if (machine->launch.mode == Mode::eager || at_once(t)) {
    memcpy(&t.cta->word(lane, column), r, 4 * count);
  } else {
    t.stores.back().values.assign(r, r + count);
  }
}

void wait_loads() {
  Thread& t = self();
  aligned("tcgen05_wait_ld", 0);
  for (const RegisterMove& m : t.loads) {
    if (machine->launch.mode == Mode::eager) continue;
    memcpy(m.to, m.values.empty() ? &t.cta->word(m.lane, m.column) : m.values.data(), 4 * m.count);
  }
  t.did_tensor_work = true;
  t.needs_fence_before |= !t.loads.empty();
  t.loads.clear();
  exchange("tcgen05_wait_ld", 0);
}

void wait_stores() {
  Thread& t = self();
  aligned("tcgen05_wait_st", 0);
  for (const RegisterMove& m : t.stores) {
    if (!m.values.empty()) memcpy(&t.cta->word(m.lane, m.column), m.values.data(), 4 * m.count);
  }
  t.did_tensor_work = true;
  t.needs_fence_before |= !t.stores.empty();
  t.stores.clear();
  exchange("tcgen05_wait_st", 0);
}

}  // namespace mxflash::simulator
