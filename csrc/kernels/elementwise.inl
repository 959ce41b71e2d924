// Kernels over one row: norm, activation quantisation, SwiGLU, rotation with the KV write, unpacking a weight row.
// Included inside the namespace of an ISA, after lanes.h and math.inl.

static inline Lanes load_part(const float* p, int n) {
    float lanes[16] = {0};
    memcpy(lanes, p, (size_t)n * sizeof(float));
    return load(lanes);
}
static inline void store_part(float* p, Lanes a, int n) {
    float lanes[16];
    store(lanes, a);
    memcpy(p, lanes, (size_t)n * sizeof(float));
}

static void rms_norm(const float* x, const float* weight, int cols, float eps, float* out) {
    Lanes sum = set1(0);
    int c = 0;
    for (; c + 16 <= cols; c += 16) {
        const Lanes v = load(x + c);
        sum = fma(v, v, sum);
    }
    if (c < cols) {
        const Lanes v = load_part(x + c, cols - c);
        sum = fma(v, v, sum);
    }
    const float mean = sum_tree(sum) / (float)cols;
    const Lanes r = set1(1.0f / sqrt1(mean + eps));
    for (c = 0; c + 16 <= cols; c += 16) store(out + c, mul(mul(load(x + c), r), load(weight + c)));
    if (c < cols) {
        const Lanes v = mul(mul(load_part(x + c, cols - c), r), load_part(weight + c, cols - c));
        store_part(out + c, v, cols - c);
    }
}

// One scale per 32: d = amax / limit, q = round(a * (limit / amax)), s = d * sum(q). q and sum(q) are whole.
// A group that holds NaN or infinity gets q = 0 and d = NaN, so that the row's logits show it.
template <class T>
static inline void quantize(const float* x, int cols, float limit, const IntRows<T>& out, size_t at) {
    const Lanes most = set1(kLargest);
    T* q = out.q + at;
    const size_t first = at / kGroup;
    for (size_t g = first; g < first + cols / kGroup; g++, x += kGroup, q += kGroup) {
        const Lanes a = load(x), b = load(x + 16);
        if ((bits(greater_equal(most, abs(a))) & bits(greater_equal(most, abs(b)))) != 0xffff) {
            memset(q, 0, kGroup * sizeof(T));
            out.d[g] = out.s[g] = __builtin_nanf("");
            out.sum[g] = 0;
            if (out.s16) out.s16[2 * g] = out.s16[2 * g + 1] = __builtin_nanf("");
            continue;
        }
        const float amax = max_tree(max(abs(a), abs(b))), d = amax / limit;
        const Lanes inverse = set1(amax > 0 ? limit / amax : 0);
        const Lanes low = round_even(mul(a, inverse)), high = round_even(mul(b, inverse));
        store_whole(q, low);
        store_whole(q + 16, high);
        const float sum = sum_tree(add(low, high));  // exact in any order: below 2^24
        out.d[g] = d;
        out.s[g] = d * sum;
        out.sum[g] = (int32_t)sum;
        if (out.s16) {
            out.s16[2 * g] = d * sum_tree(low);
            out.s16[2 * g + 1] = d * sum_tree(high);
        }
    }
}

static void quantize_a8(const float* x, int cols, const IntRows<int8_t>& out, size_t at) {
    quantize(x, cols, 127.0f, out, at);
}

static void quantize_a16(const float* x, int cols, const IntRows<int16_t>& out, size_t at) {
    quantize(x, cols, 32767.0f, out, at);
}

// silu(g) = g / (1 + exp(-g)); written with exp(-|g|) so that the polynomial never sees a positive argument.
static inline Lanes swiglu_lanes(Lanes g, Lanes u) {
    const Lanes one = set1(1.0f);
    const Lanes e = exp(sub(set1(0), abs(g)));
    const Lanes numerator = select(less(g, set1(0)), e, one);
    return mul(mul(g, div(numerator, add(one, e))), u);
}

static void swiglu(const float* gate, const float* up, int cols, float* out) {
    int c = 0;
    for (; c + 16 <= cols; c += 16) store(out + c, swiglu_lanes(load(gate + c), load(up + c)));
    if (c < cols) {
        store_part(out + c, swiglu_lanes(load_part(gate + c, cols - c), load_part(up + c, cols - c)), cols - c);
    }
}

static inline void rotate_head(const float* in, const float* cos_sin, int head_dim, int rope_dim, bool halves,
                               float* out) {
    const int n = rope_dim / 2;
    for (int i = 0; i < n; i++) {
        const int a = halves ? i : 2 * i, b = halves ? i + n : 2 * i + 1;
        const float c = cos_sin[i], s = cos_sin[n + i];
        out[a] = in[a] * c - in[b] * s;
        out[b] = in[a] * s + in[b] * c;
    }
    for (int i = rope_dim; i < head_dim; i++) out[i] = in[i];
}

// One row of head_dim elements as it is stored; the scale is for I8 alone.
static inline void store_kv(const float* x, int dim, uint16_t* out, float*) {
    for (int i = 0; i < dim; i += 16) store_f16(out + i, load(x + i));
}
static inline void store_kv(const float* x, int dim, float* out, float*) {
    for (int i = 0; i < dim; i += 16) store(out + i, load(x + i));
}
// scale = amax / 127, q = round(x * (127 / amax)); a row that is not finite gets q = 0 and scale NaN.
static inline void store_kv(const float* x, int dim, int8_t* out, float* scale) {
    const Lanes most = set1(kLargest);
    Lanes highest = set1(0);
    for (int i = 0; i < dim; i += 16) {
        const Lanes magnitude = abs(load(x + i));
        if (bits(greater_equal(most, magnitude)) != 0xffff) {
            memset(out, 0, (size_t)dim);
            *scale = __builtin_nanf("");
            return;
        }
        highest = max(highest, magnitude);
    }
    const float amax = max_tree(highest);
    const Lanes inverse = set1(amax > 0 ? 127.0f / amax : 0);
    for (int i = 0; i < dim; i += 16) store_whole(out + i, round_even(mul(load(x + i), inverse)));
    *scale = amax / 127.0f;
}

template <class T>
static void write_kv(const RopeTask& t) {
    const int d = t.head_dim;
    float rotated[kMaxHeadDim];
    T stored[kMaxHeadDim];
    for (int h = 0; h < t.num_kv_heads; h++) {
        const float* key = t.qkv + (t.num_heads + h) * d;
        const float* value = t.qkv + (t.num_heads + t.num_kv_heads + h) * d;
        T* k = (T*)(t.kv + h * kv_head_bytes(t.kv_type, t.block_size, d));
        T* v = k + (size_t)t.block_size * d;
        float* scales = (float*)(v + (size_t)t.block_size * d);
        rotate_head(key, t.cos_sin, d, t.rope_dim, t.halves, rotated);
        store_kv(rotated, d, stored, scales + t.slot);
        for (int i = 0; i < d; i++) k[(size_t)i * t.block_size + t.slot] = stored[i];
        store_kv(value, d, v + (size_t)t.slot * d, scales + t.block_size + t.slot);
    }
}

static void rope_kv(const RopeTask& t) {
    const int d = t.head_dim;
    for (int h = 0; h < t.num_heads; h++) {
        float* out = t.q + h * d;
        rotate_head(t.qkv + h * d, t.cos_sin, d, t.rope_dim, t.halves, out);
        for (int i = 0; i < d; i++) out[i] = out[i] * t.scale;
    }
    switch (t.kv_type) {
        case KvType::F16:
            write_kv<uint16_t>(t);
            break;
        case KvType::F32:
            write_kv<float>(t);
            break;
        case KvType::I8:
            write_kv<int8_t>(t);
            break;
    }
}
