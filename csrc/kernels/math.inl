// exp and log as polynomials, so that every ISA gives the same bits. No fma that rounds otherwise than
// without: potok.sampling.math states both in numpy.
// Included inside the namespace of an ISA, after lanes.h.

constexpr float kRound = 0x1.8p23f;  // adding and subtracting it rounds to a whole number
constexpr float kLog2E = 0x1.715476p+0f;

// Of several vectors step by step: one after another, each step would wait for the one before.
#define POTOK_EACH _Pragma("GCC unroll 16") for (int i = 0; i < N; i++)

// e^x / 2^n for the whole number n next to x / ln 2: of x = n ln 2 + r with |r| <= ln 2 / 2, 1 + r + r^2 P(r).
template <int N>
static inline __attribute__((always_inline)) void exp_fractions(const Lanes (&x)[N], const Lanes (&n)[N],
                                                                Lanes (&p)[N]) {
    Lanes r[N];
    // ln 2 in two parts; n times the first is exact, so that this fma rounds what a difference would
    POTOK_EACH r[i] = sub(fma(n[i], set1(-0x1.63p-1f), x[i]), mul(n[i], set1(-0x1.bd0106p-13f)));
    POTOK_EACH p[i] = mul(set1(0x1.6a524ep-10f), r[i]);
    POTOK_EACH p[i] = mul(add(p[i], set1(0x1.12396ep-7f)), r[i]);
    POTOK_EACH p[i] = mul(add(p[i], set1(0x1.5558aap-5f)), r[i]);
    POTOK_EACH p[i] = mul(add(p[i], set1(0x1.555492p-3f)), r[i]);
    POTOK_EACH p[i] = mul(add(p[i], set1(0x1.fffffcp-2f)), mul(r[i], r[i]));
    POTOK_EACH p[i] = add(add(p[i], r[i]), set1(1.0f));
}

// e^x for x <= 88. 0 below -87.3 (a result is never subnormal), 1 at 0, NaN stays NaN. Relative error below 1e-7.
// It never falls as x rises (checked for every float of [-88, 0]), so what is sorted by x is sorted by exp(x).
template <int N>
static inline __attribute__((always_inline)) void exps(Lanes (&x)[N]) {
    Lanes n[N], p[N];
    POTOK_EACH n[i] = sub(add(mul(x[i], set1(kLog2E)), set1(kRound)), set1(kRound));
    exp_fractions<N>(x, n, p);
    POTOK_EACH x[i] = scale_exp2(not_less(x[i], set1(-87.3f)), p[i], n[i]);
}
static inline Lanes exp(Lanes x) {
    Lanes all[1] = {x};
    exps(all);
    return all[0];
}
#undef POTOK_EACH

// ln x for a normal x > 0. Relative error below 2e-7.
//
// x = 2^e (1 + f) with sqrt(1/2) <= 1 + f < sqrt 2;  ln x = e ln 2 + f - f^2 / 2 + f^3 Q(f).
static inline float log1(float x) {
    const uint32_t root = 0x3f3504f3;  // sqrt(1/2)
    uint32_t u;
    memcpy(&u, &x, 4);
    const int32_t whole = (int32_t)(u - root) >> 23;
    u -= (uint32_t)whole << 23;
    float f;
    memcpy(&f, &u, 4);
    f = f - 1.0f;
    const float e = (float)whole;
    const float square = f * f;
    float q = -0x1.38c97ep-4f;
    q = q * f + 0x1.055ebp-3f;
    q = q * f + -0x1.0d8246p-3f;
    q = q * f + 0x1.22d93p-3f;
    q = q * f + -0x1.54728ap-3f;
    q = q * f + 0x1.99a01cp-3f;
    q = q * f + -0x1.000226p-2f;
    q = q * f + 0x1.555554p-2f;
    q = q * f * square;
    q = q + e * -0x1.bd0106p-13f;
    q = q - square * 0.5f;
    return (f + q) + e * 0x1.63p-1f;
}
