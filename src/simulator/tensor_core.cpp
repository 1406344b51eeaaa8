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

// An address whose lane must be 0: operands of products and copies.
uint32_t column_of(const Cta& c, uint32_t tmem, uint32_t count, const char* what) {
  if (tmem >> 16) fail("%s: lane must be 0, got %u", what, tmem >> 16);
  check_columns(c, tmem, count, what);
  return tmem;
}

// Operand rows [rows][32] as fp32.
void gather(Cta& c, uint64_t descriptor, Major major, Fp8Code code, uint32_t rows, float* to, const char* what) {
  if (const char* rule = ptx::broken_rule(descriptor, major)) fail("%s: %s", what, rule);
  const ptx::MatrixOperand m = ptx::decode_matrix(descriptor);
  const auto& table = decoded(code);
  // Pieces of 16 bytes that lie together: of K or of MN.
  if (major == Major::k) {
    for (uint32_t r = 0; r < rows; ++r) {
      for (uint32_t k = 0; k < 32; k += 16) {
        const uint8_t* from = async_read(c, ptx::operand_address(m, major, r, k), 16, what);
        for (uint32_t i = 0; i < 16; ++i) to[r * 32 + k + i] = table[from[i]];
      }
    }
  } else {
    for (uint32_t k = 0; k < 32; ++k) {
      for (uint32_t r = 0; r < rows; r += 8) {
        const uint8_t* from = async_read(c, ptx::operand_address(m, major, r, k), 8, what);
        for (uint32_t i = 0; i < 8; ++i) to[(r + i) * 32 + k] = table[from[i]];
      }
    }
  }
}

// Of operand rows, as fp64: products of two are then exact. All four quarters of the lanes must hold the same word.
void gather_scales(Cta& c, uint32_t tmem, uint32_t id, uint32_t rows, double* to, const char* what) {
  const uint32_t count = (rows + 31) / 32, first = column_of(c, tmem, (count + 3) / 4 * 4, what);
  if (first % 4) fail("%s: column must be a multiple of 4, got %u", what, first);
  for (uint32_t r = 0; r < rows; ++r) {
    const uint32_t word = c.word(r % 32, first + r / 32);
    for (uint32_t quarter = 1; quarter < 4; ++quarter) {
      if (c.word(r % 32 + 32 * quarter, first + r / 32) != word) {
        fail("%s: lanes %u and %u of column %u differ: scales must be the same in all four quarters", what, r % 32,
             r % 32 + 32 * quarter, first + r / 32);
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
  constexpr const char* kWhat = "tcgen05_mma";
  if (const char* rule = ptx::broken_rule(w.instruction)) fail("%s: %s", kWhat, rule);
  const ptx::DecodedInstruction i = ptx::decode_instruction(w.instruction);
  static float a[128 * 32], b[256 * 32], b_transposed[32 * 256], acc[256];
  static double sfa[128], sfb[256];
  const uint32_t d = column_of(c, w.d, i.n, "tcgen05_mma: D");
  uint32_t a_first = 0, a_count = 0;
  if (w.op == TensorOp::multiply_ss) {
    gather(c, w.a, i.a_major, i.a, 128, a, "tcgen05_mma: A");
  } else {
    if (i.a_major != Major::k) fail("%s: A in tensor memory must be K-major", kWhat);
    a_count = 8;
    a_first = column_of(c, uint32_t(w.a), a_count, "tcgen05_mma: A");
    const auto& table = decoded(i.a);
    for (uint32_t r = 0; r < 128; ++r) {
      for (uint32_t k = 0; k < 32; ++k) {
        a[r * 32 + k] = table[c.word(r, a_first + k / 4) >> (8 * (k % 4)) & 255];
      }
    }
  }
  gather(c, w.b, i.b_major, i.b, i.n, b, "tcgen05_mma: B");
  gather_scales(c, w.sfa, i.sfa_id, 128, sfa, "tcgen05_mma: scales of A");
  gather_scales(c, w.sfb, i.sfb_id, i.n, sfb, "tcgen05_mma: scales of B");
  const auto apart = [&](uint32_t first, uint32_t count, const char* what) {
    if (count && first < d + i.n && d < first + count) fail("%s: D overlaps %s", kWhat, what);
  };
  apart(a_first, a_count, "A");
  apart(w.sfa, 4, "the scales of A");
  apart(w.sfb, (i.n + 127) / 128 * 4, "the scales of B");
  for (uint32_t n = 0; n < i.n; ++n) {
    for (uint32_t k = 0; k < 32; ++k) b_transposed[k * i.n + n] = b[n * 32 + k];
  }
  for (uint32_t m = 0; m < 128; ++m) {
    multiply_rows(a + 32 * m, b_transposed, i.n, acc);
    uint32_t* const to = &c.word(m, d);
    for (uint32_t n = 0; n < i.n; ++n) {
      float sum = float(double(acc[n]) * (sfa[m] * sfb[n]));
      if (w.accumulate) sum += std::bit_cast<float>(to[n]);
      to[n] = std::bit_cast<uint32_t>(sum);
    }
  }
}

void copy_scales(Cta& c, const TensorWork& w) {
  constexpr const char* kWhat = "tcgen05_cp_scales";
  if (const char* rule = ptx::broken_rule(w.a, Major::k)) fail("%s: %s", kWhat, rule);
  const uint32_t first = column_of(c, w.d, 4, kWhat);
  if (first % 4) fail("%s: column must be a multiple of 4, got %u", kWhat, first);
  const ptx::MatrixOperand m = ptx::decode_matrix(w.a);
  if (m.swizzle != ptx::Swizzle::none) fail("%s: source must not be swizzled", kWhat);
  for (uint32_t r = 0; r < 32; ++r) {
    const uint8_t* from = async_read(c, ptx::operand_address(m, Major::k, r, 0), 16, kWhat);
    for (uint32_t quarter = 0; quarter < 4; ++quarter) memcpy(&c.word(r + 32 * quarter, first), from, 16);
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

void execute(Cta& c, const TensorWork& w) {
  switch (w.op) {
    case TensorOp::copy_scales: return copy_scales(c, w);
    case TensorOp::multiply_ss:
    case TensorOp::multiply_ts: return multiply(c, w);
    case TensorOp::commit: return barrier_arrive(c, w.d, true);
  }
}

void enqueue_tensor(const TensorWork& work) {
  Thread& t = self();
  TensorWork w = work;
  w.issuer = &t;
  if (w.op == TensorOp::commit) {
    barrier_check_fenced(*t.cta, w.d, "tcgen05_commit");
  } else {
    check_fence_after(w.op == TensorOp::copy_scales ? "tcgen05_cp_scales" : "tcgen05_mma");
  }
  if (machine->deferred()) {
    t.cta->tensor_queue.push_back(w);
  } else {
    execute(*t.cta, w);
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
  column_of(c, tmem, columns, "tcgen05_dealloc");
  std::fill_n(c.allocated.begin() + tmem, columns, false);
}

void load_registers(uint32_t tmem, uint32_t* r, uint32_t count) {
  Thread& t = self();
  aligned("tcgen05_ld", uint64_t(tmem) << 32 | count);
  check_fence_after("tcgen05_ld");
  const uint32_t lane = own_lane(tmem, count, "tcgen05_ld"), column = tmem & 0xFFFF;
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
