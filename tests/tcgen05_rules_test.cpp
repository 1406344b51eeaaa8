// Every rule of the simulator, broken once: the run ends with the words of that rule. And descriptors' values.
#include <gtest/gtest.h>

#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "ptx/bulk_copy.cuh"
#include "ptx/fault.cuh"
#include "ptx/global_order.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/tcgen05_semantics.h"
#include "ptx/tensor_copy.cuh"
#include "ptx/warp.cuh"
#include "runtime/tensor_map.h"
#include "simulator/simulator.h"

namespace mxflash {
namespace {

using simulator::Mode;

// Shared memory of the kernels here, beside tiles of 32 KiB from `tiles` on.
struct Memory {
  uint32_t base = (ptx::shared_address(ptx::dynamic_shared()) + 1023) / 1024 * 1024;
  uint32_t bar = base, tmem_at = base + 64, scales = base + 512, tiles = base + 1024;
};
constexpr uint32_t kBytes = 40 << 10;
alignas(128) uint8_t global[4096];

std::string run(const std::function<void()>& kernel, Mode mode = Mode::eager, uint32_t threads = 128, int fault = 0) {
  return simulator::run({.threads = threads,
                         .shared_bytes = kBytes,
                         .mode = mode,
                         .fault = fault,
                         .name_of = [](uint32_t offset) { return offset == 0 ? std::string("done") : std::string(); }},
                        kernel);
}

// A barrier for one arrival, scales of 1, tiles of zeros, and 256 columns of tensor memory, around `body`: in one warp.
void with_tensor_memory(const std::function<void(const Memory&, uint32_t tmem)>& body) {
  const Memory m;
  if (ptx::lane_id() == 0) {
    ptx::mbarrier_init(m.bar, 1);
    ptx::fence_mbarrier_init();
  }
  ptx::store_shared(m.scales + 16 * uint32_t(ptx::lane_id()),
                    make_uint4(~0u / 255 * 127, ~0u / 255 * 127, ~0u / 255 * 127, ~0u / 255 * 127));
  for (uint32_t i = uint32_t(ptx::lane_id()); i < 2048; i += 32)
    ptx::store_shared(m.tiles + 16 * i, make_uint4(0, 0, 0, 0));
  ptx::fence_proxy_async();
  ptx::tcgen05_alloc<256>(m.tmem_at);
  const auto tmem = ptx::load_shared<uint32_t>(m.tmem_at);
  body(m, tmem);
  __syncwarp();
  ptx::tcgen05_dealloc<256>(tmem);
}

constexpr uint32_t kScalesA = 160, kScalesB = 164, kOperandA = 192;
struct Product {
  uint32_t d = 0, a_column = kOperandA, sfa = kScalesA, sfb = kScalesB;
  uint32_t instruction = ptx::tcgen05_instruction({});
  uint64_t a_flip = 0, b_flip = 0;  // bits of the descriptors that are wrong
  uint32_t a_offset = 0, b_offset = 0;
  bool tensor_a = false, copy_scales = true;
};
void multiply(const Memory& m, uint32_t tmem, const Product& p) {
  if (ptx::tcgen05_elect()) {
    if (p.copy_scales) {
      ptx::tcgen05_cp_scales(tmem + kScalesA, ptx::tcgen05_scale_descriptor(m.scales));
      ptx::tcgen05_cp_scales(tmem + kScalesB, ptx::tcgen05_scale_descriptor(m.scales));
    }
    const uint64_t a = ptx::tcgen05_matrix_descriptor(m.tiles + p.a_offset, ptx::Swizzle::b128) ^ p.a_flip;
    const uint64_t b = ptx::tcgen05_matrix_descriptor(m.tiles + 16384 + p.b_offset, ptx::Swizzle::b128) ^ p.b_flip;
    if (p.tensor_a) {
      ptx::tcgen05_mma_block_scaled_ts(tmem + p.d, tmem + p.a_column, b, p.instruction, tmem + p.sfa, tmem + p.sfb,
                                       false);
    } else {
      ptx::tcgen05_mma_block_scaled_ss(tmem + p.d, a, b, p.instruction, tmem + p.sfa, tmem + p.sfb, false);
    }
    ptx::tcgen05_commit(m.bar);
  }
  ptx::mbarrier_wait(m.bar, 0);
  ptx::tcgen05_fence_after_thread_sync();
}
std::function<void()> product(const Product& p) {
  return [p] { with_tensor_memory([&](const Memory& m, uint32_t tmem) { multiply(m, tmem, p); }); };
}
std::function<void()> tensor(const std::function<void(const Memory&, uint32_t)>& body) {
  return [body] { with_tensor_memory(body); };
}

struct Rule {
  const char* name;
  const char* words;
  uint32_t threads;
  std::function<void()> kernel;
};
std::ostream& operator<<(std::ostream& out, const Rule& r) { return out << r.name; }

class BrokenRule : public testing::TestWithParam<Rule> {};

TEST_P(BrokenRule, EndsTheRunWithItsWords) {
  const Rule& r = GetParam();
  for (const Mode mode : {Mode::eager, Mode::deferred, Mode::reordered}) {
    EXPECT_NE(run(r.kernel, mode, r.threads).find(r.words), std::string::npos) << run(r.kernel, mode, r.threads);
  }
}

// The same kernels, nothing broken.
TEST(KeptRules, RunToTheEnd) {
  for (const Mode mode : {Mode::eager, Mode::deferred, Mode::reordered}) {
    EXPECT_EQ(run(product({}), mode, 32), "");
    EXPECT_EQ(run(tensor([](const Memory& m, uint32_t tmem) {
                    uint32_t r[8] = {};
                    ptx::tcgen05_st(tmem + kOperandA, r);
                    ptx::tcgen05_wait_st();
                    // Lanes 32.. are not this warp's: A is read with what they hold, zeros or not.
                    multiply(m, tmem, {.tensor_a = true});
                    ptx::tcgen05_ld(tmem, r);
                    ptx::tcgen05_wait_ld(r);
                  }),
                  mode, 32),
              "");
  }
}

const Rule kProducts[] = {
    {"version", "bits 46..48 must be 1", 32, product({.a_flip = uint64_t(1) << 46})},
    {"base_offset", "base offset must be 0", 32, product({.b_flip = uint64_t(1) << 49})},
    {"reserved_bits", "bits 52..60 must be 0", 32, product({.b_flip = uint64_t(1) << 55})},
    {"swizzle", "swizzle must be 0, 2, 4 or 6", 32, product({.a_flip = uint64_t(1) << 61})},
    {"step_crosses_span", "must begin inside the first row of an atom", 32, product({.a_offset = 112})},
    {"not_at_an_atom", "must begin inside the first row of an atom", 32, product({.b_offset = 128})},
    {"mn_major_not_at_an_atom", "an MN-major operand must begin with an atom", 32,
     product({.instruction = ptx::tcgen05_instruction({.b_major = ptx::Major::mn}), .b_offset = 32})},
    {"stride_no_atom", "stride must be a multiple of the atom", 32, product({.a_flip = uint64_t(1) << 32})},
    {"outside_shared", "outside of", 32, product({.b_offset = 16384})},
    {"n_of_4", "n must be in 8..256", 32, product({.instruction = ptx::tcgen05_instruction({.n = 4})})},
    {"n_of_8_mn_major", "n must be a multiple of 16 with B MN-major", 32,
     product({.instruction = ptx::tcgen05_instruction({.n = 8, .b_major = ptx::Major::mn})})},
    {"m_of_64", "m must be 128", 32, product({.instruction = ptx::tcgen05_instruction({}) & ~(1u << 27)})},
    {"no_ue8m0", "scales must be UE8M0", 32, product({.instruction = ptx::tcgen05_instruction({}) & ~(1u << 23)})},
    {"negated", "bits 0..3, 6, 13, 14, 24..26 and 31 must be 0", 32,
     product({.instruction = ptx::tcgen05_instruction({}) | 1u << 13})},
    {"element", "only E4M3 and E5M2", 32, product({.instruction = ptx::tcgen05_instruction({.a = ptx::Fp8Code(3)})})},
    {"a_in_tensor_memory_mn_major", "A in tensor memory must be K-major", 32,
     product({.instruction = ptx::tcgen05_instruction({.a_major = ptx::Major::mn}), .tensor_a = true})},
    {"d_behind_the_allocation", "is not allocated", 32, product({.d = 129})},
    {"d_over_scales", "scales of A overlaps D", 32, product({.d = 64})},
    {"d_over_a", "tcgen05_mma: A overlaps D", 32, product({.d = 20, .a_column = 140, .tensor_a = true})},
    {"scales_not_at_4", "column must be a multiple of 4", 32, product({.sfa = kScalesA + 2})},
    {"scales_of_72_rows_not_at_4", "column must be a multiple of 4", 32,
     product({.sfb = kScalesB + 2, .instruction = ptx::tcgen05_instruction({.n = 72})})},
    {"scales_of_64_rows_not_at_2", "column must be a multiple of 2", 32,
     product({.sfb = kScalesB + 1, .instruction = ptx::tcgen05_instruction({.n = 64})})},
    {"scales_of_one_warp", "scales must be the same in all four quarters", 32,
     tensor([](const Memory& m, uint32_t tmem) {
       uint32_t words[4] = {~0u / 255 * 127, ~0u / 255 * 127, ~0u / 255 * 127, ~0u / 255 * 127};
       ptx::tcgen05_st(tmem + kScalesA, words);
       ptx::tcgen05_wait_st();
       multiply(m, tmem, {.copy_scales = false});
     })},
    {"lane_of_an_operand", "lane must be 0", 32, product({.d = 32u << 16})},
};
INSTANTIATE_TEST_SUITE_P(Products, BrokenRule, testing::ValuesIn(kProducts),
                         [](const auto& info) { return std::string(info.param.name); });

const Rule kTensorMemory[] = {
    {"lanes_of_another_warp", "warp 0 reaches lanes 0..31, the address names lane 32", 32,
     tensor([](const Memory&, uint32_t tmem) {
       uint32_t r[4];
       ptx::tcgen05_ld(tmem + (32u << 16), r);
     })},
    {"ld_behind_the_allocation", "is not allocated", 32, tensor([](const Memory&, uint32_t tmem) {
       uint32_t r[4];
       ptx::tcgen05_ld(tmem + 253, r);
     })},
    {"ld_by_half_a_warp", "did not run the same .aligned instructions", 32, tensor([](const Memory&, uint32_t tmem) {
       uint32_t r[4];
       if (ptx::lane_id() < 16) ptx::tcgen05_ld(tmem, r);
       __syncwarp();
     })},
    {"ld_of_two_addresses", "did not run the same .aligned instructions", 32, tensor([](const Memory&, uint32_t tmem) {
       uint32_t r[4];
       ptx::tcgen05_ld(tmem + uint32_t(ptx::lane_id()) / 16, r);
       ptx::tcgen05_wait_ld(r);
     })},
    {"no_fence_after_a_commit", "tcgen05_ld after a wait for tcgen05 work without tcgen05_fence_after_thread_sync", 32,
     tensor([](const Memory& m, uint32_t tmem) {
       if (ptx::tcgen05_elect()) {
         ptx::tcgen05_cp_scales(tmem, ptx::tcgen05_scale_descriptor(m.scales));
         ptx::tcgen05_commit(m.bar);
       }
       ptx::mbarrier_wait(m.bar, 0);
       uint32_t r[4];
       ptx::tcgen05_ld(tmem, r);
     })},
    {"no_fence_before_an_arrival",
     "mbarrier_arrive after tcgen05_wait_ld or _st without tcgen05_fence_before_thread_sync", 32,
     tensor([](const Memory& m, uint32_t tmem) {
       uint32_t r[4] = {};
       ptx::tcgen05_st(tmem, r);
       ptx::tcgen05_wait_st();
       ptx::mbarrier_arrive(m.bar);
     })},
    {"no_dealloc", "ended without tcgen05_dealloc", 32, [] { ptx::tcgen05_alloc<32>(Memory{}.tmem_at); }},
    {"alloc_too_much", "tcgen05_alloc of 512 columns", 32,
     tensor([](const Memory& m, uint32_t) { ptx::tcgen05_alloc<512>(m.tmem_at + 4); })},
    {"alloc_after_relinquish", "tcgen05_alloc after tcgen05_relinquish_alloc_permit", 32,
     tensor([](const Memory& m, uint32_t) {
       ptx::tcgen05_relinquish_alloc_permit();
       ptx::tcgen05_alloc<32>(m.tmem_at + 4);
     })},
    {"store_without_fence", "stored there without fence_proxy_async", 32, tensor([](const Memory& m, uint32_t tmem) {
       if (ptx::lane_id() == 0) ptx::store_shared(m.tiles + 4, 0u);
       __syncwarp();
       multiply(m, tmem, {});
     })},
};
INSTANTIATE_TEST_SUITE_P(TensorMemory, BrokenRule, testing::ValuesIn(kTensorMemory),
                         [](const auto& info) { return std::string(info.param.name); });

// Of lane 0, with an initialised mbarrier for one arrival.
std::function<void()> lane0(const std::function<void(const Memory&)>& body) {
  return [body] {
    const Memory m;
    if (ptx::lane_id() != 0) return;
    ptx::mbarrier_init(m.bar, 1);
    ptx::fence_mbarrier_init();
    body(m);
  };
}

const Rule kSynchronisation[] = {
    {"no_barrier", "where no mbarrier is", 32, [] { ptx::mbarrier_arrive(Memory{}.bar); }},
    {"barrier_not_aligned", "no multiple of 8", 32, lane0([](const Memory& m) { ptx::mbarrier_init(m.bar + 4, 1); })},
    {"barrier_twice", "mbarrier done is initialised twice", 32,
     lane0([](const Memory& m) { ptx::mbarrier_init(m.bar, 1); })},
    {"barrier_without_fence", "initialised without fence_mbarrier_init", 32, lane0([](const Memory& m) {
       ptx::mbarrier_init(m.bar + 8, 1);
       ptx::bulk_load(m.tiles, global, 16, m.bar + 8);
     })},
    {"too_many_arrivals", "more arrivals than 2 in a phase", 32, lane0([](const Memory& m) {
       ptx::mbarrier_init(m.bar + 8, 2);
       ptx::fence_mbarrier_init();
       ptx::mbarrier_arrive_expect_tx(m.bar + 8, 16);
       ptx::mbarrier_arrive(m.bar + 8);
       ptx::mbarrier_arrive(m.bar + 8);
     })},
    {"store_over_a_barrier", "store over mbarrier done", 32,
     lane0([](const Memory& m) { ptx::store_shared(m.bar, 0u); })},
    {"copy_over_a_barrier", "bulk_load over mbarrier done", 32, lane0([](const Memory& m) {
       ptx::mbarrier_arrive_expect_tx(m.bar, 16);
       ptx::bulk_load(m.bar, global, 16, m.bar);
       ptx::mbarrier_wait(m.bar, 0);
     })},
    {"nobody_arrives", "32 lanes: waits for the phase of parity 0 of mbarrier done (phase 0, 1 of 1 arrivals missing",
     32,
     [] {
       const Memory m;
       if (ptx::lane_id() == 0) ptx::mbarrier_init(m.bar, 1);
       __syncwarp();
       ptx::mbarrier_wait(m.bar, 0);
     }},
    {"bytes_missing", "0 of 1 arrivals missing, 16 bytes missing", 32, lane0([](const Memory& m) {
       ptx::mbarrier_arrive_expect_tx(m.bar, 32);
       ptx::bulk_load(m.tiles, global, 16, m.bar);
       ptx::mbarrier_wait(m.bar, 0);
     })},
    {"lanes_missing", "31 lanes: waits in __syncwarp (31 of 32 lanes are there)", 32,
     [] {
       if (ptx::lane_id() != 3) __syncwarp();
     }},
    {"threads_missing", "waits at named barrier 1 (32 of 64 threads are there)", 64,
     [] {
       if (threadIdx.x < 32) ptx::named_barrier_sync(1, 64);
     }},
    {"threads_disagree", "named barrier 1: some expect", 64,
     [] { ptx::named_barrier_sync(1, threadIdx.x < 32 ? 64 : 96); }},
    {"barrier_by_half_a_warp", "did not run the same .aligned instructions", 64,
     [] {
       if (ptx::lane_id() < 16) ptx::named_barrier_sync(1, 32);
       __syncwarp();
     }},
    {"two_meetings", "lanes of a warp meet in", 32,
     [] {
       if (ptx::lane_id() < 16) {
         __syncwarp();
       } else {
         __shfl_sync(~0u, 0, 0);
       }
     }},
    {"half_a_mask", "only whole warps are simulated", 32, [] { __syncwarp(0xFFFF); }},
    {"exit_with_a_load", "copies to its shared memory were on their way", 32, lane0([](const Memory& m) {
       ptx::mbarrier_arrive_expect_tx(m.bar, 32);
       ptx::bulk_load(m.tiles, global, 16, m.bar);
     })},
    {"copy_not_aligned", "addresses and size must be multiples of 16", 32,
     lane0([](const Memory& m) { ptx::bulk_load(m.tiles + 8, global, 16, m.bar); })},
    {"load_not_aligned", "is not aligned", 32, lane0([](const Memory& m) { ptx::load_shared<uint4>(m.tiles + 8); })},
    {"load_outside", "outside of", 32, lane0([](const Memory& m) { ptx::load_shared<uint4>(m.base + kBytes); })},
    {"map_of_nobody", "with a tensor map that nobody made", 32, lane0([](const Memory& m) {
       const ptx::TensorMap map{};
       ptx::tensor_load_3d(m.tiles, &map, 0, 0, 0, m.bar);
     })},
    {"box_not_at_an_atom", "shared address must be a multiple of 1024", 32, lane0([](const Memory& m) {
       ptx::TensorMap map{};
       (void)make_tensor_map("x",
                             {.base = global,
                              .extent = {128, 1, 32},
                              .stride = {128, 128},
                              .box = {128, 1, 8},
                              .swizzle = ptx::Swizzle::b128},
                             map);
       ptx::tensor_load_3d(m.tiles + 128, &map, 0, 0, 0, m.bar);
     })},
    {"box_stored_before_the_tensor", "coordinates must not be negative", 32, lane0([](const Memory& m) {
       ptx::TensorMap map{};
       (void)make_tensor_map("x",
                             {.base = global,
                              .extent = {128, 1, 32},
                              .stride = {128, 128},
                              .box = {128, 1, 8},
                              .swizzle = ptx::Swizzle::b128},
                             map);
       ptx::tensor_store_3d(&map, 0, 0, -1, m.tiles);
     })},
    {"trap", "__trap (CTA 0, warp 0, lane 0)", 32, [] { __trap(); }},
};
INSTANTIATE_TEST_SUITE_P(Synchronisation, BrokenRule, testing::ValuesIn(kSynchronisation),
                         [](const auto& info) { return std::string(info.param.name); });

// What only shows when engines are late: work that has been issued is in the way until it is known to be done.
std::function<void()> behind_a_product(const std::function<void(const Memory&, uint32_t tmem)>& too_early) {
  return tensor([too_early](const Memory& m, uint32_t tmem) {
    const bool elected = ptx::tcgen05_elect();
    if (elected) {
      ptx::tcgen05_cp_scales(tmem + kScalesA, ptx::tcgen05_scale_descriptor(m.scales));
      ptx::tcgen05_cp_scales(tmem + kScalesB, ptx::tcgen05_scale_descriptor(m.scales));
      const uint64_t a = ptx::tcgen05_matrix_descriptor(m.tiles, ptx::Swizzle::b128);
      ptx::tcgen05_mma_block_scaled_ts(tmem, tmem + kOperandA, a, ptx::tcgen05_instruction({}), tmem + kScalesA,
                                       tmem + kScalesB, false);
      ptx::tcgen05_commit(m.bar);
    }
    __syncwarp();
    too_early(m, tmem);
    ptx::mbarrier_wait(m.bar, 0);
    ptx::tcgen05_fence_after_thread_sync();
  });
}
struct Hazard {
  const char* name;
  const char* words;
  std::function<void()> kernel;
};
const Hazard kHazards[] = {
    {"ld of D", "tcgen05_ld at column 8: work on its way writes it (tcgen05_mma: D)",
     behind_a_product([](const Memory&, uint32_t tmem) {
       uint32_t r[4];
       ptx::tcgen05_ld(tmem + 8, r);
       ptx::tcgen05_wait_ld(r);
     })},
    {"st over A", "tcgen05_st at column 192: work on its way reads it (tcgen05_mma: A)",
     behind_a_product([](const Memory&, uint32_t tmem) {
       const uint32_t r[4] = {};
       ptx::tcgen05_st(tmem + kOperandA, r);
       ptx::tcgen05_wait_st();
     })},
    {"st over scales", "tcgen05_st at column 160: work on its way", behind_a_product([](const Memory&, uint32_t tmem) {
       const uint32_t r[4] = {};
       ptx::tcgen05_st(tmem + kScalesA, r);
       ptx::tcgen05_wait_st();
     })},
    {"store over B", "tcgen05 work or a copy still reads it", behind_a_product([](const Memory& m, uint32_t) {
       if (ptx::lane_id() == 0) ptx::store_shared(m.tiles, 0u);
     })},
    {"copy over B", "bulk_load to shared address", behind_a_product([](const Memory& m, uint32_t) {
       if (ptx::lane_id() != 0) return;
       ptx::mbarrier_init(m.bar + 8, 1);
       ptx::fence_mbarrier_init();
       ptx::mbarrier_arrive_expect_tx(m.bar + 8, 16);
       ptx::bulk_load(m.tiles, global, 16, m.bar + 8);
       ptx::mbarrier_wait(m.bar + 8, 0);
     })},
    {"product before its st is waited for", "tcgen05_mma: A: warp 0 has not waited for its tcgen05_st to column 192",
     tensor([](const Memory& m, uint32_t tmem) {
       const uint32_t r[4] = {};
       ptx::tcgen05_st(tmem + kOperandA, r);
       multiply(m, tmem, {.tensor_a = true});
     })},
    {"product over a ld", "tcgen05_mma: D: warp 0 has not waited for its tcgen05_ld of column 8",
     tensor([](const Memory& m, uint32_t tmem) {
       uint32_t r[4];
       ptx::tcgen05_ld(tmem + 8, r);
       multiply(m, tmem, {});
     })},
    {"product before its tile has come", "a copy is still on its way there", tensor([](const Memory& m, uint32_t tmem) {
       if (ptx::lane_id() == 0) {
         ptx::mbarrier_init(m.bar + 8, 1);
         ptx::fence_mbarrier_init();
         ptx::mbarrier_arrive_expect_tx(m.bar + 8, 16);
         ptx::bulk_load(m.tiles, global, 16, m.bar + 8);
       }
       multiply(m, tmem, {});
       ptx::mbarrier_wait(m.bar + 8, 0);
     })},
    {"load of a tile that has not come", "load at shared address", lane0([](const Memory& m) {
       ptx::mbarrier_arrive_expect_tx(m.bar, 16);
       ptx::bulk_load(m.tiles, global, 16, m.bar);
       ptx::load_shared<uint32_t>(m.tiles);
       ptx::mbarrier_wait(m.bar, 0);
     })},
    {"two copies to one place", "another copy is on its way there", lane0([](const Memory& m) {
       ptx::mbarrier_arrive_expect_tx(m.bar, 32);
       ptx::bulk_load(m.tiles, global, 16, m.bar);
       ptx::bulk_load(m.tiles, global, 16, m.bar);
       ptx::mbarrier_wait(m.bar, 0);
     })},
    {"store over what a bulk store reads", "tcgen05 work or a copy still reads it", lane0([](const Memory& m) {
       ptx::bulk_store(global, m.tiles, 16);
       ptx::bulk_commit();
       ptx::store_shared(m.tiles, 0u);
       ptx::bulk_wait<0>();
     })},
    {"dealloc", "tcgen05_dealloc while tcgen05 work is on its way",
     [] {
       const Memory m;
       if (ptx::lane_id() == 0) {
         ptx::mbarrier_init(m.bar, 1);
         ptx::fence_mbarrier_init();
         ptx::store_shared(m.scales, 0u);
       }
       ptx::fence_proxy_async();
       ptx::tcgen05_alloc<32>(m.tmem_at);
       const auto tmem = ptx::load_shared<uint32_t>(m.tmem_at);
       if (ptx::tcgen05_elect()) {
         ptx::tcgen05_cp_scales(tmem, ptx::tcgen05_scale_descriptor(m.scales));
         ptx::tcgen05_commit(m.bar);
       }
       ptx::tcgen05_dealloc<32>(tmem);
     }},
};
TEST(LateEngines, MakeHazardsShow) {
  for (const Hazard& h : kHazards) {
    for (const Mode mode : {Mode::deferred, Mode::reordered}) {
      // Under some schedules the work is done before anybody is in its way.
      int shown = 0;
      std::string errors;
      for (uint64_t seed = 1; seed <= 20; ++seed) {
        const std::string error =
            simulator::run({.threads = 32, .shared_bytes = kBytes, .mode = mode, .seed = seed}, h.kernel);
        shown += error.find(h.words) != std::string::npos;
        if (!error.empty()) errors = error;
      }
      EXPECT_GE(shown, 5) << h.name << ": " << errors;
    }
  }
}

// What no barrier orders is an error even where it happens in order: in mode eager, warp 0 before warp 1.
struct Unordered {
  const char* name;
  const char* words;
  // Of two warps, `first` in warp 0, `second` in warp 1; a barrier for an arrival is between them or not.
  std::function<void(const Memory&, uint32_t tmem)> first, second;
};
std::function<void()> in_two_warps(const Unordered& u, bool ordered) {
  return [u, ordered] {
    const Memory m;
    if (threadIdx.x == 0) {
      for (uint32_t i = 0; i < 3; ++i) ptx::mbarrier_init(m.bar + 8 * i, 1);
      ptx::fence_mbarrier_init();
    }
    for (uint32_t i = threadIdx.x; i < 32; i += 64) {
      ptx::store_shared(m.scales + 16 * i,
                        make_uint4(~0u / 255 * 127, ~0u / 255 * 127, ~0u / 255 * 127, ~0u / 255 * 127));
    }
    ptx::fence_proxy_async();
    if (threadIdx.x < 32) ptx::tcgen05_alloc<64>(m.tmem_at);
    __syncthreads();
    const auto tmem = ptx::load_shared<uint32_t>(m.tmem_at);
    if (threadIdx.x < 32) {
      u.first(m, tmem);
      ptx::tcgen05_fence_before_thread_sync();
      __syncwarp();
      if (ordered && threadIdx.x == 0) ptx::mbarrier_arrive(m.bar);
    } else {
      if (ordered) ptx::mbarrier_wait(m.bar, 0);
      const int32_t nothing = 0;
      for (int i = 0; i < 20; ++i) ptx::load_relaxed(&nothing);  // lets warp 0 go ahead
      ptx::tcgen05_fence_after_thread_sync();
      u.second(m, tmem);
    }
    ptx::tcgen05_fence_before_thread_sync();
    __syncthreads();
    ptx::tcgen05_fence_after_thread_sync();
    if (threadIdx.x < 32) ptx::tcgen05_dealloc<64>(tmem);
  };
}
void copy_scales(const Memory& m, uint32_t tmem) {
  if (ptx::tcgen05_elect()) {
    ptx::tcgen05_cp_scales(tmem, ptx::tcgen05_scale_descriptor(m.scales));
    ptx::tcgen05_commit(m.bar + 8);
  }
}
void copy_scales_and_wait(const Memory& m, uint32_t tmem) {
  copy_scales(m, tmem);
  ptx::mbarrier_wait(m.bar + 8, 0);
  ptx::tcgen05_fence_after_thread_sync();
}
void load_own_lanes(const Memory&, uint32_t tmem) {
  uint32_t r[4];
  ptx::tcgen05_ld(tmem + ((threadIdx.x & 32) << 16), r);
  ptx::tcgen05_wait_ld(r);
}
void store_own_lanes(const Memory&, uint32_t tmem) {
  const uint32_t r[4] = {};
  ptx::tcgen05_st(tmem + ((threadIdx.x & 32) << 16), r);
  ptx::tcgen05_wait_st();
}
void store_a_word(const Memory& m, uint32_t) {
  if (ptx::lane_id() == 0) ptx::store_shared(m.tiles, 0u);
  ptx::fence_proxy_async();
}
void load_a_word(const Memory& m, uint32_t) { ptx::load_shared<uint32_t>(m.tiles); }
void copy_in_and_wait(const Memory& m, uint32_t) {
  if (ptx::lane_id() == 0) {
    ptx::mbarrier_arrive_expect_tx(m.bar + 16, 512);
    ptx::bulk_load(m.tiles, global, 512, m.bar + 16);
  }
  ptx::mbarrier_wait(m.bar + 16, 0);
}
void copy_out(const Memory& m, uint32_t) {
  if (ptx::lane_id() != 0) return;
  ptx::bulk_store(global, m.tiles, 16);
  ptx::bulk_commit();
  ptx::bulk_wait<0>();
}
const Unordered kUnordered[] = {
    {"store, load", "a store there by warp 0 is done", store_a_word, load_a_word},
    {"load, store", "a load there by warp 0 is done", load_a_word, store_a_word},
    {"store, store", "a store there by warp 0 is done", store_a_word, store_a_word},
    {"store, copy out", "bulk_store: shared address", store_a_word, copy_out},
    {"load, copy in", "bulk_load: shared address", load_a_word, copy_in_and_wait},
    {"copy in, load", "a copy there by warp 0 is done", copy_in_and_wait, load_a_word},
    {"scales to columns, ld", "tensor work there by warp 0 is done", copy_scales_and_wait, load_own_lanes},
    {"scales to columns, st", "tensor work there by warp 0 is done", copy_scales_and_wait, store_own_lanes},
    {"ld, scales to columns", "a load there by warp 0 is done", load_own_lanes, copy_scales_and_wait},
    {"st, scales to columns", "a store there by warp 0 is done", store_own_lanes, copy_scales_and_wait},
    {"scales to columns, store over them", "tensor work there by warp 0 is done", copy_scales_and_wait,
     [](const Memory& m, uint32_t) {
       if (ptx::lane_id() == 0) ptx::store_shared(m.scales, 0u);
     }},
    {"copy out, store", "a copy there by warp 0 is done", copy_out, store_a_word},
};
TEST(Order, MustComeFromBarriers) {
  for (const Unordered& u : kUnordered) {
    for (const Mode mode : {Mode::eager, Mode::deferred, Mode::reordered}) {
      EXPECT_EQ(run(in_two_warps(u, true), mode, 64), "") << u.name;
    }
    EXPECT_NE(run(in_two_warps(u, false), Mode::eager, 64).find(u.words), std::string::npos)
        << u.name << ": " << run(in_two_warps(u, false), Mode::eager, 64);
  }
}

TEST(LateEngines, ArriveBeforeACtaEnds) {
  const auto kernel = tensor([](const Memory& m, uint32_t tmem) {
    if (ptx::lane_id() == 0) {
      ptx::mbarrier_init(m.bar + 8, 1);
      ptx::fence_mbarrier_init();
    }
    __syncwarp();
    if (ptx::tcgen05_elect()) {
      ptx::tcgen05_cp_scales(tmem, ptx::tcgen05_scale_descriptor(m.scales));
      ptx::tcgen05_commit(m.bar + 8);
      ptx::tcgen05_commit(m.bar);
    }
    ptx::mbarrier_wait(m.bar, 0);
    ptx::tcgen05_fence_after_thread_sync();
  });
  EXPECT_NE(run(kernel, Mode::eager, 32).find("nobody has waited for a tcgen05_commit at mbarrier shared memory + 8"),
            std::string::npos);
}

// Bulk stores that have been read land, even after the CTA's end.
TEST(LateEngines, LandAfterACtaEnds) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    std::fill(std::begin(global), std::end(global), uint8_t(0));
    EXPECT_EQ(simulator::run({.threads = 32, .shared_bytes = kBytes, .mode = Mode::deferred, .seed = seed},
                             lane0([](const Memory& m) {
                               ptx::store_shared(m.tiles, make_uint4(1, 2, 3, 4));
                               ptx::fence_proxy_async();
                               ptx::bulk_store(global, m.tiles, 16);
                               ptx::bulk_commit();
                               ptx::bulk_wait_read<0>();
                             })),
              "");
    EXPECT_EQ(global[12], 4);
  }
}

// Nor are lanes of a warp ordered without __syncwarp; and an arrival is one lane's.
TEST(Order, IsNotGivenByTheWarp) {
  const auto exchange_words = [](bool synchronised) {
    return [synchronised] {
      const Memory m;
      ptx::store_shared(m.tiles + 4 * threadIdx.x, threadIdx.x);
      if (synchronised) __syncwarp();
      ptx::load_shared<uint32_t>(m.tiles + 4 * (threadIdx.x ^ 1));
    };
  };
  const auto arrive_for_the_warp = [](bool synchronised) {
    return [synchronised] {
      const Memory m;
      if (threadIdx.x == 0) {
        ptx::mbarrier_init(m.bar, 1);
        ptx::fence_mbarrier_init();
      }
      __syncthreads();
      if (threadIdx.x < 32) {
        ptx::store_shared(m.tiles + 4 * threadIdx.x, threadIdx.x);
        if (synchronised) __syncwarp();
        if (threadIdx.x == 0) ptx::mbarrier_arrive(m.bar);
      } else {
        ptx::mbarrier_wait(m.bar, 0);
        ptx::load_shared<uint32_t>(m.tiles + 4 * (threadIdx.x - 32));
      }
    };
  };
  const auto wait_for_the_warp = [](bool synchronised) {
    return [synchronised] {
      const Memory m;
      if (threadIdx.x == 0) {
        ptx::mbarrier_init(m.bar, 1);
        ptx::fence_mbarrier_init();
      }
      __syncthreads();
      if (threadIdx.x == 0) {
        ptx::store_shared(m.tiles, 0u);
        ptx::mbarrier_arrive(m.bar);
      } else if (threadIdx.x >= 32) {
        if (threadIdx.x == 32) ptx::mbarrier_wait(m.bar, 0);
        if (synchronised) __syncwarp();
        ptx::load_shared<uint32_t>(m.tiles);
      }
    };
  };
  for (const Mode mode : {Mode::eager, Mode::deferred, Mode::reordered}) {
    EXPECT_EQ(run(exchange_words(true), mode, 32), "");
    EXPECT_EQ(run(arrive_for_the_warp(true), mode, 64), "");
    EXPECT_EQ(run(wait_for_the_warp(true), mode, 64), "");
    EXPECT_NE(run(exchange_words(false), mode, 32).find("no barrier tells this thread that"), std::string::npos);
    EXPECT_NE(run(arrive_for_the_warp(false), mode, 64), "");
    EXPECT_NE(run(wait_for_the_warp(false), mode, 64), "");
  }
}

// The same warp must wait for its own tensor work, and for its own copies.
TEST(Order, IsNotGivenByTheIssue) {
  const auto ld = in_two_warps({"", "",
                                [](const Memory& m, uint32_t tmem) {
                                  copy_scales(m, tmem);
                                  load_own_lanes(m, tmem);
                                },
                                [](const Memory&, uint32_t) {}},
                               false);
  EXPECT_NE(run(ld, Mode::eager, 64).find("tensor work there by warp 0 is done"), std::string::npos)
      << run(ld, Mode::eager, 64);
  const auto load = lane0([](const Memory& m) {
    ptx::mbarrier_arrive_expect_tx(m.bar, 16);
    ptx::bulk_load(m.tiles, global, 16, m.bar);
    ptx::load_shared<uint32_t>(m.tiles);
  });
  EXPECT_NE(run(load, Mode::eager, 32).find("a copy there by warp 0 is done"), std::string::npos);
}

// A thread that is late at a barrier must not miss a phase of it.
TEST(LateEngines, MayNotGoTwoPhasesAhead) {
  const auto kernel = [] {
    const Memory m;
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(m.bar, 1);
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2; ++i) {
        ptx::mbarrier_arrive(m.bar);
        ptx::mbarrier_wait(m.bar, uint32_t(i));
      }
    }
    if (threadIdx.x >= 32) ptx::mbarrier_wait(m.bar, 0);
  };
  int shown = 0;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    const std::string error =
        simulator::run({.threads = 64, .shared_bytes = kBytes, .mode = Mode::deferred, .seed = seed}, kernel);
    shown += error.find("ends a phase before warp 1 has seen the end of the last one") != std::string::npos;
  }
  EXPECT_GE(shown, 3);
}

TEST(LateEngines, AreDoneBeforeACtaEnds) {
  const auto store = lane0([](const Memory& m) {
    ptx::bulk_store(global, m.tiles, 16);
    ptx::bulk_commit();
  });
  EXPECT_NE(run(store, Mode::deferred, 32).find("bulk copies of warp 0 still read its shared memory"),
            std::string::npos);
}

// Two products with different accumulators, the second reading as A what the first leaves: in order by luck only.
// Numbers show it, where a queue was reordered; the rule, wherever the first was not done.
TEST(LateEngines, ReorderWhatTheIsaLeavesUnordered) {
  const auto kernel = tensor([](const Memory& m, uint32_t tmem) {
    if (ptx::tcgen05_elect()) {
      ptx::tcgen05_cp_scales(tmem + kScalesA, ptx::tcgen05_scale_descriptor(m.scales));
      ptx::tcgen05_cp_scales(tmem + kScalesB, ptx::tcgen05_scale_descriptor(m.scales));
      const uint64_t a = ptx::tcgen05_matrix_descriptor(m.tiles, ptx::Swizzle::b128);
      const uint32_t instruction = ptx::tcgen05_instruction({.n = 8});
      ptx::tcgen05_mma_block_scaled_ss(tmem, a, a, instruction, tmem + kScalesA, tmem + kScalesB, false);
      ptx::tcgen05_mma_block_scaled_ts(tmem + 16, tmem, a, instruction, tmem + kScalesA, tmem + kScalesB, false);
      ptx::tcgen05_commit(m.bar);
    }
    ptx::mbarrier_wait(m.bar, 0);
    ptx::tcgen05_fence_after_thread_sync();
    uint32_t r[1];
    ptx::tcgen05_ld(tmem + 16, r);
    ptx::tcgen05_wait_ld(r);
    if (r[0] != 0) __trap();  // A was poison
  });
  const auto traps = [&](Mode mode) {
    int count = 0;
    for (uint64_t seed = 1; seed <= 40; ++seed) {
      count += !simulator::run({.threads = 32, .shared_bytes = kBytes, .mode = mode, .seed = seed}, kernel).empty();
    }
    return count;
  };
  EXPECT_EQ(traps(Mode::eager), 0);
  EXPECT_EQ(traps(Mode::deferred), 0);
  EXPECT_GT(traps(Mode::reordered), 5);
}

TEST(Simulator, RunsManyCtasAndCountsThem) {
  int started = 0, together = 0, most = 0;
  const auto kernel = [&] {
    if (threadIdx.x == 0) most = std::max(most, ++together), ++started;
    __syncthreads();
    if (threadIdx.x == 0) --together;
  };
  EXPECT_EQ(simulator::run({.grid = 7, .threads = 64, .ctas_at_once = 3}, kernel), "");
  EXPECT_EQ(started, 7);
  EXPECT_EQ(most, 3);
}

TEST(Simulator, GivesTheSameRunForTheSameSeed) {
  const auto order = [](uint64_t seed) {
    std::vector<uint32_t> seen;
    const std::string error = simulator::run({.threads = 256, .mode = Mode::deferred, .seed = seed}, [&] {
      for (int i = 0; i < 3; ++i) {
        __syncwarp();
        if (ptx::lane_id() == 0) seen.push_back(threadIdx.x);
      }
    });
    EXPECT_EQ(error, "");
    return seen;
  };
  EXPECT_EQ(order(5), order(5));
  EXPECT_NE(order(5), order(6));
}

TEST(Simulator, SwitchesOnOneFault) {
  const auto kernel = [] {
    if (ptx::fault(3)) __trap();
  };
  EXPECT_EQ(run(kernel, Mode::eager, 32, 0), "");
  EXPECT_EQ(run(kernel, Mode::eager, 32, 2), "");
  EXPECT_NE(run(kernel, Mode::eager, 32, 3), "");
}

TEST(Simulator, ShufflesAsCudaDoes) {
  EXPECT_EQ(run(
                [] {
                  const int lane = ptx::lane_id();
                  if (__shfl_sync(~0u, lane, 5) != 5 || __shfl_xor_sync(~0u, lane, 3) != (lane ^ 3)) __trap();
                  if (__shfl_up_sync(~0u, lane, 1) != std::max(lane - 1, 0)) __trap();
                  if (__shfl_down_sync(~0u, lane, 2) != (lane > 29 ? lane : lane + 2)) __trap();
                  if (__ballot_sync(~0u, lane % 2) != 0xAAAAAAAA || !__any_sync(~0u, lane == 9)) __trap();
                  if (__all_sync(~0u, lane < 31) || __reduce_max_sync(~0u, uint32_t(lane)) != 31) __trap();
                  if (__byte_perm(0x33221100, 0x77665544, 0x7351) != 0x77335511) __trap();
                },
                Mode::deferred, 32),
            "");
}

// ---- descriptors ---------------------------------------------------------------------------------------------------

// PTX ISA's bits, one by one.
static_assert(ptx::tcgen05_instruction({}) == 0x08A00000);
static_assert(ptx::tcgen05_instruction({.b_major = ptx::Major::mn}) == 0x08A10000);
static_assert(ptx::tcgen05_instruction({.n = 64, .a = ptx::Fp8Code::e5m2}) == 0x08900080);
static_assert(ptx::tcgen05_instruction({.n = 256, .b = ptx::Fp8Code::e5m2, .a_major = ptx::Major::mn}) == 0x08C08400);
static_assert(ptx::with_scale_ids(0x08A00000, 3, 0) == 0x68A00000);
static_assert(ptx::with_scale_ids(0x08A00000, 0, 3) == 0x08A00030);
// Start 0x400, leading offset 1 (unused), stride 1024, bit 46, 128-byte swizzle (2 in bits 61..63).
static_assert(ptx::tcgen05_matrix_descriptor(0x400, ptx::Swizzle::b128) == 0x4000404000010040);
static_assert(ptx::tcgen05_matrix_descriptor(0x400, ptx::Swizzle::b64) == 0x8000402000010040);
static_assert(ptx::tcgen05_matrix_descriptor(0x400, ptx::Swizzle::b32) == 0xC000401000010040);
static_assert(ptx::tcgen05_matrix_descriptor(0x400, ptx::Swizzle::b128, 16384, 1024) == 0x4000404004000040);
static_assert(ptx::tcgen05_scale_descriptor(0x200) == 0x0000400800000020);
static_assert(ptx::advance(ptx::tcgen05_matrix_descriptor(0x400, ptx::Swizzle::b128), 32) == 0x4000404000010042);
static_assert(!ptx::broken_rule(ptx::tcgen05_instruction({.n = 144, .b_major = ptx::Major::mn})));

// One image serves both majors: element (token, channel) of a K-major tile is element (channel, token) of an MN-major
// one.
TEST(Descriptors, OneImageServesBothMajors) {
  for (const ptx::Swizzle s : {ptx::Swizzle::b128, ptx::Swizzle::b64, ptx::Swizzle::b32}) {
    const uint32_t span = ptx::swizzle_span(s);
    for (uint32_t token = 0; token < 128; ++token) {
      for (uint32_t channel = 0; channel < span; ++channel) {
        const uint32_t at = ptx::swizzled(token * span + channel, s);
        const auto k_major = ptx::decode_matrix(ptx::advance(ptx::tcgen05_matrix_descriptor(0, s), channel / 32 * 32));
        ASSERT_EQ(ptx::operand_address(k_major, ptx::Major::k, token, channel % 32), at);
        const auto mn_major =
            ptx::decode_matrix(ptx::advance(ptx::tcgen05_matrix_descriptor(0, s), token / 32 * 32 * span));
        ASSERT_EQ(ptx::operand_address(mn_major, ptx::Major::mn, channel, token % 32), at);
      }
    }
  }
}

// Unswizzled operands lie in core matrices of 8 rows of 16 bytes: 128 rows of scales are 512 contiguous bytes.
TEST(Descriptors, ScaleAtomsAreContiguous) {
  const auto atom = ptx::decode_matrix(ptx::tcgen05_scale_descriptor(0x800));
  for (uint32_t row = 0; row < 32; ++row) {
    for (uint32_t byte = 0; byte < 16; ++byte) {
      EXPECT_EQ(ptx::operand_address(atom, ptx::Major::k, row, byte), 0x800 + 16 * row + byte);
    }
  }
}

TEST(Descriptors, DecodeWhatIsBuilt) {
  const auto i = ptx::decode_instruction(ptx::with_scale_ids(
      ptx::tcgen05_instruction({.n = 80, .a = ptx::Fp8Code::e5m2, .b_major = ptx::Major::mn}), 2, 1));
  EXPECT_EQ(i.m, 128u);
  EXPECT_EQ(i.n, 80u);
  EXPECT_EQ(i.a, ptx::Fp8Code::e5m2);
  EXPECT_EQ(i.b, ptx::Fp8Code::e4m3);
  EXPECT_EQ(i.a_major, ptx::Major::k);
  EXPECT_EQ(i.b_major, ptx::Major::mn);
  EXPECT_EQ(i.sfa_id, 2u);
  EXPECT_EQ(i.sfb_id, 1u);
}

}  // namespace
}  // namespace mxflash
