#include "formats/pack.h"

#include <string.h>

#include <stdexcept>

namespace potok {
namespace {

// Levels that nibbles choose from: of IQ4_NL and IQ4_XS; of Q3_K, whose nibbles are below 8.
constexpr int8_t kNonLinear[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kLess4[16] = {-4, -3, -2, -1, 0, 1, 2, 3};

uint32_t load32(const void* p) {
    uint32_t u;
    memcpy(&u, p, 4);
    return u;
}

// --- one qblock of one column into its panel ---------------------------------------------------------------------

void put_nibbles(const uint8_t levels[32], int column, uint8_t* qblock) {
    constexpr uint32_t low4 = 0x0f0f0f0f;
    for (int j = 0; j < 4; j++) {
        const uint32_t four = (load32(levels + 8 * j) & low4) | (load32(levels + 8 * j + 4) & low4) << 4;
        memcpy(qblock + 64 * j + 4 * column, &four, 4);
    }
}

void put_high_bits(const uint8_t levels[32], int column, uint8_t* qblock) {
    uint32_t plane = 0;
    for (int bit = 0; bit < 8; bit++) plane |= (load32(levels + 4 * bit) >> 4 & 0x01010101) << bit;
    memcpy(qblock + 256 + 4 * column, &plane, 4);
}

void put_bytes(const int8_t levels[32], int column, uint8_t* qblock) {
    for (int pair = 0; pair < kGroup / 2; pair++) {
        const int8_t two[2] = {levels[pair_k(pair, 0)], levels[pair_k(pair, 1)]};
        memcpy(qblock + 32 * pair + 2 * column, two, 2);
    }
}

void put_bit_pairs(const uint8_t levels[32], int column, uint8_t* qblock) {
    for (int half = 0; half < 2; half++) {
        uint32_t four = 0;
        for (int j = 0; j < 4; j++) four |= load32(levels + 16 * half + 4 * j) << (2 * j);
        memcpy(qblock + 64 * half + 4 * column, &four, 4);
    }
}

void put_list(const void* list, uint8_t* panel) {
    memcpy(panel, list, 16);
}

void put_half(const uint8_t* half, int column, uint8_t* at) {
    memcpy(at + 2 * column, half, 2);
}

// 16 bytes of nibbles: element i in the low nibble of byte i, element i + 16 in the high one.
void split_nibbles(const uint8_t* bytes, uint8_t levels[32]) {
    for (int i = 0; i < 16; i++) {
        levels[i] = bytes[i] & 15;
        levels[i + 16] = bytes[i] >> 4;
    }
}

// --- types with qblocks of 32 ------------------------------------------------------------------------------------

// d f16 | m f16, if it has one | 32 fifth bits, if it has them | 16 bytes of nibbles
template <Packed F>
void pack_simple(const uint8_t* row, int k, int column, uint8_t* panel) {
    constexpr int head = has_minimum(F) ? 4 : 2, bits = has_high_bits(F) ? 4 : 0;
    uint8_t levels[32];
    for (int g = 0; g < k / kGroup; g++, row += head + bits + 16) {
        uint8_t* out = panel + qblock_at(F, g);
        split_nibbles(row + head + bits, levels);
        put_nibbles(levels, column, out);
        if (bits) {
            const uint32_t high = load32(row + head);
            for (int i = 0; i < 32; i++) levels[i] = (uint8_t)(high >> i << 4 & 16);
            put_high_bits(levels, column, out);
        }
        put_half(row, column, out + level_bytes(F));
        if (has_minimum(F)) put_half(row + 2, column, out + level_bytes(F) + 2 * kPanel);
    }
}

// d f16 | 32 signed bytes
void pack_q8_0(const uint8_t* row, int k, int column, uint8_t* panel) {
    for (int g = 0; g < k / kGroup; g++, row += 34) {
        uint8_t* out = panel + qblock_at(Packed::P8, g);
        put_bytes((const int8_t*)row + 2, column, out);
        put_half(row, column, out + level_bytes(Packed::P8));
    }
}

// As Q4_0, but nibbles choose from kNonLinear.
void pack_iq4_nl(const uint8_t* row, int k, int column, uint8_t* panel) {
    put_list(kNonLinear, panel);
    pack_simple<Packed::P4L>(row, k, column, panel);
}

// list, 16 signed bytes, the same everywhere | 2 x d f32, of 16 elements each | 16 bytes of nibbles
void pack_listed(const uint8_t* row, int k, int column, uint8_t* panel) {
    uint8_t levels[32];
    put_list(row, panel);
    for (int g = 0; g < k / kGroup; g++, row += 40) {
        uint8_t* out = panel + qblock_at(Packed::P4LS, g);
        split_nibbles(row + 24, levels);
        put_nibbles(levels, column, out);
        uint8_t* scales = out + level_bytes(Packed::P4LS) + 4 * column;
        memcpy(scales, row + 16, 4);
        memcpy(scales + 4 * kPanel, row + 20, 4);
    }
}

// --- types with superblocks of 256 -------------------------------------------------------------------------------

// Q4_K: d f16 | dmin f16 | 12 bytes of scales | 4 x 32 bytes of nibbles: the low ones are one group, the high the next
// Q5_K: d f16 | dmin f16 | 12 bytes of scales | 32 bytes, bit g for group g | nibbles as Q4_K
template <Packed F>
void pack_min_k(const uint8_t* row, int k, int column, uint8_t* panel) {
    constexpr int bits = has_high_bits(F) ? 32 : 0;
    uint8_t levels[32];
    for (int b = 0; b < k / kSuperblock; b++, row += 16 + bits + 128) {
        uint8_t* header = panel + header_at(F, 8 * b);
        put_half(row, column, header);
        put_half(row + 2, column, header + 32);
        const uint8_t* s = row + 4;
        for (int g = 0; g < 8; g++) {
            // 6-bit scales and minimums: the first four whole, the last four with their upper bits in the first eight
            const int sc = g < 4 ? s[g] & 63 : (s[g + 4] & 15) | s[g - 4] >> 6 << 4;
            const int mn = g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | s[g] >> 6 << 4;
            header[64 + kPanel * g + column] = (uint8_t)sc;
            header[192 + kPanel * g + column] = (uint8_t)mn;
            const uint8_t* q = row + 16 + bits + 32 * (g / 2);
            for (int i = 0; i < 32; i++) {
                levels[i] = q[i] >> (4 * (g % 2)) & 15;
                if (bits) levels[i] |= (uint8_t)((row[16 + i] >> g & 1) << 4);
            }
            uint8_t* out = panel + qblock_at(F, 8 * b + g);
            put_nibbles(levels, column, out);
            if (bits) put_high_bits(levels, column, out);
        }
    }
}

// 16 bytes: scale in the low nibble, minimum in the high one | 64 bytes of two bits | d f16 | dmin f16; in each half of
// 128 elements the lowest bits of 32 bytes come first.
void pack_q2_k(const uint8_t* row, int k, int column, uint8_t* panel) {
    uint8_t levels[32];
    for (int b = 0; b < k / kSuperblock; b++, row += 84) {
        uint8_t* header = panel + header_at(Packed::P2K, 8 * b);
        put_half(row + 80, column, header);
        put_half(row + 82, column, header + 32);
        for (int i = 0; i < 16; i++) header[64 + kPanel * i + column] = row[i];
        for (int g = 0; g < 8; g++) {
            const uint8_t* q = row + 16 + 32 * (g / 4);
            for (int i = 0; i < 32; i++) levels[i] = q[i] >> (2 * (g % 4)) & 3;
            put_bit_pairs(levels, column, panel + qblock_at(Packed::P2K, 8 * b + g));
        }
    }
}

// Levels of one superblock, signed or nibbles that choose from a list, and a scale for each 16 of them.
struct Levels256 {
    uint8_t levels[256];
    int8_t scales[16];
};

// 128 low nibble pairs | 64 bytes of upper two bits | 16 signed scales | d f16; in each half of 128 elements the four
// quarters take the low nibbles of bytes 0-31, of 32-63, the high ones of 0-31, of 32-63. Levels are less 32.
void decode_q6_k(const uint8_t* p, Levels256& out) {
    for (int half = 0; half < 2; half++) {
        const uint8_t *low = p + 64 * half, *high = p + 128 + 32 * half;
        for (int quarter = 0; quarter < 4; quarter++) {
            for (int i = 0; i < 32; i++) {
                const int nibble = low[32 * (quarter % 2) + i] >> (4 * (quarter / 2)) & 15;
                out.levels[128 * half + 32 * quarter + i] =
                    (uint8_t)((nibble | (high[i] >> (2 * quarter) & 3) << 4) - 32);
            }
        }
    }
    memcpy(out.scales, p + 192, 16);
}

// 32 bytes of third bits | 64 bytes of two bits | 12 bytes of 6-bit scales, less 32 | d f16. Levels are less 4.
void decode_q3_k(const uint8_t* p, Levels256& out) {
    for (int g = 0; g < 8; g++) {
        const uint8_t* two = p + 32 + 32 * (g / 4);
        for (int i = 0; i < 32; i++) {
            out.levels[32 * g + i] = (uint8_t)((two[i] >> (2 * (g % 4)) & 3) | (p[i] >> g & 1) << 2);
        }
    }
    const uint8_t* s = p + 96;
    for (int i = 0; i < 16; i++) {
        const int low = i < 8 ? s[i] & 15 : s[i - 8] >> 4;
        out.scales[i] = (int8_t)((low | (s[8 + i % 4] >> (2 * (i / 4)) & 3) << 4) - 32);
    }
}

// d f16 | u16 of upper scale bits | 4 bytes of lower ones | 8 x 16 bytes of nibbles; scales less 32, one for each 32.
void decode_iq4_xs(const uint8_t* p, Levels256& out) {
    const int upper = p[2] | p[3] << 8;
    for (int g = 0; g < 8; g++) {
        const int scale = (p[4 + g / 2] >> (4 * (g % 2)) & 15) | (upper >> (2 * g) & 3) << 4;
        out.scales[2 * g] = out.scales[2 * g + 1] = (int8_t)(scale - 32);
        split_nibbles(p + 8 + 16 * g, out.levels + 32 * g);
    }
}

// list, 16 signed bytes, the same everywhere | d f16 | 16 signed scales | 8 x 16 bytes of nibbles
void decode_listed_k(const uint8_t* p, Levels256& out) {
    memcpy(out.scales, p + 18, 16);
    for (int g = 0; g < 8; g++) split_nibbles(p + 34 + 16 * g, out.levels + 32 * g);
}

template <Packed F, void (*Decode)(const uint8_t*, Levels256&), int Bytes, int HalfAt>
void pack_k(const uint8_t* row, int k, int column, uint8_t* panel) {
    Levels256 values;
    for (int b = 0; b < k / kSuperblock; b++, row += Bytes) {
        Decode(row, values);
        uint8_t* header = panel + header_at(F, 8 * b);
        put_half(row + HalfAt, column, header);
        for (int i = 0; i < 16; i++) header[32 + kPanel * i + column] = (uint8_t)values.scales[i];
        for (int g = 0; g < 8; g++) {
            uint8_t* out = panel + qblock_at(F, 8 * b + g);
            if (has_list(F)) {
                put_nibbles(values.levels + 32 * g, column, out);
            } else {
                put_bytes((const int8_t*)values.levels + 32 * g, column, out);
            }
        }
    }
}

void pack_q3_k(const uint8_t* row, int k, int column, uint8_t* panel) {
    put_list(kLess4, panel);
    pack_k<Packed::P4LK, decode_q3_k, 110, 108>(row, k, column, panel);
}

void pack_iq4_xs(const uint8_t* row, int k, int column, uint8_t* panel) {
    put_list(kNonLinear, panel);
    pack_k<Packed::P4LK, decode_iq4_xs, 136, 0>(row, k, column, panel);
}

void pack_listed_k(const uint8_t* row, int k, int column, uint8_t* panel) {
    put_list(row, panel);
    pack_k<Packed::P4LK, decode_listed_k, 162, 16>(row, k, column, panel);
}

// --- floats ------------------------------------------------------------------------------------------------------

template <class T>
void pack_float(const uint8_t* row, int k, int column, uint8_t* panel) {
    for (int i = 0; i < k; i++) {
        memcpy(panel + ((size_t)i * kPanel + column) * sizeof(T), row + i * sizeof(T), sizeof(T));
    }
}

// --- all of them -------------------------------------------------------------------------------------------------

struct Type {
    Source source;
    Packed form;
    int qblock, bytes;  // elements, and what they take in the file
    void (*pack)(const uint8_t* row, int k, int column, uint8_t* panel);
};

constexpr Type kTypes[] = {
    {Source::F32, Packed::F32, 1, 4, pack_float<uint32_t>},
    {Source::F16, Packed::F16, 1, 2, pack_float<uint16_t>},
    {Source::BF16, Packed::BF16, 1, 2, pack_float<uint16_t>},
    {Source::Q4_0, Packed::P4, 32, 18, pack_simple<Packed::P4>},
    {Source::Q4_1, Packed::P4M, 32, 20, pack_simple<Packed::P4M>},
    {Source::Q5_0, Packed::P5, 32, 22, pack_simple<Packed::P5>},
    {Source::Q5_1, Packed::P5M, 32, 24, pack_simple<Packed::P5M>},
    {Source::Q8_0, Packed::P8, 32, 34, pack_q8_0},
    {Source::IQ4_NL, Packed::P4L, 32, 18, pack_iq4_nl},
    {Source::Q2_K, Packed::P2K, 256, 84, pack_q2_k},
    {Source::Q4_K, Packed::P4K, 256, 144, pack_min_k<Packed::P4K>},
    {Source::Q5_K, Packed::P5K, 256, 176, pack_min_k<Packed::P5K>},
    {Source::Q6_K, Packed::P8K, 256, 210, pack_k<Packed::P8K, decode_q6_k, 210, 208>},
    {Source::Q3_K, Packed::P4LK, 256, 110, pack_q3_k},
    {Source::IQ4_XS, Packed::P4LK, 256, 136, pack_iq4_xs},
    {Source::Listed, Packed::P4LS, 32, 40, pack_listed},
    {Source::ListedK, Packed::P4LK, 256, 162, pack_listed_k},
};

const Type& type_of(Source source) {
    for (const Type& type : kTypes) {
        if (type.source == source) return type;
    }
    throw std::invalid_argument("this tensor type has no packed form");
}

}  // namespace

Packed packed_form(Source source) {
    return type_of(source).form;
}

size_t source_row_bytes(Source source, int k) {
    const Type& type = type_of(source);
    return (size_t)k / type.qblock * type.bytes;
}

int source_qblock(Source source) {
    return type_of(source).qblock;
}

void pack_panels(Source source, const uint8_t* rows, int n, int k, int panel0, int panel1, uint8_t* out) {
    const Type& type = type_of(source);
    const size_t row_bytes = source_row_bytes(source, k), stride = panel_bytes(type.form, k);
    for (int p = panel0; p < panel1; p++) {
        for (int c = 0; c < kPanel && p * kPanel + c < n; c++) {
            type.pack(rows + (size_t)(p * kPanel + c) * row_bytes, k, c, out + (size_t)p * stride);
        }
    }
}

}  // namespace potok
