// Where a linear task begins and ends: its rows of activations, and bias, residual and output of a tile.

template <class T>
static inline IntRows<T> from_row(const IntRows<T>& a, int row, int k) {
    const size_t group = (size_t)row * (k / kGroup);
    return {a.q + (size_t)row * k, a.d + group, a.s + group, a.sum + group, a.s16 ? a.s16 + 2 * group : 0};
}

// What the minimums of a form are multiplied by: of a row, scales_per_group(F) for each group.
template <Packed F, class T>
static inline const float* sums_of(const IntRows<T>& a) {
    return has_minimum(F) && scales_per_group(F) == 2 ? a.s16 : a.s;
}

// Not inlined: GCC would unroll it into every tile, three times the code and the time to compile.
static __attribute__((noinline)) void store_tile(const LinearTask& t, const float* acc, int row, int rows, int panel) {
    const int column = panel * kPanel;
    const int n = t.weight->n - column < kPanel ? t.weight->n - column : kPanel;
    const int across = (panel - t.panel0) * kPanel;
    for (int r = 0; r < rows; r++) {
        const size_t down = row + r - t.row0;
        float* out = t.out + down * t.ld_out + across;
        const float* a = acc + r * kPanel;
        const float* residual = t.residual ? t.residual + down * t.ld_residual + across : 0;
        if (n == kPanel) {
            Lanes v = load(a);
            if (t.bias) v = add(v, load(t.bias + column));
            if (residual) v = add(v, load(residual));
            store(out, v);
        } else {
            for (int c = 0; c < n; c++) {
                float v = a[c];
                if (t.bias) v = v + t.bias[column + c];
                if (residual) v = v + residual[c];
                out[c] = v;
            }
        }
    }
}

// Asks for the lines that `rows` results of a panel will go to, a line for each row: another thread has had them last.
// Whole steps on two cores took 2 to 4 % less.
static inline void prefetch_out(const LinearTask& t, int row, int rows, int panel) {
    const size_t down = row - t.row0, across = (panel - t.panel0) * kPanel;
    for (int r = 0; r < rows; r++) {
        __builtin_prefetch(t.out + (down + r) * t.ld_out + across, 1);
        if (t.residual) __builtin_prefetch(t.residual + (down + r) * t.ld_residual + across);
    }
}

// Rows or tiles of like size, as few as can be, none above `most`: how many of `left` come next.
static inline int even_part(int left, int most) {
    const int parts = (left + most - 1) / most;
    return (left + parts - 1) / parts;
}
