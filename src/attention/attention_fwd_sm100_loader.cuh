// The warp that feeds the forward kernel on Blackwell: it takes work items, starts the copies of their tiles, and
// expands the scales of a tile to what the tensor core reads.
#pragma once

#include "attention/attention_fwd_sm100.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/fault.cuh"

namespace mxflash::fwd_sm100 {

// ---- scales ---------------------------------------------------------------------------------------------------------
// An atom of scales is 128 rows of an operand x 4 blocks along the contraction, a byte each; its 16 bytes at 16 l are
// rows l, l + 32, l + 64, l + 96. In tensor memory these are four columns of lane l. All rows of a square block have
// the same scale, so then all lanes have the same 16 bytes.

template <int kAtoms>
struct Scales {
  uint4 atom[kAtoms];  // of this lane
};

__device__ __forceinline__ uint32_t low_bytes(int count) { return count < 4 ? (1u << (8 * count)) - 1 : ~0u; }

// One to four bytes, aligned if they are two or four.
__device__ __forceinline__ uint32_t load_bytes(const uint8_t* from, int count) {
  if (count == 4) return *reinterpret_cast<const uint32_t*>(from);
  if (count == 2) return *reinterpret_cast<const uint16_t*>(from);
  uint32_t word = 0;
#pragma unroll 1
  for (int i = 0; i < count; ++i) word |= uint32_t(from[i]) << (8 * i);
  return word;
}

// Up to four bytes from anywhere: the aligned words that have one of them.
__device__ __forceinline__ uint32_t load_bytes_unaligned(const uint8_t* from, int count) {
  if (count <= 0) return 0;
  const int skip = int(reinterpret_cast<uintptr_t>(from) % 4);
  const auto* const words = reinterpret_cast<const uint32_t*>(from - skip);
  const uint32_t low = words[0], high = skip + min(count, 4) > 4 ? words[1] : 0;
  return __funnelshift_r(low, high, uint32_t(8 * skip)) & low_bytes(count);
}

// Rows are tokens, `rows` of them in the sequence; blocks are of channels. What has no token or no channel is 0:
// anything may lie there. at: Operand::scales. kAtom: of the kAtoms that an operand has at most.
template <int kAtoms, int kAtom>
__device__ __forceinline__ uint4 token_scales(const Operand& x, const uint8_t* at, int rows, int lane) {
  const int blocks = (x.dim + 31) / 32;
  const uint32_t channels = low_bytes(blocks);
  const int first = x.scale_lane ? lane : 0;
  const auto load = [&](const uint8_t* from) {
    if constexpr (kAtoms == 1) return load_bytes(from, x.scale_bytes) & channels;
    return load_bytes_unaligned(from + (kAtom > 0 ? x.scale_atom() : 0), blocks - 4 * kAtom);
  };
  uint32_t word[4];
#pragma unroll
  for (int b = 0; b < 4; ++b) word[b] = 32 * b + first < rows ? load(at + b * x.scale_word) : 0;
  return make_uint4(word[0], word[1], word[2], word[3]);
}

// A transpose of 4 x 4 bytes.
__device__ __forceinline__ uint4 transpose_bytes(uint4 x) {
  const uint32_t low01 = __byte_perm(x.x, x.y, 0x5140), low23 = __byte_perm(x.z, x.w, 0x5140);
  const uint32_t high01 = __byte_perm(x.x, x.y, 0x7362), high23 = __byte_perm(x.z, x.w, 0x7362);
  return make_uint4(__byte_perm(low01, low23, 0x5410), __byte_perm(low01, low23, 0x7632),
                    __byte_perm(high01, high23, 0x5410), __byte_perm(high01, high23, 0x7632));
}

// Values: rows are channels, blocks are of tokens. Behind 64 channels come the scales of the columns of ones.
template <class C, int kAtom>
__device__ __forceinline__ uint4 value_scales(const Operand& x, const uint8_t* at, int rows, int lane) {
  uint4 scales;
  if (x.block == MxBlock::square32) {
    scales = token_scales<C::kAtomsV, kAtom>(x, at, rows, lane);
    if (!ptx::fault(1)) scales = transpose_bytes(scales);
  } else {
    // Columns: an atom has the words as they are; in linear layout their bytes are a row of channels apart.
    const bool linear = x.scale_bytes == 1;
    const int blocks = min((rows + 31) / 32, 4);
    if constexpr (kAtom > 0) at += x.scale_atom();
    uint32_t word[4] = {};
#pragma unroll 1
    for (int b = 0; b < blocks; ++b) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int offset = linear ? b * x.dim + 32 * r : 4 * r + b;
        if (128 * kAtom + 32 * r + lane < x.dim) word[r] |= uint32_t(at[offset]) << (8 * b);
      }
    }
    scales = make_uint4(word[0], word[1], word[2], word[3]);
  }
  if (C::kDimV == 64) scales.z = scales.w = kScaleP;
  return scales;
}

// Of all atoms of a tile.
template <int kAtoms>
__device__ __forceinline__ Scales<kAtoms> token_scales(const Operand& x, const uint8_t* at, int rows, int lane) {
  if constexpr (kAtoms == 1) {
    return {token_scales<1, 0>(x, at, rows, lane)};
  } else {
    return {token_scales<2, 0>(x, at, rows, lane), token_scales<2, 1>(x, at, rows, lane)};
  }
}
template <class C>
__device__ __forceinline__ Scales<C::kAtomsV> value_scales(const Operand& x, const uint8_t* at, int rows, int lane) {
  if constexpr (C::kAtomsV == 1) {
    return {value_scales<C, 0>(x, at, rows, lane)};
  } else {
    return {value_scales<C, 0>(x, at, rows, lane), value_scales<C, 1>(x, at, rows, lane)};
  }
}

// ---- the warp -------------------------------------------------------------------------------------------------------

template <class C>
struct Loader {
  const Params& p;
  const Shared<C> shared;
  const int lane;
  Ring<kItems> slot{};
  Ring<kBuffers> buffer{};
  Ring<C::kStages> stage{};

  __device__ __forceinline__ void run() {
    const int32_t num_items = count_items<C>(p.items);
    while (true) {
      ptx::mbarrier_wait(shared.item_free(slot.index()), slot.parity() ^ 1);
      const Item& item = take(num_items);  // stays: nobody but this warp writes it again
      if (item.valid && item.num_tiles == 0) {
        write_unseen(item);
        continue;
      }
      warp_arrive(shared.item_known(slot.index()));
      slot.next();
      if (!item.valid) break;
      load(item);
      buffer.next();
    }
    // No commit may be on its way to a barrier of a CTA that is gone.
    if (ptx::fault(22)) return;
#pragma unroll 1
    for (int i = 0; i < kBuffers; ++i, buffer.next()) wait_free(shared.q_free(buffer.index()), buffer.parity());
#pragma unroll 1
    for (int i = 0; i < C::kStages; ++i, stage.next()) {
      wait_free(shared.k_free(stage.index()), stage.parity());
      wait_free(shared.v_free(stage.index()), stage.parity());
    }
  }

 private:
  __device__ __forceinline__ void wait_free(uint32_t bar, uint32_t parity) const {
    ptx::mbarrier_wait(bar, parity ^ 1);
  }

  // The next item of the grid, and which tiles its sides see.
  __device__ __forceinline__ const Item& take(int32_t num_items) const {
    Item& known = shared.item(slot.index());
    __syncwarp();  // all have read what was there
    if (lane == 0 && take_item<C>(p.items, num_items, known)) {
#pragma unroll 1
      for (int side = 0; side < C::kSides; ++side) {
        const int first_row = known.first_row + side * kLanes;
        const int end_row = min(first_row + kLanes, known.seqlen_q);
        Range keys;
        if (first_row < end_row) keys = visible_keys(p.items.mask, first_row, end_row, known.seqlen_q, known.seqlen_k);
        known.first[side] = keys.empty() ? known.first_tile : int32_t(keys.first) / C::kBlockN;
        known.end[side] = keys.empty() ? known.first_tile : (int32_t(keys.end) + C::kBlockN - 1) / C::kBlockN;
      }
    }
    __syncwarp();
    return known;
  }

  __device__ __forceinline__ void load(const Item& item) {
    const int kv_head = item.head / p.items.group;
    const int q_start = p.items.shared_q ? 0 : item.out_start;
    const int k_start = int(sequence_at(p.items.total_k, p.items.seq_k, item.sequence).start);
    const int end = item.first_tile + item.num_tiles;
    // Scales are read a tile ahead: their way from memory is as long as a tile's. Values are of `tile`; keys too, or of
    // the one behind it.
    const uint8_t* k_scale = p.k.scales(kv_head, item.k_padded + item.first_tile * C::kBlockN, lane);
    const uint8_t* v_scale = p.v.scales(kv_head, item.k_padded + item.first_tile * C::kBlockN, lane);
    Scales<C::kAtoms> next_k{};
    Scales<C::kAtomsV> next_v{};
    Ring<C::kStages> ahead = stage;
#pragma unroll 1
    for (int tile = item.first_tile - 1 - C::kKeysAhead; tile < end; ++tile) {
      const int key_tile = tile + C::kKeysAhead;
      const Scales<C::kAtoms> k_scales = next_k;
      const Scales<C::kAtomsV> v_scales = next_v;
      if (key_tile + 1 < end) {
        const int keys = item.seqlen_k - (key_tile + 1) * C::kBlockN;
        next_k = token_scales<C::kAtoms>(p.k, k_scale, keys, lane);
        if constexpr (C::kKeysAhead == 0) next_v = value_scales<C>(p.v, v_scale, keys, lane);
        k_scale += p.k.scale_tile;
        if constexpr (C::kKeysAhead == 0) v_scale += p.v.scale_tile;
      }
      if constexpr (C::kKeysAhead > 0) {
        if (item.first_tile <= tile + 1 && tile + 1 < end) {
          next_v = value_scales<C>(p.v, v_scale, item.seqlen_k - (tile + 1) * C::kBlockN, lane);
          v_scale += p.v.scale_tile;
        }
      }
      if (key_tile < item.first_tile) continue;
      if (C::kKeysAhead == 0 || key_tile < end) {
        const Ring<C::kStages>& at = C::kKeysAhead > 0 ? ahead : stage;
        if (!ptx::fault(2)) wait_free(shared.k_free(at.index()), at.parity());
        start<C::kBoxes, C::kSpan>(shared.k_full(at.index()), shared.k_scale(at.index()), k_scales,
                                   shared.k(at.index()), p.k_map, kv_head, k_start + key_tile * C::kBlockN);
        if (key_tile == item.first_tile) load_queries(item, q_start);
        if constexpr (C::kKeysAhead > 0) ahead.next();
      }
      if (C::kKeysAhead > 0 && tile < item.first_tile) continue;
      wait_free(shared.v_free(stage.index()), stage.parity());
      const int rows = item.seqlen_k - tile * C::kBlockN;
      if (rows < C::kBlockN && !ptx::fault(3)) {
        fill_values(kv_head, k_start + tile * C::kBlockN, rows, v_scales);
      } else {
        start<C::kBoxesV, C::kSpanV>(shared.v_full(stage.index()), shared.v_scale(stage.index()), v_scales,
                                     shared.v(stage.index()), p.v_map, kv_head, k_start + tile * C::kBlockN);
      }
      stage.next();
    }
  }

  __device__ __forceinline__ void load_queries(const Item& item, int q_start) {
    if (!ptx::fault(6)) wait_free(shared.q_free(buffer.index()), buffer.parity());
#pragma unroll 1
    for (int side = 0; side < C::kSides; ++side) {
      if (item.first[side] == item.end[side]) {
        warp_arrive(shared.q_full(buffer.index(), side));  // every item is a phase
        continue;
      }
      const int row = item.first_row + side * kLanes;
      const uint8_t* const at = p.q.scales(item.head, item.q_padded + row, lane);
      const Scales<C::kAtoms> scales = token_scales<C::kAtoms>(p.q, at, item.seqlen_q - row, lane);
      start<C::kBoxes, C::kSpan>(shared.q_full(buffer.index(), side), shared.q_scale(buffer.index(), side), scales,
                                 shared.q(buffer.index(), side), p.q_map, item.head, q_start + row);
    }
  }

  // Every lane writes its 16 bytes of each atom.
  template <int kAtoms>
  __device__ __forceinline__ void store_scales(uint32_t to, const Scales<kAtoms>& scales) const {
#pragma unroll
    for (int atom = 0; atom < kAtoms; ++atom) {
      ptx::store_shared(to + int(kAtomBytes) * atom + 16 * lane, scales.atom[atom]);
    }
  }

  // Scales; then one lane starts the copies of the payload: 128 tokens of kSpan channels each.
  template <int kBoxes, int kSpan, int kAtoms>
  __device__ __forceinline__ void start(uint32_t full, uint32_t atoms, const Scales<kAtoms>& scales, uint32_t tile,
                                        const ptx::TensorMap& map, int head, int token) const {
    store_scales(atoms, scales);
    if (!ptx::fault(5)) ptx::fence_proxy_async();
    __syncwarp();
    if (lane != 0) return;
    constexpr int kBytes = kLanes * kSpan;
    ptx::mbarrier_arrive_expect_tx(full, uint32_t(kBoxes * kBytes));
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      ptx::tensor_load_3d(tile + box * kBytes, &map, box * kSpan, head, token, full);
    }
  }

  // The values of a tile that reaches beyond its sequence: P is zero there, but 0 NaN is NaN, so the neighbour's bytes
  // must not get in.
  __device__ __forceinline__ void fill_values(int head, int token, int rows, const Scales<C::kAtomsV>& scales) const {
    constexpr int kPieces = C::kDimV / 16;  // of a row
    const uint8_t* const from = p.v.data + token * p.v.token_stride + head * p.v.head_stride;
#pragma unroll 4
    for (int i = lane; i < C::kBlockN * kPieces; i += 32) {
      const int row = i / kPieces, channel = i % kPieces * 16;
      uint4 piece = make_uint4(0, 0, 0, 0);
      if (row < rows && channel < p.v.dim) {
        piece = *reinterpret_cast<const uint4*>(from + row * p.v.token_stride + channel);
      }
      ptx::store_shared(shared.v(stage.index()) + C::value_at(row, channel), piece);
    }
    store_scales(shared.v_scale(stage.index()), scales);
    ptx::fence_proxy_async();
    warp_arrive(shared.v_full(stage.index()));
  }

  // Results of rows none of which sees a key.
  __device__ __forceinline__ void write_unseen(const Item& item) const {
    const int rows = min(C::kBlockM, item.seqlen_q - item.first_row);
#pragma unroll 1
    for (int r = 0; r < rows; ++r) {
      const RowPlace at{item.out_start + item.first_row + r, item.head};
      if (p.partials.row) {
        if (lane == 0) p.partials.row[p.partials.index(0, at.head, at.row)] = {-INFINITY, -INFINITY};
        continue;
      }
      if (lane == 0) store_statistics(p.to, at, false, 0, 0);
      if (!p.to.out) continue;
#pragma unroll 1
      for (int c = lane; c < p.to.head_dim_v; c += 32) {
        store_element(p.to.out, at.row * p.to.out.stride[0] + at.head * p.to.out.stride[1] + c, 0);
      }
    }
  }
};

}  // namespace mxflash::fwd_sm100
