#include "formats/pack.h"

#include <string.h>

namespace potok {
namespace {

// Q4_1, 32 elements in 20 bytes: f16 d, f16 m, 16 bytes: element i in the low nibble of byte i, i + 16 in the high.
constexpr int kQ41Bytes = 20;
// Q8_0, 32 elements in 34 bytes: f16 d, 32 signed bytes.
constexpr int kQ80Bytes = 34;

// Four bytes of the panel take eight nibbles: k = 8 j + 0..3 low, 8 j + 4..7 high, of the low nibbles of the row's
// bytes for j = 0, 1 and of the high ones for j = 2, 3.
void pack_q4_1(const uint8_t* row, int k, int column, uint8_t* panel) {
    constexpr uint32_t low4 = 0x0f0f0f0f;
    for (int g = 0; g < k / kGroup; g++, row += kQ41Bytes, panel += kP4MBytes) {
        memcpy(panel + 256 + 2 * column, row, 2);
        memcpy(panel + 288 + 2 * column, row + 2, 2);
        uint32_t q[4];
        memcpy(q, row + 4, 16);
        for (int j = 0; j < 4; j++) {
            const int shift = j < 2 ? 0 : 4;
            const uint32_t four = (q[2 * (j % 2)] >> shift & low4) | (q[2 * (j % 2) + 1] >> shift & low4) << 4;
            memcpy(panel + 64 * j + 4 * column, &four, 4);
        }
    }
}

void pack_q8_0(const uint8_t* row, int k, int column, uint8_t* panel) {
    for (int g = 0; g < k / kGroup; g++, row += kQ80Bytes, panel += kP8Bytes) {
        memcpy(panel + 512 + 2 * column, row, 2);
        for (int pair = 0; pair < kGroup / 2; pair++) {
            const uint8_t two[2] = {row[2 + pair_k(pair, 0)], row[2 + pair_k(pair, 1)]};
            memcpy(panel + 32 * pair + 2 * column, two, 2);
        }
    }
}

template <class T>
void pack_float(const uint8_t* row, int k, int column, uint8_t* panel) {
    for (int i = 0; i < k; i++)
        memcpy(panel + ((size_t)i * kPanel + column) * sizeof(T), row + i * sizeof(T), sizeof(T));
}

}  // namespace

Packed packed_form(Source source) {
    switch (source) {
        case Source::Q4_1:
            return Packed::P4M;
        case Source::Q8_0:
            return Packed::P8;
        case Source::F16:
            return Packed::F16;
        case Source::F32:
            break;
    }
    return Packed::F32;
}

size_t panel_bytes(Packed format, int k) {
    switch (format) {
        case Packed::P4M:
            return (size_t)k / kGroup * kP4MBytes;
        case Packed::P8:
            return (size_t)k / kGroup * kP8Bytes;
        case Packed::F16:
            return (size_t)k * kPanel * 2;
        case Packed::F32:
            break;
    }
    return (size_t)k * kPanel * 4;
}

size_t source_row_bytes(Source source, int k) {
    switch (source) {
        case Source::Q4_1:
            return (size_t)k / kGroup * kQ41Bytes;
        case Source::Q8_0:
            return (size_t)k / kGroup * kQ80Bytes;
        case Source::F16:
            return (size_t)k * 2;
        case Source::F32:
            break;
    }
    return (size_t)k * 4;
}

void pack_panels(Source source, const uint8_t* rows, int n, int k, int panel0, int panel1, uint8_t* out) {
    const size_t row_bytes = source_row_bytes(source, k), stride = panel_bytes(packed_form(source), k);
    for (int p = panel0; p < panel1; p++) {
        uint8_t* panel = out + (size_t)p * stride;
        for (int c = 0; c < kPanel && p * kPanel + c < n; c++) {
            const uint8_t* row = rows + (size_t)(p * kPanel + c) * row_bytes;
            switch (source) {
                case Source::Q4_1:
                    pack_q4_1(row, k, c, panel);
                    break;
                case Source::Q8_0:
                    pack_q8_0(row, k, c, panel);
                    break;
                case Source::F16:
                    pack_float<uint16_t>(row, k, c, panel);
                    break;
                case Source::F32:
                    pack_float<float>(row, k, c, panel);
                    break;
            }
        }
    }
}

}  // namespace potok
