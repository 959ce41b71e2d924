// exp and log as polynomials, so that every ISA gives the same bits. No fma: potok.sampling.math states both in numpy.
// Included inside the namespace of an ISA, after lanes.h.

constexpr float kRound = 0x1.8p23f;  // adding and subtracting it rounds to a whole number
constexpr float kLog2E = 0x1.715476p+0f;

// e^x / 2^n for the whole number n next to x / ln 2: of x = n ln 2 + r with |r| <= ln 2 / 2, 1 + r + r^2 P(r).
static inline Lanes exp_fraction(Lanes x, Lanes n) {
    // ln 2 in two parts; n times the first is exact
    const Lanes r = sub(sub(x, mul(n, set1(0x1.63p-1f))), mul(n, set1(-0x1.bd0106p-13f)));
    Lanes p = set1(0x1.6a524ep-10f);
    p = add(mul(p, r), set1(0x1.12396ep-7f));
    p = add(mul(p, r), set1(0x1.5558aap-5f));
    p = add(mul(p, r), set1(0x1.555492p-3f));
    p = add(mul(p, r), set1(0x1.fffffcp-2f));
    return add(add(mul(p, mul(r, r)), r), set1(1.0f));
}

// e^x for x in [-87.3, 88]; below it a finite x gives some number.
static inline Lanes exp_in_range(Lanes x) {
    const Lanes round = set1(kRound);
    // max gives -126 where x is NaN or far below the range, so that 2^n is always a number
    const Lanes n = max(sub(add(mul(x, set1(kLog2E)), round), round), set1(-126.0f));
    return mul(exp_fraction(x, n), exp2_whole(n));
}

// e^x for x <= 88. 0 below -87.3 (a result is never subnormal), 1 at 0, NaN stays NaN. Relative error below 1e-7.
// It never falls as x rises (checked for every float of [-88, 0]), so what is sorted by x is sorted by exp(x).
static inline Lanes exp(Lanes x) {
    return select(less(x, set1(-87.3f)), set1(0), exp_in_range(x));
}

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
