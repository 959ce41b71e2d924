// Causal attention of some rows of one segment for one KV head, over paged K and V of element type T.
//
// A query row is (token, head of the group); all query rows of the task visit the tiles of 64 tokens in ascending
// order, so a tile is read from memory once. Per row the order of operations depends on absolute positions only:
// scores are chains over head_dim ascending; a tile updates (max, sum, out) by the online softmax; at multiples of
// 512 tokens the partial is merged into the total. Tokens past a row's position are never multiplied: their scores
// are replaced, and the sum over values stops before them.
// Included inside the namespace of an ISA, after lanes.h and math.inl.

static inline Lanes load_kv(const uint16_t* p) {
    return load_f16(p);
}
static inline Lanes load_kv(const float* p) {
    return load(p);
}
static inline Lanes load_kv(const int8_t* p) {
    return load_i8(p);
}
template <class T>
static constexpr KvType kv_type_of() {
    return sizeof(T) == 1 ? KvType::I8 : sizeof(T) == 2 ? KvType::F16 : KvType::F32;
}

// Lanes that Rows rows share: as many as there are registers to sum in.
template <int Rows>
static constexpr int lanes_of_rows() {
    return 4 * Rows <= kSums ? 4 : 2 * Rows <= kSums ? 2 : 1;
}

// s[r * 64 + t] = q[r] . k[t] for N times 16 tokens; k[j] points into a block's [head_dim][block_size].
template <class T, int Rows, int N>
static inline void score_tokens(const float* const* q, const T* const* k, int block_size, int head_dim, float* s) {
    Lanes c[Rows][N];
    for (int r = 0; r < Rows; r++)
        for (int j = 0; j < N; j++) c[r][j] = set1(0);
    for (int d = 0; d < head_dim; d++) {
        Lanes key[N];
        for (int j = 0; j < N; j++) key[j] = load_kv(k[j] + (size_t)d * block_size);
        for (int r = 0; r < Rows; r++) {
            const Lanes x = broadcast(q[r] + d);
            for (int j = 0; j < N; j++) c[r][j] = fma(x, key[j], c[r][j]);
        }
    }
    for (int r = 0; r < Rows; r++)
        for (int j = 0; j < N; j++) store(s + r * kTileTokens + 16 * j, c[r][j]);
}

// out[r] += sum over t in [0, tokens) of p[r * 64 + t] * v[t], for 16 * N of the head's elements.
template <class T, int Rows, int N>
static inline void add_values(const float* p, const T* v, int tokens, int head_dim, float* const* out, int d) {
    Lanes c[Rows][N];
    for (int r = 0; r < Rows; r++)
        for (int j = 0; j < N; j++) c[r][j] = load(out[r] + d + 16 * j);
    for (int t = 0; t < tokens; t++) {
        Lanes value[N];
        for (int j = 0; j < N; j++) value[j] = load_kv(v + (size_t)t * head_dim + d + 16 * j);
        for (int r = 0; r < Rows; r++) {
            const Lanes x = broadcast(p + r * kTileTokens + t);
            for (int j = 0; j < N; j++) c[r][j] = fma(x, value[j], c[r][j]);
        }
    }
    for (int r = 0; r < Rows; r++)
        for (int j = 0; j < N; j++) store(out[r] + d + 16 * j, c[r][j]);
}

alignas(64) static const float kLaneIndex[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// One row's state lies at `state`: out[head_dim], total[head_dim], max, sum, total max, total sum.
struct RowState {
    float *out, *total, *stats;
};
static inline RowState row_state(const AttentionTask& t, int row) {
    float* p = t.scratch + kTileRows * kTileTokens + (size_t)row * (2 * t.head_dim + 4);
    return {p, p + t.head_dim, p + 2 * t.head_dim};
}

template <class T>
static inline const T* block_keys(const AttentionTask& t, int token) {
    const uint8_t* block = t.kv + (size_t)t.blocks[token / t.block_size] * t.block_stride;
    return (const T*)(block + t.kv_head * kv_head_bytes(kv_type_of<T>(), t.block_size, t.head_dim));
}

// p[r * 64 + i] *= scale of token start + i, for `tokens` tokens rounded up to 16: of K, or of V.
template <class T, int Rows>
static inline void scale_tokens(const AttentionTask& t, float* p, int start, int tokens, bool of_values) {
    for (int i = 0; i < tokens; i += 16) {
        const T* head = block_keys<T>(t, start + i);
        const float* scales = (const float*)(head + (size_t)2 * t.block_size * t.head_dim);
        const Lanes s = load(scales + (of_values ? t.block_size : 0) + (start + i) % t.block_size);
        for (int r = 0; r < Rows; r++) store(p + r * kTileTokens + i, mul(load(p + r * kTileTokens + i), s));
    }
}

// Values of tokens [begin, end) of the tile at `start`, for `Rows` rows whose weights are at p.
template <class T, int Rows>
static inline void tile_values(const AttentionTask& t, const float* p, int start, int begin, int end,
                               float* const* out) {
    constexpr int N = lanes_of_rows<Rows>();
    for (int at = begin; at < end;) {
        const int slot = (start + at) % t.block_size;
        const int n = t.block_size - slot < end - at ? t.block_size - slot : end - at;
        const T* v = block_keys<T>(t, start + at) + (size_t)(t.block_size + slot) * t.head_dim;
        int d = 0;
        for (; d + 16 * N <= t.head_dim; d += 16 * N) add_values<T, Rows, N>(p + at, v, n, t.head_dim, out, d);
        for (; d < t.head_dim; d += 16) add_values<T, Rows, 1>(p + at, v, n, t.head_dim, out, d);
        at += n;
    }
}

template <class T, int Rows>
static void attend_tile(const AttentionTask& t, int first, int start) {
    constexpr int N = lanes_of_rows<Rows>();
    const float* q[Rows];
    float* out[Rows];
    float* stats[Rows];
    int tokens[Rows];  // of this tile that the row sees
    int most = 0, least = kTileTokens;
    for (int r = 0; r < Rows; r++) {
        const int row = (first + r) / t.group, head = t.kv_head * t.group + (first + r) % t.group;
        q[r] = t.q + (size_t)(t.row0 + row) * t.ld_q + head * t.head_dim;
        const RowState state = row_state(t, first + r);
        out[r] = state.out;
        stats[r] = state.stats;
        const int n = t.position + row + 1 - start;
        tokens[r] = n < 0 ? 0 : n > kTileTokens ? kTileTokens : n;
        most = tokens[r] > most ? tokens[r] : most;
        least = tokens[r] < least ? tokens[r] : least;
    }
    if (most == 0) return;

    float* s = t.scratch;
    for (int at = 0; at < most;) {
        const int left = (most - at + 15) / 16;  // past them the last again: its scores are never looked at
        const T* k[4];
        for (int j = 0; j < 4; j++) {
            const int token = start + at + 16 * (j < left ? j : left - 1);
            k[j] = block_keys<T>(t, token) + token % t.block_size;
        }
        if (N == 4 && left > 2) {
            score_tokens<T, Rows, 4>(q, k, t.block_size, t.head_dim, s + at);
            at += 64;
        } else if (N >= 2 && left > 1) {
            score_tokens<T, Rows, 2>(q, k, t.block_size, t.head_dim, s + at);
            at += 32;
        } else {
            score_tokens<T, Rows, 1>(q, k, t.block_size, t.head_dim, s + at);
            at += 16;
        }
    }

    if constexpr (sizeof(T) == 1) scale_tokens<T, Rows>(t, s, start, most, false);

    const Lanes nothing = set1(-__builtin_inff());
    float fade[16] = {0};
    for (int r = 0; r < Rows; r++) {
        if (tokens[r] == 0) continue;
        float* p = s + r * kTileTokens;
        Lanes highest = nothing;
        for (int i = 0; i < kTileTokens; i += 16) {
            Lanes v = nothing;
            if (i + 16 <= tokens[r]) {
                v = load(p + i);
            } else if (i < tokens[r]) {
                v = select(less(load(kLaneIndex), set1((float)(tokens[r] - i))), load(p + i), nothing);
            }
            store(p + i, v);
            highest = max(highest, v);
        }
        const float peak = max_tree(highest), before = stats[r][0];
        stats[r][0] = before > peak ? before : peak;
        fade[r] = before - stats[r][0];
    }
    store(fade, exp(load(fade)));
    for (int r = 0; r < Rows; r++) {
        if (tokens[r] == 0) continue;
        float* p = s + r * kTileTokens;
        const Lanes peak = set1(stats[r][0]);
        Lanes sum = set1(0);
        for (int i = 0; i < kTileTokens; i += 16) {
            const Lanes e = exp(sub(load(p + i), peak));
            store(p + i, e);
            sum = add(sum, e);
        }
        stats[r][1] = fma1(stats[r][1], fade[r], sum_tree(sum));
        if (fade[r] != 1.0f) {
            const Lanes f = set1(fade[r]);
            for (int d = 0; d < t.head_dim; d += 16) store(out[r] + d, mul(load(out[r] + d), f));
        }
    }

    if constexpr (sizeof(T) == 1) scale_tokens<T, Rows>(t, s, start, most, true);
    tile_values<T, Rows>(t, s, start, 0, least, out);
    for (int r = 0; r < Rows; r++) {
        if (tokens[r] > least) tile_values<T, 1>(t, s + r * kTileTokens, start, least, tokens[r], out + r);
    }
}

static void begin_segment(const AttentionTask& t, int rows) {
    for (int i = 0; i < rows; i++) {
        const RowState s = row_state(t, i);
        for (int d = 0; d < t.head_dim; d++) s.out[d] = 0;
        s.stats[0] = -__builtin_inff();
        s.stats[1] = 0;
    }
}

// total = total * exp(M - max) + out * exp(m - max), for the rows that saw something of the segment at `start`.
static void end_segment(const AttentionTask& t, int rows, int start) {
    for (int i = 0; i < rows; i++) {
        if (t.position + i / t.group < start) continue;
        const RowState s = row_state(t, i);
        const float peak = s.stats[2] > s.stats[0] ? s.stats[2] : s.stats[0];
        float weights[16] = {s.stats[2] - peak, s.stats[0] - peak};
        store(weights, exp(load(weights)));
        const Lanes a = set1(weights[0]), b = set1(weights[1]);
        for (int d = 0; d < t.head_dim; d += 16) {
            store(s.total + d, fma(load(s.total + d), a, mul(load(s.out + d), b)));
        }
        s.stats[2] = peak;
        s.stats[3] = fma1(s.stats[3], weights[0], s.stats[1] * weights[1]);
    }
}

template <class T>
static void attention_of(const AttentionTask& t) {
    const int rows = (t.row1 - t.row0) * t.group, last = t.position + t.row1 - t.row0 - 1;
    for (int i = 0; i < rows; i++) {
        const RowState s = row_state(t, i);
        for (int d = 0; d < t.head_dim; d++) s.total[d] = 0;
        s.stats[2] = -__builtin_inff();
        s.stats[3] = 0;
    }
    for (int segment = 0; segment <= last; segment += kSegmentTokens) {
        begin_segment(t, rows);
        for (int start = segment; start < segment + kSegmentTokens && start <= last; start += kTileTokens) {
            int first = 0;
            for (; first + kTileRows <= rows; first += kTileRows) attend_tile<T, kTileRows>(t, first, start);
            switch (rows - first) {
                case 5:
                    attend_tile<T, 5>(t, first, start);
                    break;
                case 4:
                    attend_tile<T, 4>(t, first, start);
                    break;
                case 3:
                    attend_tile<T, 3>(t, first, start);
                    break;
                case 2:
                    attend_tile<T, 2>(t, first, start);
                    break;
                case 1:
                    attend_tile<T, 1>(t, first, start);
                    break;
                default:
                    break;
            }
        }
        end_segment(t, rows, segment);
    }
    for (int i = 0; i < rows; i++) {
        const RowState s = row_state(t, i);
        const int head = t.kv_head * t.group + i % t.group;
        float* out = t.out + (size_t)(t.row0 + i / t.group) * t.ld_out + head * t.head_dim;
        const Lanes sum = set1(s.stats[3]);
        for (int d = 0; d < t.head_dim; d += 16) store(out + d, div(load(s.total + d), sum));
    }
}

static void attention(const AttentionTask& t) {
    switch (t.kv_type) {
        case KvType::F16:
            attention_of<uint16_t>(t);
            break;
        case KvType::F32:
            attention_of<float>(t);
            break;
        case KvType::I8:
            attention_of<int8_t>(t);
            break;
    }
}
