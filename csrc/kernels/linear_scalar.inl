// The bits of every linear, written for reading.
static constexpr int kTileHeight = 4;

// Stored element i of a group is k = order(i): A16 rows lie in pair order.
static inline int order(int8_t, int i) {
    return i;
}
static inline int order(int16_t, int i) {
    return pair_k(i / 2, i % 2);
}

template <Packed F, int Rows, class T>
static void tile_integer(const uint8_t* panel, const IntRows<T>& a, int k, float* acc) {
    constexpr int scales = scales_per_group(F), span = kGroup / scales;
    const int groups = k / kGroup;
    const float* s = sums_of<F>(a);
    for (int r = 0; r < Rows; r++) {
        for (int c = 0; c < kPanel; c++) {
            float sum = 0;
            for (int g = 0; g < groups; g++) {
                const T* x = a.q + (size_t)r * k + g * kGroup;
                const size_t at = (size_t)r * groups + g;
                for (int half = 0; half < scales; half++) {
                    if (has_minimum(F)) sum = fma1(minimum<F>(panel, g, half, c), s[scales * at + half], sum);
                    int32_t dot = 0;
                    for (int i = half * span; i < (half + 1) * span; i++)
                        dot += level<F>(panel, g, c, order(T(), i)) * x[i];
                    sum = fma1(scale<F>(panel, g, half, c) * a.d[at], (float)dot, sum);
                }
            }
            acc[r * kPanel + c] = sum;
        }
    }
}

template <Packed F, int Rows>
static void tile_a8(const uint8_t* panel, const IntRows<int8_t>& a, int k, float* acc) {
    tile_integer<F, Rows>(panel, a, k, acc);
}

template <Packed F, int Rows>
static void tile_a16(const uint8_t* panel, const IntRows<int16_t>& a, int k, float* acc) {
    tile_integer<F, Rows>(panel, a, k, acc);
}

template <Packed F, int Rows>
static void tile_float(const uint8_t* panel, const float* a, int k, float* acc) {
    for (int r = 0; r < Rows; r++) {
        Lanes sum = set1(0);
        for (int i = 0; i < k; i++) {
            const uint8_t* w = panel + panel_bytes(F, i);
            Lanes column;
            if constexpr (F == Packed::F32) {
                column = load((const float*)w);
            } else if constexpr (F == Packed::F16) {
                column = load_f16((const uint16_t*)w);
            } else {
                column = load_bf16((const uint16_t*)w);
            }
            sum = fma(set1(a[(size_t)r * k + i]), column, sum);
        }
        store(acc + r * kPanel, sum);
    }
}
