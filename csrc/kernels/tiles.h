// The tile registers of AMX and what the amx table does with them. GCC's own intrinsics do not say that they read
// memory, so that it moves stores behind them; with POTOK_SIMDE the same in plain C++, to test the table anywhere.
//
// A tile is up to 16 rows of up to 64 bytes. dot: 32-bit element (r, c) of `sums` gains the products of the four bytes
// 4 i..4 i + 3 of row r of `rows` and the four bytes of element c of row i of `levels`, for all i.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

namespace potok {
namespace POTOK_ISA {

struct TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

#if defined(POTOK_SIMDE)

static thread_local TileShapes tile_shapes;
static thread_local uint8_t tiles[8][16][64];

static inline void configure_tiles(const TileShapes& shapes) {
    tile_shapes = shapes;
    memset(tiles, 0, sizeof tiles);
}
static inline void release_tiles() {
    configure_tiles({});
}
template <int Tile>
static inline void zero_tile() {
    memset(tiles[Tile], 0, sizeof tiles[Tile]);
}
template <int Tile>
static inline void load_tile(const void* p, size_t stride) {
    zero_tile<Tile>();
    for (int r = 0; r < tile_shapes.rows[Tile]; r++)
        memcpy(tiles[Tile][r], (const uint8_t*)p + r * stride, tile_shapes.row_bytes[Tile]);
}
template <int Tile>
static inline void store_sums(int32_t* p) {
    for (int r = 0; r < tile_shapes.rows[Tile]; r++) memcpy(p + 16 * r, tiles[Tile][r], tile_shapes.row_bytes[Tile]);
}
template <int Sums, int Rows, int Levels, class Byte>
static inline void dot_tiles() {
    for (int r = 0; r < tile_shapes.rows[Sums]; r++) {
        int32_t sums[16];
        memcpy(sums, tiles[Sums][r], sizeof sums);
        for (int c = 0; c < tile_shapes.row_bytes[Sums] / 4; c++) {
            for (int i = 0; i < tile_shapes.row_bytes[Rows]; i++)
                sums[c] += (Byte)tiles[Rows][r][i] * (int8_t)tiles[Levels][i / 4][4 * c + i % 4];
        }
        memcpy(tiles[Sums][r], sums, sizeof sums);
    }
}

#else

static inline void configure_tiles(const TileShapes& shapes) {
    __asm__ volatile("ldtilecfg %0" : : "m"(shapes));
}
static inline void release_tiles() {
    __asm__ volatile("tilerelease");
}
template <int Tile>
static inline void zero_tile() {
    __asm__ volatile("tilezero %%tmm%c0" : : "i"(Tile));
}
template <int Tile>
static inline void load_tile(const void* p, size_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1),%%tmm%c2" : : "r"(p), "r"(stride), "i"(Tile) : "memory");
}
template <int Tile>
static inline void store_sums(int32_t* p) {
    __asm__ volatile("tilestored %%tmm%c2,(%0,%1,1)" : : "r"(p), "r"((size_t)64), "i"(Tile) : "memory");
}
// The rows are bytes of either sign, the levels signed.
template <int Sums, int Rows, int Levels, class Byte>
static inline void dot_tiles() {
    if ((Byte)-1 < 0) {
        __asm__ volatile("tdpbssd %%tmm%c2,%%tmm%c1,%%tmm%c0" : : "i"(Sums), "i"(Rows), "i"(Levels));
    } else {
        __asm__ volatile("tdpbusd %%tmm%c2,%%tmm%c1,%%tmm%c0" : : "i"(Sums), "i"(Rows), "i"(Levels));
    }
}

#endif

}  // namespace POTOK_ISA
}  // namespace potok
