// The sampler: one row, in the order of operations of potok.sampling, whose plain sort of the vocabulary gives the same
// bits. Nothing here sorts the vocabulary: a row keeps the maxima of spans of 64 logits, gathers a pool of the ids
// above a logit that is low enough, finds a bracket of logits in it that holds the wanted place of the order, and sorts
// that. Sums of weights are exact in double (potok.sampling says why), so a sum over "everything above a logit" equals
// the running sum of the order there, whatever the order of adding. Included inside the namespace of an ISA, after
// lanes.h and math.inl.

constexpr float kGreedyBelow = 1e-5f;
constexpr float kInfinity = __builtin_inff();
constexpr float kWeightStep = 0x1p-11f;  // adding and subtracting it rounds to a multiple of 2^-34
constexpr float kWeightless = -25;       // exp of it or less rounds to the weight 0
constexpr int64_t kNoCount = INT64_MAX;
constexpr int kSmallWindow = 32;
constexpr int kSampledSpans = 16;  // one of so many spans gives 16 ids to a sample of the row

// The head of the order: how many ids, and the sum of their weights.
struct Head {
    int64_t count;
    double mass;
};

// Where to stop in the order: at so many ids, or when the mass has reached (or, if strict, passed) a value.
struct Goal {
    int64_t count;
    double mass;
    bool strict;
};

struct Place {
    Head head;  // up to and with id
    int32_t id;
};

// All ids of a range of logits, by id; then 16 logits of -inf and weights of 0.
struct Pool {
    float *x, *weights, *ids;  // [spans * 64 + 16] each
    int size;
};

struct Sampler {
    float* x;  // logits, [spans * 64], -inf past the vocabulary
    int vocab, spans;
    float* peaks;     // [spans], highest logit of each span; -inf up to a multiple of 16
    uint8_t* edited;  // [spans], flags
    float peak;       // highest of peaks
    float scale;      // 1 / temperature
    float floor;      // finite; no logit below it has a weight
    Pool pool;        // all ids whose logit is >= low
    float low;        // infinity before the pool is first gathered
    Head head;        // of the pool
    Pool part;        // of the pool
    // Ids whose logit is in some bracket, in order; before: what stands before them in the order.
    uint64_t *window, *spare;
    int window_size;
    Head before;
    float* weights;  // [spans * 64], of the ids in the window
};

static inline bool reached(const Goal& goal, const Head& head) {
    return head.count >= goal.count || (goal.strict ? head.mass > goal.mass : head.mass >= goal.mass);
}

// ---- Random numbers

// Philox4x32-10 of counter (position, choice, 0, 0) and key seed; the first two words as a number in [0, 1).
static double uniform(uint64_t seed, uint32_t choice, uint32_t position) {
    uint32_t c[4] = {position, choice, 0, 0}, k[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    for (int round = 0; round < 10; round++) {
        const uint64_t a = (uint64_t)0xD2511F53 * c[0], b = (uint64_t)0xCD9E8D57 * c[2];
        const uint32_t next[4] = {(uint32_t)(b >> 32) ^ c[1] ^ k[0], (uint32_t)b, (uint32_t)(a >> 32) ^ c[3] ^ k[1],
                                  (uint32_t)a};
        memcpy(c, next, sizeof c);
        k[0] += 0x9E3779B9;
        k[1] += 0xBB67AE85;
    }
    return (double)(((uint64_t)c[1] << 32 | c[0]) >> 11) * 0x1p-53;
}

static uint64_t hash_row(const float* x, int vocab) {
    uint64_t sum = 0;
    for (int i = 0; i < vocab; i++) {
        uint32_t u;
        memcpy(&u, x + i, 4);
        uint64_t v = ((uint64_t)i << 32 | u) * 0x9E3779B97F4A7C15;
        v = (v ^ v >> 32) * 0xBF58476D1CE4E5B9;
        sum += v;
    }
    return sum;
}

// ---- Order

// Ascending keys are descending logits, then ascending ids.
static inline uint64_t order_key(float x, int32_t id) {
    x = x + 0.0f;  // -0 becomes 0
    uint32_t u;
    memcpy(&u, &x, 4);
    u = u >> 31 ? u : ~u & 0x7fffffff;
    return (uint64_t)u << 32 | (uint32_t)id;
}

static void merge_runs(const uint64_t* a, int middle, int n, uint64_t* out) {
    if (middle >= n || a[middle - 1] <= a[middle]) {
        memcpy(out, a, (size_t)n * sizeof *a);
        return;
    }
    int i = 0, j = middle, k = 0;
    while (i < middle && j < n) {
        const bool second = a[j] < a[i];
        out[k++] = second ? a[j] : a[i];
        j += second;
        i += !second;
    }
    memcpy(out + k, a + i, (size_t)(middle - i) * sizeof *a);
    memcpy(out + k + middle - i, a + j, (size_t)(n - j) * sizeof *a);
}

static void sort_window(Sampler& s) {
    const int run = 16, n = s.window_size;
    int in_order = 1;
    while (in_order < n && s.window[in_order - 1] < s.window[in_order]) in_order++;
    if (in_order >= n) return;  // equal logits are
    for (int start = 0; start < n; start += run) {
        const int end = start + run < n ? start + run : n;
        for (int i = start + 1; i < end; i++) {
            const uint64_t v = s.window[i];
            int j = i;
            for (; j > start && s.window[j - 1] > v; j--) s.window[j] = s.window[j - 1];
            s.window[j] = v;
        }
    }
    for (int width = run; width < n; width *= 2) {
        for (int start = 0; start < n; start += 2 * width) {
            const int left = n - start < 2 * width ? n - start : 2 * width;
            merge_runs(s.window + start, width < left ? width : left, left, s.spare + start);
        }
        uint64_t* sorted = s.spare;
        s.spare = s.window;
        s.window = sorted;
    }
}

// How many spans hold a logit >= low.
static inline int spans_reaching(const Sampler& s, float low) {
    const Lanes lows = set1(low);
    int n = 0;
    for (int i = 0; i < s.spans; i += 16) n += __builtin_popcount(bits(greater_equal(load(s.peaks + i), lows)));
    return n;
}

// A finite number that at least `rank` spans reach and not many more, or the lowest one where that takes too long.
static float span_rank(const Sampler& s, int rank) {
    if (s.spans < rank) return -kLargest;
    float low = -kLargest, high = s.peak;
    float reach = 1;
    for (int step = 0; step < 32; step++) {
        const float middle = low == -kLargest ? s.peak - reach : low * 0.5f + high * 0.5f;
        reach = reach * 2;
        const int n = spans_reaching(s, middle);
        if (n < rank) {
            high = middle;
        } else {
            low = middle;
            if (n <= rank + rank / 4) break;
        }
    }
    return low > -kLargest ? low : -kLargest;
}

// ---- Weights

// Logits become their weights.
template <int N>
static inline __attribute__((always_inline)) void weigh(const Sampler& s, Lanes (&x)[N]) {
    const Lanes peak = set1(s.peak), scale = set1(s.scale), step = set1(kWeightStep);
    Lanes shifted[N], n[N], e[N];
    for (int i = 0; i < N; i++) x[i] = max(mul(sub(x[i], peak), scale), set1(kWeightless));
    // One rounding where potok.sampling.math has two: another n for a few x, another weight for none (tests/sampling).
    for (int i = 0; i < N; i++) shifted[i] = fma(x[i], set1(kLog2E), set1(kRound));
    for (int i = 0; i < N; i++) n[i] = sub(shifted[i], set1(kRound));
    exp_fractions<N>(x, n, e);
    for (int i = 0; i < N; i++) x[i] = sub(add(times_exp2(e[i], shifted[i]), step), step);
}
static inline Lanes weight(const Sampler& s, Lanes x) {
    Lanes one[1] = {x};
    weigh(s, one);
    return one[0];
}

// A sum of weights, exact without a conversion to double for each: `low` takes what rounding takes from `high`.
// 64 weights of at most 1 leave `high` in [64, 128], so each loses a multiple of 2^-34 of at most 2^-18, and the sum of
// 64 such multiples is exact.
struct Mass {
    Lanes high, low;
    Wide settled;
};
constexpr int kUnsettled = 64;  // weights a lane
constexpr float kMassBase = 64;

static inline Mass no_mass() {
    return {set1(kMassBase), set1(0), wide_zero()};
}
static inline void add_to(Mass& mass, Lanes weights) {
    const Lanes high = add(mass.high, weights);
    mass.low = add(mass.low, sub(weights, sub(high, mass.high)));
    mass.high = high;
}
// Due after at most kUnsettled calls of add_to.
static inline void settle(Mass& mass) {
    mass.settled = wide_add(wide_add(mass.settled, sub(mass.high, set1(kMassBase))), mass.low);
    mass.high = set1(kMassBase);
    mass.low = set1(0);
}
static inline double total(Mass mass) {
    settle(mass);
    double v[16], total = 0;
    wide_store(v, mass.settled);
    for (int i = 0; i < 16; i++) total += v[i];
    return total;
}

// n: a multiple of 16.
static double sum_of(const float* weights, int n) {
    Mass mass = no_mass();
    for (int i = 0; i < n;) {
        const int due = n - i < 16 * kUnsettled ? n : i + 16 * kUnsettled;
        for (; i < due; i += 16) add_to(mass, load(weights + i));
        settle(mass);
    }
    return total(mass);
}

// Weights are measured from the highest logit, at this temperature.
static void set_temperature(Sampler& s, float temperature) {
    s.scale = 1.0f / temperature;
    const double floor = (double)s.peak + (double)kWeightless * (double)temperature;
    s.floor = floor > -kLargest ? (float)floor : -kLargest;
    s.pool.size = 0;
    s.low = kInfinity;
    s.head = {0, 0};
    s.window_size = 0;
    s.before = {0, 0};
}

// ---- Pool

static inline void append(const Pool& pool, int& n, Mask picked, Lanes x, Lanes weights, Lanes ids) {
    store_packed(pool.x + n, picked, x);
    store_packed(pool.weights + n, picked, weights);
    store_packed(pool.ids + n, picked, ids);
    n += __builtin_popcount(bits(picked));
}

static inline void close(Pool& pool, int n) {
    store(pool.x + n, set1(-kInfinity));
    store(pool.weights + n, set1(0));
    pool.size = n;
}

// The pool becomes the ids with logit >= low. Returns the mass of the whole row if asked for, else 0.
template <bool Whole>
static double gather(Sampler& s, float low) {
    alignas(64) static const float first[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const float least = Whole && s.floor < low ? s.floor : low;
    const Lanes lane = load(first);
    const Pool pool = s.pool;
    Mass mass = no_mass();
    int n = 0;
    for (int span = 0; span < s.spans; span++) {
        if (Whole && span * kSpan % (16 * kUnsettled) == 0) settle(mass);
        if (!(s.peaks[span] >= least)) continue;
        const float* p = s.x + span * kSpan;
        Lanes w[kSpan / 16] = {load(p), load(p + 16), load(p + 32), load(p + 48)};
        weigh(s, w);
        for (int i = 0; Whole && i < kSpan / 16; i++) add_to(mass, w[i]);
        if (!(s.peaks[span] >= low)) continue;
        for (int i = 0; i < kSpan / 16; i++) {
            const Lanes x = load(p + 16 * i);
            const Mask picked = greater_equal(x, set1(low));
            if (bits(picked)) append(pool, n, picked, x, w[i], add(lane, set1((float)(span * kSpan + 16 * i))));
        }
    }
    close(s.pool, n);
    s.low = low;
    s.head = {n, sum_of(s.pool.weights, (n + 15) / 16 * 16)};
    return total(mass);
}

// `to` becomes the ids of `from` with low <= logit < high; both may be the same.
static void narrow(const Pool& from, float low, float high, Pool& to) {
    const Lanes lows = set1(low), highs = set1(high);
    int n = 0;
    for (int i = 0; i < from.size; i += 16) {
        const Lanes x = load(from.x + i);
        const Mask picked = both(greater_equal(x, lows), less(x, highs));
        append(to, n, picked, x, load(from.weights + i), load(from.ids + i));
    }
    close(to, n);
}

// The head of a pool made of the ids whose value is >= bound, values being its logits or its weights (both fall
// along the order). bound: finite for logits, above 0 for weights.
static Head head_reaching(const Pool& pool, const float* values, float bound) {
    const Lanes bounds = set1(bound);
    Mass mass = no_mass();
    int64_t count = 0;
    for (int i = 0; i < pool.size;) {
        const int due = pool.size - i < 16 * kUnsettled ? pool.size : i + 16 * kUnsettled;
        for (; i < due; i += 16) {
            const Mask picked = greater_equal(load(values + i), bounds);
            count += __builtin_popcount(bits(picked));
            add_to(mass, where(picked, load(pool.weights + i)));
        }
        settle(mass);
    }
    return {count, total(mass)};
}

// A logit below which a little less than `share` of the row's mass lies, as far as can be told from the highest id of
// every span, which hold most of a steep row's mass, and a sample of the others. The pool's memory takes both.
static float guess_low(Sampler& s, double share) {
    const Lanes others = set1(kSampledSpans * kSpan / 16);  // that one of the sample stands for
    Pool& sample = s.pool;
    int n = 0;
    for (int i = 0; i < s.spans; i += 16, n += 16) {
        const Lanes x = load(s.peaks + i);
        store(sample.x + n, x);
        store(sample.weights + n, weight(s, x));
    }
    for (int span = 0; span < s.spans; span += kSampledSpans, n += 16) {
        const Lanes x = load(s.x + span * kSpan), below = set1(s.peaks[span]);
        store(sample.x + n, x);
        store(sample.weights + n, where(less(x, below), mul(weight(s, x), others)));
    }
    sample.size = n;
    const double mass = sum_of(sample.weights, n), rest = 0.75 * share * mass;
    float low = s.floor, high = s.peak;
    for (int step = 0; step < 9; step++) {
        const float middle = low * 0.5f + high * 0.5f;
        if (mass - head_reaching(sample, sample.x, middle).mass <= rest) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

// Gathers until the goal is reached in the pool; false if it is nowhere, and the pool then holds all that has a weight.
static bool gather_until(Sampler& s, const Goal& goal) {
    if (s.pool.size > 0 && reached(goal, s.head)) return true;
    for (int rank = 64; rank <= 512; rank *= 8) {
        const float low = span_rank(s, rank);
        if (low <= s.floor) break;
        if (low >= s.low) continue;
        gather<false>(s, low);
        if (reached(goal, s.head)) return true;
    }
    if (s.low > s.floor) gather<false>(s, s.floor);
    return reached(goal, s.head);
}

// ---- Places in the order

// The window becomes the ids of a pool, in order.
static void fill_window(Sampler& s, const Pool& pool, Head before) {
    for (int i = 0; i < pool.size; i++) {
        const int32_t id = (int32_t)pool.ids[i];
        s.window[i] = order_key(pool.x[i], id);
        s.weights[id] = pool.weights[i];
    }
    s.window_size = pool.size;
    s.before = before;
    sort_window(s);
}

// Looks for the goal in the window; false where it stands before or after it.
static bool find_in_window(const Sampler& s, const Goal& goal, Place& place) {
    Head head = s.before;
    if (head.count > 0 && reached(goal, head)) return false;
    for (int i = 0; i < s.window_size; i++) {
        const int32_t id = (int32_t)(uint32_t)s.window[i];
        head.count++;
        head.mass += (double)s.weights[id];
        if (reached(goal, head)) {
            place = {head, id};
            return true;
        }
    }
    return false;
}

// Which part of the way from the upper to the lower logit of a bracket to go next. A goal of mass is looked for where
// it would be if all parts held the same, moved a little so that it falls into the smaller part; every other time the
// bracket is halved, so that it shrinks however the mass is spread.
static inline float part_above(const Goal& goal, const Head& before, const Head& whole, int step) {
    if (step % 2 == 1 || goal.count < kNoCount) return 0.5f;
    const double part = (goal.mass - before.mass) / (whole.mass - before.mass);
    const float moved = (float)part * (part < 0.5 ? 1.25f : 0.9f);
    return moved > 0.01f ? moved : 0.01f;
}

// The first place of the order where the goal is reached. If it is nowhere, id is -1 and the head is the whole order
// as far as it has weights.
static Place find(Sampler& s, const Goal& goal) {
    Place place = {{0, 0}, -1};
    if (find_in_window(s, goal, place)) return place;
    if (!gather_until(s, goal)) return {s.head, -1};

    // Bracket: not reached above `high`, whose head is `before`; reached above `low`, whose head is `whole`. `pool`
    // holds the bracket and little else; above it stands `outside`.
    const Pool* pool = &s.pool;
    float low = s.low, high = kInfinity;
    Head outside = {0, 0}, before = outside, whole = s.head;
    for (int step = 0; step < 24 && whole.count - before.count > kSmallWindow; step++) {
        const float top = high < kInfinity ? high : s.peak, part = part_above(goal, before, whole, step);
        const float middle = low * part + top * (1 - part);
        if (!(middle > low && middle < top)) break;
        Head head = head_reaching(*pool, pool->x, middle);
        head = {outside.count + head.count, outside.mass + head.mass};
        if (reached(goal, head)) {
            low = middle;
            whole = head;
        } else {
            high = middle;
            before = head;
        }
        if (whole.count - before.count <= pool->size / 4) {
            narrow(*pool, low, high, s.part);
            pool = &s.part;
            outside = before;
        }
    }
    narrow(*pool, low, high, s.part);
    fill_window(s, s.part, before);
    find_in_window(s, goal, place);
    return place;
}

// ---- Steps of the row

// Fills the maxima of the spans and the highest logit; false if a logit is not finite.
static bool scan_raw(Sampler& s) {
    Lanes bad = set1(0), more_bad = bad;
    const Lanes zero = set1(0);
    const int whole = s.vocab / kSpan;
    for (int span = 0; span < whole; span++) {
        const float* p = s.x + span * kSpan;
        const Lanes a = load(p), b = load(p + 16), c = load(p + 32), d = load(p + 48);
        // a finite number times 0 is 0, anything else NaN
        bad = fma(a, zero, fma(b, zero, bad));
        more_bad = fma(c, zero, fma(d, zero, more_bad));
        s.peaks[span] = max_tree(max(max(a, b), max(c, d)));
    }
    float tail = -kInfinity, tail_bad = 0;
    for (int i = whole * kSpan; i < s.vocab; i++) {
        tail = s.x[i] > tail ? s.x[i] : tail;
        tail_bad += s.x[i] * 0.0f;
    }
    if (whole < s.spans) s.peaks[whole] = tail;
    for (int i = s.spans; i % 16 != 0; i++) s.peaks[i] = -kInfinity;
    float lanes[16];
    store(lanes, add(bad, more_bad));
    for (int i = 0; i < 16; i++) tail_bad += lanes[i];
    return tail_bad == 0;
}

static void find_peak(Sampler& s) {
    Lanes peak = set1(-kInfinity);
    for (int i = 0; i < s.spans; i += 16) peak = max(peak, load(s.peaks + i));
    s.peak = max_tree(peak);
}

// The lowest id that has the highest logit.
static int32_t best_id(const Sampler& s) {
    int span = 0;
    while (s.peaks[span] != s.peak) span++;
    int32_t id = span * kSpan;
    while (s.x[id] != s.peak) id++;
    return id;
}

static inline float below_infinity(float x) {
    return x < kLargest ? x : kLargest;
}

static void edit_logits(Sampler& s, const SampleRow& row, float* raw_seen, float* raw_bias) {
    for (int i = 0; i < row.num_seen; i++) {
        float* p = s.x + row.seen_ids[i];
        float x = raw_seen[i] = *p;
        x = x > 0 ? x / row.repetition : x * row.repetition;
        if (row.seen_counts[i] > 0) {
            x = x - row.frequency * (float)row.seen_counts[i];
            x = x - row.presence;
        }
        *p = below_infinity(x);
    }
    for (int i = 0; i < row.num_bias; i++) {
        float* p = s.x + row.bias_ids[i];
        raw_bias[i] = *p;
        *p = below_infinity(*p + row.bias_values[i]);
    }
    memset(s.edited, 0, (size_t)s.spans);
    for (int i = 0; i < row.num_seen; i++) s.edited[row.seen_ids[i] / kSpan] = 1;
    for (int i = 0; i < row.num_bias; i++) s.edited[row.bias_ids[i] / kSpan] = 1;
    for (int span = 0; span < s.spans; span++) {
        if (!s.edited[span]) continue;
        const float* p = s.x + span * kSpan;
        s.peaks[span] = max_tree(max(max(load(p), load(p + 16)), max(load(p + 32), load(p + 48))));
    }
    find_peak(s);
}

static float raw_logit(const Sampler& s, const SampleRow& row, const float* raw_seen, const float* raw_bias, int id) {
    for (int i = 0; i < row.num_seen; i++)
        if (row.seen_ids[i] == id) return raw_seen[i];
    for (int i = 0; i < row.num_bias; i++)
        if (row.bias_ids[i] == id) return raw_bias[i];
    return s.x[id];
}

static int32_t draw(Sampler& s, const SampleRow& row) {
    const double u = uniform(row.seed, row.choice, row.position);
    Head kept = {s.vocab, 0};
    bool weighed = false;
    if (row.min_p > 0) {
        const float least = row.min_p < 1 ? row.min_p : 1;
        float low = s.floor;
        if (least > 0x1p-30f) {
            // exp(z) of a weight >= least is at least half of it; z is off by little
            const double z = (double)log1(least) - 0.75, bound = (double)s.peak + z * (double)row.temperature;
            low = bound > (double)s.floor ? (float)bound : s.floor;
        }
        if (low < s.low) gather<false>(s, low);
        kept = head_reaching(s.pool, s.pool.weights, least);
        weighed = true;
    }
    if (row.top_k > 0 && row.top_k < kept.count) {
        kept = find(s, {row.top_k, (double)kInfinity, false}).head;
        weighed = true;
    }
    if (!weighed) kept.mass = gather<true>(s, guess_low(s, 1 - (row.top_p < 1 ? (double)row.top_p : u)));
    if (row.top_p < 1) kept = find(s, {kNoCount, (double)row.top_p * kept.mass, false}).head;
    return find(s, {kNoCount, u * kept.mass, true}).id;
}

static void sample_row(float* logits, int vocab, const SampleRow& row, SampleOut& out, void* scratch) {
    Sampler s;
    s.x = logits;
    s.vocab = vocab;
    const size_t n = (size_t)padded_vocab(vocab);
    s.spans = (int)(n / kSpan);
    s.window = (uint64_t*)scratch;
    s.spare = s.window + n;
    s.weights = (float*)(s.spare + n);
    float* raw_seen = s.weights + n;
    float* raw_bias = raw_seen + n;
    s.pool.x = raw_bias + n;
    s.pool.weights = s.pool.x + n + 16;
    s.pool.ids = s.pool.weights + n + 16;
    s.part.x = s.pool.ids + n + 16;
    s.part.weights = s.part.x + n + 16;
    s.part.ids = s.part.weights + n + 16;
    s.peaks = s.part.ids + n + 16;
    s.edited = (uint8_t*)(s.peaks + (s.spans + 15) / 16 * 16);

    out.id = -1;
    out.logprob = 0;
    out.hash = row.want_hash ? hash_row(logits, vocab) : 0;
    for (int i = 0; i < row.num_logprobs; i++) {
        out.top_ids[i] = -1;
        out.top_logprobs[i] = 0;
    }
    if (!scan_raw(s)) return;
    find_peak(s);

    const float raw_peak = s.peak;
    float log_mass = 0;
    bool weighed = false;  // at temperature 1, and not edited since
    if (row.num_logprobs >= 0) {
        set_temperature(s, 1);
        log_mass = log1((float)gather<true>(s, row.num_logprobs > 0 ? span_rank(s, row.num_logprobs) : s.peak));
        weighed = true;
        if (row.num_logprobs > 0) {
            fill_window(s, s.pool, {0, 0});
            for (int i = 0; i < row.num_logprobs && i < s.window_size; i++) {
                const int32_t id = (int32_t)(uint32_t)s.window[i];
                out.top_ids[i] = id;
                out.top_logprobs[i] = (s.x[id] - raw_peak) - log_mass;
            }
        }
    }

    const int32_t raw_best = row.num_bias > 0 ? best_id(s) : 0;
    if (row.num_seen > 0 || row.num_bias > 0) {
        edit_logits(s, row, raw_seen, raw_bias);
        weighed = false;
    }
    if (s.peak < -kLargest) {
        out.id = raw_best;
    } else if (row.temperature < kGreedyBelow) {
        out.id = best_id(s);
    } else {
        if (!weighed || row.temperature != 1) set_temperature(s, row.temperature);
        out.id = draw(s, row);
    }
    if (row.num_logprobs >= 0) {
        out.logprob = (raw_logit(s, row, raw_seen, raw_bias, out.id) - raw_peak) - log_mass;
    }
}
