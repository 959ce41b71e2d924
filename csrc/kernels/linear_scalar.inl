// The bits of every linear, written for reading.

template <int Rows>
static void tile_p4m_a8(const uint8_t* w, const int8_t* a, const float* d, const float* s, int k, float* acc) {
    for (int r = 0; r < Rows; r++) {
        for (int c = 0; c < kPanel; c++) {
            float sum = 0;
            for (int g = 0; g < k / kGroup; g++) {
                const uint8_t* q = w + (size_t)g * kP4MBytes;
                const uint16_t* scales = (const uint16_t*)(q + 256);
                const int8_t* x = a + (size_t)r * k + g * kGroup;
                int32_t dot = 0;
                for (int j = 0; j < 4; j++) {
                    for (int i = 0; i < 4; i++) {
                        const uint8_t byte = q[64 * j + 4 * c + i];
                        dot += (byte & 15) * x[8 * j + i] + (byte >> 4) * x[8 * j + 4 + i];
                    }
                }
                const size_t at = (size_t)r * (k / kGroup) + g;
                sum = fma1(f16_to_f32(scales[16 + c]), s[at], sum);
                sum = fma1(f16_to_f32(scales[c]) * d[at], (float)dot, sum);
            }
            acc[r * kPanel + c] = sum;
        }
    }
}

template <int Rows>
static void tile_p4m_a16(const uint8_t* w, const int16_t* a, const float* d, const float* s, int k, float* acc) {
    for (int r = 0; r < Rows; r++) {
        for (int c = 0; c < kPanel; c++) {
            float sum = 0;
            for (int g = 0; g < k / kGroup; g++) {
                const uint8_t* q = w + (size_t)g * kP4MBytes;
                const uint16_t* scales = (const uint16_t*)(q + 256);
                const int16_t* x = a + (size_t)r * k + g * kGroup;
                int32_t dot = 0;
                for (int i = 0; i < kGroup; i++) {
                    const int at = pair_k(i / 2, i % 2);
                    const uint8_t byte = q[64 * (at / 8) + 4 * c + at % 4];
                    dot += (at % 8 < 4 ? byte & 15 : byte >> 4) * x[i];
                }
                const size_t at = (size_t)r * (k / kGroup) + g;
                sum = fma1(f16_to_f32(scales[16 + c]), s[at], sum);
                sum = fma1(f16_to_f32(scales[c]) * d[at], (float)dot, sum);
            }
            acc[r * kPanel + c] = sum;
        }
    }
}

template <int Rows>
static void tile_p8_a16(const uint8_t* w, const int16_t* a, const float* d, int k, float* acc) {
    for (int r = 0; r < Rows; r++) {
        for (int c = 0; c < kPanel; c++) {
            float sum = 0;
            for (int g = 0; g < k / kGroup; g++) {
                const uint8_t* q = w + (size_t)g * kP8Bytes;
                const int16_t* x = a + (size_t)r * k + g * kGroup;
                int32_t dot = 0;
                for (int i = 0; i < kGroup; i++) dot += (int8_t)q[32 * (i / 2) + 2 * c + i % 2] * x[i];
                const float scale = f16_to_f32(((const uint16_t*)(q + 512))[c]) * d[(size_t)r * (k / kGroup) + g];
                sum = fma1(scale, (float)dot, sum);
            }
            acc[r * kPanel + c] = sum;
        }
    }
}

template <int Rows>
static void tile_f16(const uint16_t* w, const float* a, int k, float* acc) {
    for (int r = 0; r < Rows; r++) {
        Lanes sum = set1(0);
        for (int i = 0; i < k; i++) sum = fma(set1(a[(size_t)r * k + i]), load_f16(w + (size_t)i * kPanel), sum);
        store(acc + r * kPanel, sum);
    }
}

template <int Rows>
static void tile_f32(const float* w, const float* a, int k, float* acc) {
    for (int r = 0; r < Rows; r++) {
        Lanes sum = set1(0);
        for (int i = 0; i < k; i++) sum = fma(set1(a[(size_t)r * k + i]), load(w + (size_t)i * kPanel), sum);
        store(acc + r * kPanel, sum);
    }
}
