// What the bytes of a packed weight mean, one column at a time: the definition that every faster reading must equal.
// Included inside the namespace of an ISA, after lanes.h.

static inline float half_at(const uint8_t* p, int index) {
    uint16_t h;
    memcpy(&h, p + 2 * index, 2);
    return f16_to_f32(h);
}

// The whole number at k = 32 group + r of column c, its zero point removed.
template <Packed F>
static inline int level(const uint8_t* panel, int group, int c, int r) {
    const uint8_t* q = panel + qblock_at(F, group);
    if (F == Packed::P2K) return q[64 * (r / 16) + 4 * c + r % 4] >> (2 * (r / 4 % 4)) & 3;
    if (has_bytes(F)) {
        const int pair = 2 * (r / 4) + r % 2, element = r / 2 % 2;
        return (int8_t)q[32 * pair + 2 * c + element];
    }
    const int j = r / 8, h = r / 4 % 2, i = r % 4;
    int value = q[64 * j + 4 * c + i] >> (4 * h) & 15;
    if (has_high_bits(F)) value |= (q[256 + 4 * c + i] >> (2 * j + h) & 1) << 4;
    return has_list(F) ? (int8_t)panel[value] : value - zero_point(F);
}

// What it is multiplied by. half: of the qblock, for the forms with a scale for each 16 k.
template <Packed F>
static inline float scale(const uint8_t* panel, int group, int half, int c) {
    const uint8_t* own = panel + qblock_at(F, group) + level_bytes(F);
    if (F == Packed::P4LS) {
        float d;
        memcpy(&d, own + 4 * (kPanel * half + c), 4);
        return d;
    }
    if (!has_header(F)) return half_at(own, c);
    const uint8_t* header = panel + header_at(F, group);
    const int sixteen = 2 * (group % 8) + half;
    if (F == Packed::P2K) return half_at(header, c) * (float)(header[64 + kPanel * sixteen + c] & 15);
    if (has_signed_scales(F)) return half_at(header, c) * (float)(int8_t)header[32 + kPanel * sixteen + c];
    return half_at(header, c) * (float)header[64 + kPanel * (group % 8) + c];
}

// What is added, for the forms that have it.
template <Packed F>
static inline float minimum(const uint8_t* panel, int group, int half, int c) {
    if (!has_header(F)) return half_at(panel + qblock_at(F, group) + level_bytes(F) + 2 * kPanel, c);
    const uint8_t* header = panel + header_at(F, group);
    if (F == Packed::P2K) {
        return -(half_at(header + 32, c) * (float)(header[64 + kPanel * (2 * (group % 8) + half) + c] >> 4));
    }
    return -(half_at(header + 32, c) * (float)header[192 + kPanel * (group % 8) + c]);
}

template <Packed F>
static void unpack_column(const uint8_t* panel, int k, int c, float* out) {
    for (int i = 0; i < k; i++) {
        if constexpr (F == Packed::F32) {
            memcpy(out + i, panel + ((size_t)i * kPanel + c) * 4, 4);
        } else if constexpr (F == Packed::F16) {
            out[i] = half_at(panel, i * kPanel + c);
        } else if constexpr (F == Packed::BF16) {
            uint32_t u = 0;
            memcpy((uint8_t*)&u + 2, panel + ((size_t)i * kPanel + c) * 2, 2);
            memcpy(out + i, &u, 4);
        } else {
            const int group = i / kGroup, r = i % kGroup;
            const float value = (float)level<F>(panel, group, c, r) * scale<F>(panel, group, r / 16, c);
            out[i] = has_minimum(F) ? value + minimum<F>(panel, group, r / 16, c) : value;
        }
    }
}

// Row n of a packed weight as floats: exactly the values that the file's format defines.
static void unpack_row(const PackedWeight& w, int row, float* out) {
    const uint8_t* panel = w.data + (size_t)(row / kPanel) * panel_bytes(w.format, w.k);
    const int c = row % kPanel;
    switch (w.format) {
#define POTOK_UNPACK(form)                               \
    case Packed::form:                                   \
        unpack_column<Packed::form>(panel, w.k, c, out); \
        break;
        POTOK_FORMS(POTOK_UNPACK)
#undef POTOK_UNPACK
    }
}
