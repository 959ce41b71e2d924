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
static inline void quantize_group(const float* x, float limit, int32_t* q, float* d, float* s, int32_t* sum) {
    const Lanes a = load(x), b = load(x + 16), most = set1(3.40282347e38f);
    if ((bits(greater_equal(most, abs(a))) & bits(greater_equal(most, abs(b)))) != 0xffff) {
        memset(q, 0, kGroup * sizeof(int32_t));
        *d = *s = __builtin_nanf("");
        *sum = 0;
        return;
    }
    const float amax = max_tree(max(abs(a), abs(b)));
    const Lanes inverse = set1(amax > 0 ? limit / amax : 0);
    store_i32(q, round_even(mul(a, inverse)));
    store_i32(q + 16, round_even(mul(b, inverse)));
    int32_t total = 0;
    for (int i = 0; i < kGroup; i++) total += q[i];
    *d = amax / limit;
    *s = *d * (float)total;
    *sum = total;
}

static void quantize_a8(const float* x, int cols, IntRows<int8_t> out) {
    int32_t wide[kGroup];
    for (int g = 0; g < cols / kGroup; g++) {
        quantize_group(x + g * kGroup, 127.0f, wide, out.d + g, out.s + g, out.sum + g);
        for (int i = 0; i < kGroup; i++) out.q[g * kGroup + i] = (int8_t)wide[i];
    }
}

static void quantize_a16(const float* x, int cols, IntRows<int16_t> out) {
    int32_t wide[kGroup];
    for (int g = 0; g < cols / kGroup; g++) {
        quantize_group(x + g * kGroup, 32767.0f, wide, out.d + g, out.s + g, out.sum + g);
        int16_t* q = out.q + g * kGroup;
        for (int i = 0; i < kGroup; i += 4) {  // pair order: 0 2 1 3
            q[i] = (int16_t)wide[i];
            q[i + 1] = (int16_t)wide[i + 2];
            q[i + 2] = (int16_t)wide[i + 1];
            q[i + 3] = (int16_t)wide[i + 3];
        }
    }
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
    const Lanes most = set1(3.40282347e38f);
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
    int32_t wide[16];
    for (int i = 0; i < dim; i += 16) {
        store_i32(wide, round_even(mul(load(x + i), inverse)));
        for (int j = 0; j < 16; j++) out[i + j] = (int8_t)wide[j];
    }
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
