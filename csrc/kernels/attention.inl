// Causal attention of some query rows for one KV head, over paged K and V of element type T.
//
// A query row is (token, head of the group); all query rows of the task visit the tiles of 64 tokens in ascending
// order, so a tile is read from memory once. Per row the order of operations depends on absolute positions only:
// scores are chains over head_dim ascending; a tile updates (max, sum, out) by the online softmax; at multiples of
// 512 tokens the partial is merged into the total. Tokens past a row's position are never multiplied: their scores
// are replaced, and the sum over values stops before them.
// Included inside the namespace of an ISA, after lanes.h and math.inl.

// Sums stay in registers only where the loops over them are gone before anything else is done to the function.
#define POTOK_FLAT _Pragma("GCC unroll 16")
// What is read before this is read again after it, and not kept in a register until then.
#define POTOK_AGAIN __asm__ volatile("" ::: "memory")

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

// From so many query rows on, a tile is made floats once for all of them, and not again by every row tile.
static constexpr int kRowsOfFloats = 10;
static constexpr int kTileParts = kTileTokens / 16;  // a block holds whole parts

// Lanes that Rows rows share: as many as there are registers to sum in.
template <int Rows>
static constexpr int lanes_of_rows() {
    return 4 * Rows <= kSums ? 4 : 2 * Rows <= kSums ? 2 : 1;
}

// K and V of one tile, 16 tokens by 16 tokens. Parts that no row sees point to a part that some row sees.
template <class T>
struct KvTile {
    const T* k[kTileParts];  // [head_dim][16], ld_k elements from one to the next
    const T* v[kTileParts];  // [16][head_dim]
    int ld_k;
    const float *k_scales[kTileParts], *v_scales[kTileParts];  // [16], of int8 only
};

// Memory of the tile that comes next, asked for piece by piece while this one is computed: its blocks lie anywhere, so
// the processor cannot guess them. Into the second cache, the first is full of this tile. Decode from 750 MB of f16,
// one thread of a machine that streams 11.2 GB/s: 11.1 GB/s in AVX-512 and 9.1 in AVX2, against 9.2 and 6.4 without.
struct Fetch {
    const char* runs[kTileParts];
    int run, num_runs;
    size_t at, run_bytes;

    void piece() {
        if (run == num_runs) return;
        const size_t stop = run_bytes - at > 32 * 64 ? at + 32 * 64 : run_bytes;
        const char* memory = runs[run];
#pragma GCC unroll 8
        for (size_t i = at; i < stop; i += 64) __builtin_prefetch(memory + i, 0, 2);
        at = stop < run_bytes ? stop : 0;
        run += at == 0;
    }
};

// Query rows are copied to a fixed distance, so that the rows of a tile need one register for all their addresses; an
// odd number of cache lines, so that they do not meet in the cache.
static constexpr int kQueryFloats = kMaxHeadDim + 16;

struct QueryRow {
    float* partial;  // of the span at hand: out[head_dim], max, sum
    float* total;    // of the spans before, in the same form
    int position;
};

// c[r][j] += x[r] * y[j], where x[r] is one number at x + r * ld_x and y[j] are 16 at y[j].
template <class T, int Rows, int N>
static inline __attribute__((always_inline)) void add_products(const float* x, int ld_x, const T* const (&y)[N],
                                                               Lanes (&c)[Rows][N]) {
    if constexpr (Rows * N + N < kRegisters) {
        Lanes v[N];
        POTOK_FLAT
        for (int j = 0; j < N; j++) v[j] = load_kv(y[j]);
        POTOK_FLAT
        for (int r = 0; r < Rows; r++) {
            const Lanes u = broadcast(x + r * ld_x);
            POTOK_FLAT
            for (int j = 0; j < N; j++) c[r][j] = fma(u, v[j], c[r][j]);
        }
    } else {
        POTOK_FLAT
        for (int j = 0; j < N; j++) {
            const Lanes v = load_kv(y[j]);
            POTOK_FLAT
            for (int r = 0; r < Rows; r++) c[r][j] = fma(broadcast(x + r * ld_x), v, c[r][j]);
            POTOK_AGAIN;
        }
    }
}

// s[r * 64 + t] = q[r] . k[t] for N parts of 16 tokens; k: [part][head_dim][16].
template <class T, int Rows, int N>
static inline void score_tokens(const float* q, const T* const* k, int ld_k, int head_dim, float* s, Fetch& next) {
    Lanes c[Rows][N];
    const T* key[N];
    POTOK_FLAT
    for (int j = 0; j < N; j++) {
        key[j] = k[j];
        POTOK_FLAT
        for (int r = 0; r < Rows; r++) c[r][j] = set1(0);
    }
    for (int piece = 0; piece < head_dim; piece += 16) {
        next.piece();
        for (int d = piece; d < piece + 16; d++) {
            add_products<T, Rows, N>(q + d, kQueryFloats, key, c);
            POTOK_FLAT
            for (int j = 0; j < N; j++) key[j] += ld_k;
        }
    }
    POTOK_FLAT
    for (int r = 0; r < Rows; r++) {
        POTOK_FLAT
        for (int j = 0; j < N; j++) store(s + r * kTileTokens + 16 * j, c[r][j]);
    }
}

// partial[r] = partial[r] * fade[r] + sum over t in [begin, end) of p[r * 64 + t] * v[t], for 16 * N of the head's
// elements from d on. Without fade there is no partial yet.
template <class T, int Rows, int N>
static inline void add_values(const QueryRow* rows, const float* p, const T* const* v, int begin, int end, int head_dim,
                              int d, const float* fade, Fetch& next) {
    Lanes c[Rows][N];
    POTOK_FLAT
    for (int r = 0; r < Rows; r++) {
        POTOK_FLAT
        for (int j = 0; j < N; j++) {
            c[r][j] = fade ? mul(load(rows[r].partial + d + 16 * j), set1(fade[r])) : set1(0);
        }
    }
    for (int part = begin / 16; 16 * part < end; part++) {
        next.piece();
        const int first = begin > 16 * part ? begin : 16 * part, stop = end < 16 * part + 16 ? end : 16 * part + 16;
        const T* value[N];
        POTOK_FLAT
        for (int j = 0; j < N; j++) value[j] = v[part] + (size_t)(first - 16 * part) * head_dim + d + 16 * j;
        for (int t = first; t < stop; t++) {
            add_products<T, Rows, N>(p + t, kTileTokens, value, c);
            POTOK_FLAT
            for (int j = 0; j < N; j++) value[j] += head_dim;
        }
    }
    POTOK_FLAT
    for (int r = 0; r < Rows; r++) {
        POTOK_FLAT
        for (int j = 0; j < N; j++) store(rows[r].partial + d + 16 * j, c[r][j]);
    }
}

template <class T, int Rows>
static inline void add_tile(const QueryRow* rows, const float* p, const KvTile<T>& tile, int begin, int end,
                            int head_dim, const float* fade, Fetch& next) {
    constexpr int N = lanes_of_rows<Rows>();
    int d = 0;
    for (; d + 16 * N <= head_dim; d += 16 * N) {
        add_values<T, Rows, N>(rows, p, tile.v, begin, end, head_dim, d, fade, next);
    }
    for (; d < head_dim; d += 16) add_values<T, Rows, 1>(rows, p, tile.v, begin, end, head_dim, d, fade, next);
}

alignas(64) static const float kLaneIndex[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// p[r * 64 + t] *= scales[t], of the tokens that the row sees, rounded up to 16.
template <int Rows>
static inline void scale_tokens(float* p, const float* const* scales, const int* tokens) {
    for (int r = 0; r < Rows; r++) {
        for (int i = 0; i < tokens[r]; i += 16) {
            store(p + r * kTileTokens + i, mul(load(p + r * kTileTokens + i), load(scales[i / 16])));
        }
    }
}

// What a row tile has seen of the span at hand, one lane for each row.
struct alignas(64) Seen {
    float highest[16];  // score
    float sum[16];      // of weights
};
static_assert(kTileRows <= 8, "max_trees and sum_trees take eight");

// The online softmax: scores s [count][64] of a tile become weights, and what the row tile has seen is brought up to
// date. fade: what the partials are to be multiplied with. All rows together, since their trees and their exp wait for
// one result after another.
static __attribute__((noinline, flatten)) void soften(Seen& seen, int count, const int* tokens, float* s, float* fade) {
    const Lanes nothing = set1(-__builtin_inff());
    Lanes rows[8];
    POTOK_FLAT
    for (int r = 0; r < 8; r++) rows[r] = nothing;
    for (int r = 0; r < count; r++) {
        float* p = s + r * kTileTokens;
        if (tokens[r] == kTileTokens) {
            rows[r] = max(max(load(p), load(p + 16)), max(load(p + 32), load(p + 48)));
            continue;
        }
        for (int i = 0; i < tokens[r]; i += 16) {
            Lanes v = load(p + i);
            if (i + 16 > tokens[r]) {
                v = select(less(load(kLaneIndex), set1((float)(tokens[r] - i))), v, nothing);
                store(p + i, v);
            }
            rows[r] = max(rows[r], v);
        }
    }
    const Lanes before = load(seen.highest), highest = max(before, max_trees(rows));
    const Lanes faded = exp(sub(before, highest));
    store(seen.highest, highest);
    store(fade, faded);

    POTOK_FLAT
    for (int r = 0; r < 8; r++) rows[r] = set1(0);
    for (int r = 0; r < count; r++) {
        float* p = s + r * kTileTokens;
        const Lanes peak = broadcast(seen.highest + r);
        if (tokens[r] == kTileTokens) {
            Lanes e[4];
            POTOK_FLAT
            for (int i = 0; i < 4; i++) e[i] = sub(load(p + 16 * i), peak);
            exps(e);
            POTOK_FLAT
            for (int i = 0; i < 4; i++) store(p + 16 * i, e[i]);
            rows[r] = add(add(add(e[0], e[1]), e[2]), e[3]);
            continue;
        }
        for (int i = 0; i < tokens[r]; i += 16) {
            const Lanes e = exp(sub(load(p + i), peak));
            store(p + i, e);
            rows[r] = add(rows[r], e);
        }
    }
    store(seen.sum, fma(load(seen.sum), faded, sum_trees(rows)));
}

// The tile at token `start`. first: of its span, so that partials begin here. s: scores [Rows][64].
template <class T, int Rows>
static __attribute__((noinline)) void attend_tile(const KvTile<T>& tile, const float* q, const QueryRow* rows,
                                                  Seen& seen, int head_dim, int start, bool first, float* s,
                                                  Fetch& next) {
    constexpr int N = lanes_of_rows<Rows>();
    int tokens[Rows];  // of this tile that the row sees
    int most = 0, least = kTileTokens;
    for (int r = 0; r < Rows; r++) {
        const int n = rows[r].position + 1 - start;
        tokens[r] = n < 0 ? 0 : n > kTileTokens ? kTileTokens : n;
        most = tokens[r] > most ? tokens[r] : most;
        least = tokens[r] < least ? tokens[r] : least;
    }
    if (most == 0) return;

    for (int part = 0, parts = (most + 15) / 16; part < parts;) {
        const int left = parts - part;
        if (N == 4 && left > 2) {
            score_tokens<T, Rows, 4>(q, tile.k, tile.ld_k, head_dim, s, next);  // perhaps of a part that none sees
            part += 4;
        } else if (N >= 2 && left > 1) {
            score_tokens<T, Rows, 2>(q, tile.k + part, tile.ld_k, head_dim, s + 16 * part, next);
            part += 2;
        } else {
            score_tokens<T, Rows, 1>(q, tile.k + part, tile.ld_k, head_dim, s + 16 * part, next);
            part += 1;
        }
    }
    if (tile.k_scales[0]) scale_tokens<Rows>(s, tile.k_scales, tokens);

    alignas(64) float fade[16];
    soften(seen, Rows, tokens, s, fade);
    if (tile.v_scales[0]) scale_tokens<Rows>(s, tile.v_scales, tokens);

    add_tile<T, Rows>(rows, s, tile, 0, least, head_dim, first ? nullptr : fade, next);
    const float keep = 1;
    for (int r = 0; r < Rows; r++) {
        if (tokens[r] > least) {
            add_tile<T, 1>(rows + r, s + r * kTileTokens, tile, least, tokens[r], head_dim, &keep, next);
        }
    }
}

// attend_tile for `count` rows, at most Rows.
template <class T, int Rows>
static inline void attend_rows(int count, const KvTile<T>& tile, const float* q, const QueryRow* rows, Seen& seen,
                               int head_dim, int start, bool first, float* s, Fetch& next) {
    if (count == Rows) return attend_tile<T, Rows>(tile, q, rows, seen, head_dim, start, first, s, next);
    if constexpr (Rows > 1) attend_rows<T, Rows - 1>(count, tile, q, rows, seen, head_dim, start, first, s, next);
}

static inline float* scratch_partial(const AttentionTask& t, int index) {
    return t.scratch + index * partial_floats(t.head_dim);
}

template <class T>
static inline const T* block_keys(const AttentionTask& t, int token) {
    const uint8_t* block = t.kv + (size_t)t.blocks[token / t.block_size] * t.block_stride;
    return (const T*)(block + t.kv_head * kv_head_bytes(kv_type_of<T>(), t.block_size, t.head_dim));
}

// The tile at `start`, of which `tokens` are seen by some row.
template <class T>
static inline KvTile<T> find_tile(const AttentionTask& t, int start, int tokens) {
    KvTile<T> tile{};
    tile.ld_k = t.block_size;
    for (int part = 0; part < kTileParts; part++) {
        const int token = 16 * part < tokens ? start + 16 * part : start + (tokens - 1) / 16 * 16;
        const T* head = block_keys<T>(t, token);
        const int slot = token % t.block_size;
        tile.k[part] = head + slot;
        tile.v[part] = head + (size_t)(t.block_size + slot) * t.head_dim;
        if constexpr (sizeof(T) == 1) {
            const float* scales = (const float*)(head + (size_t)2 * t.block_size * t.head_dim);
            tile.k_scales[part] = scales + slot;
            tile.v_scales[part] = scales + t.block_size + slot;
        }
    }
    return tile;
}

// The same tile with K [head_dim][64] and V [64][head_dim] as floats at `out`.
template <class T>
static __attribute__((noinline)) KvTile<float> tile_of_floats(const KvTile<T>& tile, int head_dim, int tokens,
                                                              float* out) {
    KvTile<float> floats{};
    float* values = out + (size_t)kTileTokens * head_dim;
    const int parts = (tokens + 15) / 16;
    floats.ld_k = kTileTokens;
    for (int part = 0; part < kTileParts; part++) {
        floats.k[part] = out + 16 * part;
        floats.v[part] = values + (size_t)16 * part * head_dim;
        floats.k_scales[part] = tile.k_scales[part];
        floats.v_scales[part] = tile.v_scales[part];
    }
    for (int d = 0; d < head_dim; d++) {
        for (int part = 0; part < parts; part++) {
            store(out + d * kTileTokens + 16 * part, load_kv(tile.k[part] + (size_t)d * tile.ld_k));
        }
    }
    for (int part = 0; part < parts; part++) {
        for (int i = 0; i < 16 * head_dim; i += 16) {
            store(values + (size_t)16 * part * head_dim + i, load_kv(tile.v[part] + i));
        }
    }
    return floats;
}

// Where the tile at `start` lies, if it is one of the task's.
template <class T>
static inline Fetch fetch_of(const AttentionTask& t, int start, int end) {
    Fetch next{};
    next.run_bytes = kv_head_bytes(kv_type_of<T>(), t.block_size, t.head_dim);
    for (int token = start; token < start + kTileTokens && token < end; token += t.block_size) {
        next.runs[next.num_runs++] = (const char*)block_keys<T>(t, token);
    }
    return next;
}

// Rows in row tiles of even heights: tile i begins with row first_row(i).
struct RowTiles {
    int count;
    int number() const { return (count + kTileRows - 1) / kTileRows; }
    int first_row(int i) const { return count * i / number(); }
};

template <class T>
static void visit_tile(const AttentionTask& t, const QueryRow* rows, Seen* seen, RowTiles tiles, int start, int end,
                       bool first) {
    float* q = scratch_partial(t, 2 * tiles.count);
    float* s = q + (size_t)tiles.count * kQueryFloats;
    float* floats = s + kTileRows * kTileTokens;
    const int tokens = end - start < kTileTokens ? end - start : kTileTokens;
    const KvTile<T> tile = find_tile<T>(t, start, tokens);
    Fetch next = fetch_of<T>(t, start + kTileTokens, end);
    const bool wide = sizeof(T) < sizeof(float) && tiles.count >= kRowsOfFloats;
    const KvTile<float> wider = wide ? tile_of_floats<T>(tile, t.head_dim, tokens, floats) : KvTile<float>{};
    for (int i = 0; i < tiles.number(); i++) {
        const int row = tiles.first_row(i), n = tiles.first_row(i + 1) - row;
        const float* queries = q + row * kQueryFloats;
        if (wide) {
            attend_rows<float, kTileRows>(n, wider, queries, rows + row, seen[i], t.head_dim, start, first, s, next);
        } else {
            attend_rows<T, kTileRows>(n, tile, queries, rows + row, seen[i], t.head_dim, start, first, s, next);
        }
    }
}

// The tiles from `start` to `stop`, all of one span. first: they begin it, else the partials are carried on.
template <class T>
static void visit_span(const AttentionTask& t, const QueryRow* rows, int count, int start, int stop, int end,
                       bool first) {
    const RowTiles tiles{count};
    Seen seen[(kTaskRows + kTileRows - 1) / kTileRows];
    for (int i = 0; i < tiles.number(); i++) {
        store(seen[i].highest, set1(-__builtin_inff()));
        store(seen[i].sum, set1(0));
        for (int row = tiles.first_row(i), r = 0; !first && row + r < tiles.first_row(i + 1); r++) {
            seen[i].highest[r] = rows[row + r].partial[t.head_dim];
            seen[i].sum[r] = rows[row + r].partial[t.head_dim + 1];
        }
    }
    for (int at = start; at < stop; at += kTileTokens) {
        visit_tile<T>(t, rows, seen, tiles, at, end, first && at == start);
    }
    for (int i = 0; i < tiles.number(); i++) {
        for (int row = tiles.first_row(i), r = 0; row + r < tiles.first_row(i + 1); r++) {
            rows[row + r].partial[t.head_dim] = seen[i].highest[r];
            rows[row + r].partial[t.head_dim + 1] = seen[i].sum[r];
        }
    }
}

// total = total * exp(M - max) + partial * exp(m - max), for the rows that see something of the span at `start`. The
// factors of 16 rows together: those of one wait for one result after another.
static __attribute__((noinline)) void merge_span(QueryRow* rows, int count, int head_dim, int start) {
    if (start == 0) {  // 0 * exp(-inf) + partial * exp(0)
        for (int i = 0; i < count; i++) {
            float* partial = rows[i].partial;
            for (int d = 0; d < head_dim; d += 16) store(partial + d, add(set1(0), load(partial + d)));
            rows[i].total = partial;
        }
        return;
    }
    for (int first = 0; first < count; first += 16) {
        const int n = count - first < 16 ? count - first : 16;
        alignas(64) float total[16] = {}, partial[16] = {}, highest[16];
        for (int i = 0; i < n; i++) {
            const QueryRow& row = rows[first + i];
            total[i] = row.total[head_dim];
            partial[i] = row.position < start ? total[i] : row.partial[head_dim];
        }
        const Lanes peak = max(load(total), load(partial));
        Lanes factors[2] = {sub(load(total), peak), sub(load(partial), peak)};
        exps(factors);
        store(highest, peak);
        store(total, factors[0]);
        store(partial, factors[1]);
        for (int i = 0; i < n; i++) {
            const QueryRow& row = rows[first + i];
            if (row.position < start) continue;
            const Lanes a = broadcast(total + i), b = broadcast(partial + i);
            for (int d = 0; d < head_dim; d += 16) {
                store(row.total + d, fma(load(row.total + d), a, mul(load(row.partial + d), b)));
            }
            row.total[head_dim] = highest[i];
            row.total[head_dim + 1] = fma1(row.total[head_dim + 1], total[i], row.partial[head_dim + 1] * partial[i]);
        }
    }
}

template <class T>
static void attention_of(const AttentionTask& t) {
    QueryRow rows[kTaskRows];
    const int count = t.num_rows * t.group, heads = t.num_kv_heads * t.group;
    float* copies = scratch_partial(t, 2 * count);
    int seen = 0;
    for (int i = 0; i < count; i++) {
        const int row = t.rows[i / t.group], head = t.kv_head * t.group + i % t.group;
        const float* q = t.q + (size_t)row * t.ld_q + head * t.head_dim;
        for (int d = 0; d < t.head_dim; d += 16) store(copies + i * kQueryFloats + d, load(q + d));
        rows[i].position = t.positions[row];
        seen = rows[i].position >= seen ? rows[i].position + 1 : seen;
    }
    const int end = t.end < seen ? t.end : seen;

    for (int span = t.out ? 0 : t.begin; span < (t.out ? seen : end); span += kSpanTokens) {
        const bool kept = !t.out || span < t.begin || span >= end;
        for (int i = 0; i < count; i++) {
            if (kept) {
                const int row = t.rows[i / t.group], head = t.kv_head * t.group + i % t.group;
                const size_t at = t.partial0[row] + (size_t)(span / kSpanTokens) * heads + head;
                rows[i].partial = t.partials + at * partial_floats(t.head_dim);
            } else {
                rows[i].partial = scratch_partial(t, 2 * i + (span > 0));
            }
        }
        const int stop = span + kSpanTokens < end ? span + kSpanTokens : end;
        const int start = span > t.begin ? span : t.begin;
        if (start < stop) visit_span<T>(t, rows, count, start, stop, end, start == span);
        if (t.out) merge_span(rows, count, t.head_dim, span);
    }
    if (!t.out) return;
    for (int i = 0; i < count; i++) {
        const int head = t.kv_head * t.group + i % t.group;
        float* out = t.out + (size_t)t.rows[i / t.group] * t.ld_out + head * t.head_dim;
        const Lanes sum = set1(rows[i].total[t.head_dim + 1]);
        for (int d = 0; d < t.head_dim; d += 16) store(out + d, div(load(rows[i].total + d), sum));
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

#undef POTOK_FLAT
#undef POTOK_AGAIN
