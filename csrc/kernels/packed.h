// Packed weights: panels of 16 output columns, each a run of qblocks of 32 k (docs/numerics.md).
//
//   form   holds   value                        qblock of 32 k x 16 columns
//   P4     Q4_0    d (q - 8)                    nibbles 256 B | d 16 f16
//   P4M    Q4_1    d q + m                      nibbles 256 B | d 16 f16 | m 16 f16
//   P5     Q5_0    d (q - 16)                   nibbles 256 B | high bits 64 B | d
//   P5M    Q5_1    d q + m                      nibbles 256 B | high bits 64 B | d | m
//   P4K    Q4_K    (d sc) q - (dmin mn)         nibbles 256 B                   after a header, see below
//   P5K    Q5_K    (d sc) q - (dmin mn)         nibbles 256 B | high bits 64 B  after a header
//   P2K    Q2_K    (d sc) q - (dmin mn), sc and mn for each 16 k: pairs of bits 128 B, after a header
//   P8     Q8_0    d q                          bytes 512 B | d 16 f16
//   P8K    Q6_K    (d sc) q, sc for each 16 k   bytes 512 B                     after a header
//   P4L    IQ4_NL  d list[q]                    nibbles 256 B | d 16 f16
//   P4LK   IQ4_XS  (d sc) list[q], sc for each 16 k: nibbles 256 B, after a header; Q3_K, IQ3_S too
//   P4LS   IQ2_XS  d list[q], d for each 16 k: nibbles 256 B | d f32 [2][16];   all with up to 16 levels, if no other
//   F16, BF16, F32                              [k][16], no qblocks
//
// list: 16 signed bytes, the levels that q chooses from; 32 B at the beginning of every panel.
// nibbles: byte 64 j + 4 c + i holds column c's k = 8 j + i (low) and k = 8 j + 4 + i (high).
// high bits: bit 2 j + h of byte 4 c + i is bit 4 of column c's k = 8 j + 4 h + i.
// pairs of bits: bits 2 j and 2 j + 1 of byte 64 h + 4 c + i hold column c's k = 16 h + 4 j + i.
// bytes: byte 32 p + 2 c + e holds column c's k = pair_k(p, e).
// header of a superblock of 256 k, before its 8 qblocks:
//   P4K, P5K: d 16 f16 | dmin 16 f16 | sc u8 [8][16] | mn u8 [8][16]      P8K, P4LK: d 16 f16 | sc s8 [16][16]
//   P2K: d 16 f16 | dmin 16 f16 | u8 [16][16], sc in the low nibble and mn in the high one
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace potok {

#define POTOK_FORMS(f) \
    f(P4) f(P4M) f(P5) f(P5M) f(P4K) f(P5K) f(P2K) f(P8) f(P8K) f(P4L) f(P4LK) f(P4LS) f(F16) f(BF16) f(F32)

enum class Packed : int32_t { P4 = 0, P4M, P5, P5M, P4K, P5K, P2K, P8, P8K, P4L, P4LK, P4LS, F16, BF16, F32 };

constexpr int kPanel = 16;
constexpr int kGroup = 32;        // k that share an activation scale, and of a qblock
constexpr int kSuperblock = 256;  // k that share a header

// 16-bit pairs hold k and k + 2, so that nibbles of packed bytes spread to 16 bits by mask and shift alone:
// pairs of every 8 k, in order: (0,2) (1,3) (4,6) (5,7). A16 rows are stored in this order too.
static constexpr int pair_k(int pair, int element) {
    return 4 * (pair / 2) + pair % 2 + 2 * element;
}

static constexpr bool is_float(Packed f) {
    return f >= Packed::F16;
}
static constexpr bool has_bytes(Packed f) {
    return f == Packed::P8 || f == Packed::P8K;
}
static constexpr bool has_list(Packed f) {
    return f == Packed::P4L || f == Packed::P4LK || f == Packed::P4LS;
}
// Levels from 0 on in less than a byte, which take 8-bit activations; the others are signed bytes or floats.
static constexpr bool has_small_levels(Packed f) {
    return f <= Packed::P2K;
}
// Of 32-byte vectors of less than bytes: how many a group has for 8 columns; the lowest bits of all are the first k.
static constexpr int level_vectors(Packed f) {
    return f == Packed::P2K ? 2 : 4;
}
static constexpr bool has_high_bits(Packed f) {
    return f == Packed::P5 || f == Packed::P5M || f == Packed::P5K;
}
static constexpr bool has_minimum(Packed f) {
    return f == Packed::P4M || f == Packed::P5M || f == Packed::P4K || f == Packed::P5K || f == Packed::P2K;
}
// In a header: sc, signed, for each 16 k.
static constexpr bool has_signed_scales(Packed f) {
    return f == Packed::P8K || f == Packed::P4LK;
}
static constexpr bool has_header(Packed f) {
    return f == Packed::P4K || f == Packed::P5K || f == Packed::P2K || has_signed_scales(f);
}
// 2 where each 16 k have a scale of their own, and a minimum.
static constexpr int scales_per_group(Packed f) {
    return f == Packed::P2K || f == Packed::P4LS || has_signed_scales(f) ? 2 : 1;
}
static constexpr int zero_point(Packed f) {
    return f == Packed::P4 ? 8 : f == Packed::P5 ? 16 : 0;
}

static constexpr int list_bytes(Packed f) {
    return has_list(f) ? 32 : 0;
}
static constexpr int header_bytes(Packed f) {
    return !has_header(f) ? 0 : has_signed_scales(f) ? 288 : 320;
}
static constexpr int level_bytes(Packed f) {
    return has_bytes(f) ? 512 : has_high_bits(f) ? 320 : f == Packed::P2K ? 128 : 256;
}
static constexpr int qblock_bytes(Packed f) {
    return level_bytes(f) + (has_header(f)       ? 0
                             : f == Packed::P4LS ? 8 * kPanel
                             : has_minimum(f)    ? 4 * kPanel
                                                 : 2 * kPanel);
}

// The qblock of k = 32 group, and the header of the superblock that it lies in.
static constexpr size_t header_at(Packed f, int group) {
    return list_bytes(f) + (size_t)(group / 8) * (header_bytes(f) + 8 * qblock_bytes(f));
}
static constexpr size_t qblock_at(Packed f, int group) {
    return has_header(f) ? header_at(f, group) + header_bytes(f) + (size_t)(group % 8) * qblock_bytes(f)
                         : list_bytes(f) + (size_t)group * qblock_bytes(f);
}

static constexpr size_t panel_bytes(Packed f, int k) {
    return f == Packed::F32                        ? (size_t)k * kPanel * 4
           : f == Packed::F16 || f == Packed::BF16 ? (size_t)k * kPanel * 2
           : has_header(f)                         ? header_at(f, k / kGroup)
                                                   : qblock_at(f, k / kGroup);
}

}  // namespace potok
