// The functions of C's mathematical library that the code below may call: a device library brings them only with ROCm, whose header
// is then included before anything else.  Errors are below three units in the last place of float64 (of pow: eight); float32 rounds that.
#ifndef __CLANG_HIP_RUNTIME_WRAPPER_H__
DEV double fabs(double x) { return __builtin_fabs(x); }
DEV double floor(double x) { return __builtin_floor(x); }
DEV double ceil(double x) { return __builtin_ceil(x); }
DEV double rint(double x) { return __builtin_rint(x); }
DEV double trunc(double x) { return __builtin_trunc(x); }
DEV double sqrt(double x) { return __builtin_sqrt(x); }
DEV double copysign(double x, double y) { return __builtin_copysign(x, y); }
DEV double fma(double x, double y, double z) { return __builtin_fma(x, y, z); }

namespace math {
constexpr double INFINITE = __builtin_inf(), NOT_A_NUMBER = __builtin_nan("");
constexpr double LN2 = 0.6931471805599453, LN2_REST = 2.3190468138462996e-17, LOG2E = 1.4426950408889634;
constexpr double HALF_PI = 1.5707963267948966, HALF_PI_REST = 6.123233995736766e-17, HALF_PI_LAST = -1.4973849048591698e-33;

DEV u64 bits(double x) { return __builtin_bit_cast(u64, x); }
DEV double power_of_two(int n) { return __builtin_bit_cast(double, (u64)(n + 1023) << 52); }           // -1022 … 1023
// x · 2ⁿ, for -2000 < n < 2000.
DEV double scale(double x, int n) {
    const int a = n / 2, b = (n - a) / 2;
    return x * power_of_two(n - a - b) * power_of_two(b) * power_of_two(a);
}
// x = m · 2ⁿ with m in [1, 2), for finite x > 0.
DEV int split(double x, double& m) {
    const int small = x < 2.2250738585072014e-308 ? 54 : 0;
    const u64 u = bits(small ? x * power_of_two(54) : x);
    m = __builtin_bit_cast(double, (u & 0xfffffffffffffull) | 0x3ff0000000000000ull);
    return (int)(u >> 52) - 1023 - small;
}
// c₀ + c₁·x + …
template <int N> DEV double polynomial(const double (&c)[N], double x) {
    double y = c[N - 1];
#pragma unroll
    for (int i = N - 2; i >= 0; --i) y = fma(y, x, c[i]);
    return y;
}

// exp(r) - 1 for |r| ≤ ln(2)/2
DEV double expm1_near(double r) {
    constexpr double c[] = {0.5, 1.0 / 6, 1.0 / 24, 1.0 / 120, 1.0 / 720, 1.0 / 5040, 1.0 / 40320, 1.0 / 362880, 1.0 / 3628800,
                            1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800.0};
    return fma(r * r, polynomial(c, r), r);
}
DEV double exp_of(double x, double rest) {                     // exp(x + rest), rest much the smaller
    if (!(x < 709.8)) return x != x ? x : INFINITE;
    if (x < -745.2) return 0;
    const double k = rint(x * LOG2E);
    return scale(1 + expm1_near(fma(-k, LN2_REST, fma(-k, LN2, x) + rest)), (int)k);
}

// log(m) for m in [1/√2, √2]: 2·artanh((m - 1) / (m + 1)), as a sum of two
DEV double log_near(double m, double& rest) {
    constexpr double c[] = {2.0 / 3, 2.0 / 5, 2.0 / 7, 2.0 / 9, 2.0 / 11, 2.0 / 13, 2.0 / 15, 2.0 / 17, 2.0 / 19, 2.0 / 21, 2.0 / 23};
    const double f = m - 1, g = m + 1, s = f / g, error = (fma(-s, g, f) - s * (m - (g - 1))) / g, z = s * s;
    rest = fma(s * z, polynomial(c, z), 2 * error);
    return 2 * s;
}
DEV double log_of(double x, double& rest) {                    // for finite x > 0
    double m;
    int n = split(x, m);
    if (m > 1.4142135623730951) { m *= 0.5; ++n; }
    double low;
    const double high = log_near(m, low), whole = n * LN2, sum = whole + high;     // n = 0, or |whole| > |high|
    const double left = (n ? high - (sum - whole) + fma(n, LN2, -whole) : 0) + fma(n, LN2_REST, low), y = sum + left;
    rest = left - (y - sum);
    return y;
}

// x = n·π/2 + the result, |result| ≤ π/4; n modulo 4
DEV double quarter_turns(double x, int& n) {
    // 2/π in binary, after 64 zeros
    constexpr u64 TWO_OVER_PI[] = {
        0x0000000000000000, 0xa2f9836e4e441529, 0xfc2757d1f534ddc0, 0xdb6295993c439041, 0xfe5163abdebbc561, 0xb7246e3a424dd2e0, 0x06492eea09d1921c,
        0xfe1deb1cb129a73e, 0xe88235f52ebb4484, 0xe99c7026b45f7e41, 0x3991d639835339f4, 0x9c845f8bbdf9283b, 0x1ff897ffde05980f, 0xef2f118b5a0a6d1f,
        0x6d367ecf27cb09b7, 0x4f463f669e5fea2d, 0x7527bac7ebe5f17b, 0x3d0739f78a5292ea, 0x6bfb5fb11f8d5d08, 0x56033046fc7b6bab, 0xf0cfbc209af4361d};
    const double size = fabs(x);
    if (size < 1e6) {
        const double k = rint(x * 0.6366197723675814);
        n = (int)k & 3;
        return fma(-k, HALF_PI_LAST, fma(-k, HALF_PI_REST, fma(-k, HALF_PI, x)));
    }
    if (!(size < INFINITE)) { n = 0; return NOT_A_NUMBER; }
    // x = m · 2^e: the product of m with 192 bits of 2/π, of which those that give multiples of four turns are left out
    const u64 u = bits(size), m = (u & 0xfffffffffffffull) | 0x10000000000000ull;
    const int from = (int)(u >> 52) - 1075 - 2 + 64, word = from / 64, shift = from % 64;
    u64 w[3];
    for (int i = 0; i < 3; ++i) w[i] = shift ? TWO_OVER_PI[word + i] << shift | TWO_OVER_PI[word + i + 1] >> (64 - shift) : TWO_OVER_PI[word + i];
    typedef unsigned __int128 u128;
    const u128 low = (u128)m * w[2], middle = (u128)m * w[1] + (u64)(low >> 64);
    const u64 high = m * w[0] + (u64)(middle >> 64);
    const u64 top = high << 2 | (u64)middle >> 62, next = (u64)middle << 2 | (u64)low >> 62;            // the fraction of a quarter turn
    const i64 near = (i64)top;                                 // that of the nearest quarter turn
    const int turns = (int)(high >> 62) + (near < 0);
    const double rest = fma((double)near, power_of_two(-64), (double)next * power_of_two(-64) * power_of_two(-64));
    n = (x < 0 ? -turns : turns) & 3;
    const double r = x < 0 ? -rest : rest;
    return fma(r, HALF_PI_REST, r * HALF_PI);
}
DEV double sin_near(double r) {
    constexpr double c[] = {-1.0 / 6, 1.0 / 120, -1.0 / 5040, 1.0 / 362880, -1.0 / 39916800, 1.0 / 6227020800.0, -1.0 / 1307674368000.0, 1.0 / 355687428096000.0};
    return fma(r * r * r, polynomial(c, r * r), r);
}
DEV double cos_near(double r) {
    constexpr double c[] = {1.0 / 24, -1.0 / 720, 1.0 / 40320, -1.0 / 3628800, 1.0 / 479001600, -1.0 / 87178291200.0, 1.0 / 20922789888000.0, -1.0 / 6402373705728000.0};
    const double z = r * r, whole = 1 - 0.5 * z;
    return whole + (1 - whole - 0.5 * z + z * z * polynomial(c, z));
}
// arctan(y / x) for x ≥ 0, y ≥ 0, not both 0 or infinite
DEV double atan_quotient(double y, double x) {
    constexpr double c[] = {-0.3333333333333333, 0.19999999999999993, -0.1428571428571149, 0.11111111110751482, -0.0909090906681608, 0.07692306729194896, -0.06666641869131183,
                            0.058819230561140225, -0.05258020272656758, 0.04719259188242093, -0.04103887546862687, 0.030622995553735516, -0.013905374533113234};
    double t = y / x, base = 0, rest = 0;
    if (t > 2.414213562373095) {
        t = -(x / y), base = HALF_PI, rest = HALF_PI_REST;
    } else if (t > 0.41421356237309503) {
        t = (t - 1) / (t + 1), base = HALF_PI / 2, rest = HALF_PI_REST / 2;
    }
    return base + (t + fma(t * t * t, polynomial(c, t * t), rest));
}
}  // namespace math

DEV double exp(double x) { return math::exp_of(x, 0); }
DEV double exp2(double x) {
    if (!(x < 1024)) return x != x ? x : math::INFINITE;
    if (x < -1080) return 0;
    const double k = rint(x);
    return math::scale(1 + math::expm1_near((x - k) * math::LN2), (int)k);
}
DEV double expm1(double x) {
    if (!(x < 709.8)) return x != x ? x : math::INFINITE;
    if (x < -40) return -1;
    const double k = rint(x * math::LOG2E), p = math::expm1_near(fma(-k, math::LN2_REST, fma(-k, math::LN2, x)));
    if (k == 0) return p;
    if (k > 1000) return math::scale(1 + p, (int)k);
    const double two = math::power_of_two((int)k);
    return fma(two, p, two - 1);
}
DEV double log(double x) {
    if (!(x > 0 && x < math::INFINITE)) return x == 0 ? -math::INFINITE : x > 0 ? x : math::NOT_A_NUMBER;
    double rest;
    const double y = math::log_of(x, rest);
    return y + rest;
}
DEV double log2(double x) {
    if (!(x > 0 && x < math::INFINITE)) return log(x);
    double m, rest;
    int n = math::split(x, m);
    if (m > 1.4142135623730951) { m *= 0.5; ++n; }
    const double y = math::log_near(m, rest);
    return n + (y + rest) * math::LOG2E;
}
DEV double log10(double x) {
    if (!(x > 0 && x < math::INFINITE)) return log(x);
    double rest;
    const double y = math::log_of(x, rest), c = 0.4342944819032518, high = y * c;
    return high + (fma(y, c, -high) + fma(y, 1.098319650216765e-17, rest * c));
}
DEV double log1p(double x) {
    const double u = 1 + x;
    if (u == 1 || !(u > 0 && u < math::INFINITE)) return u == 1 ? x : log(u);
    return log(u) + (u - 1 > x ? x - (u - 1) : x - (u - 1)) / u;
}
DEV double sinh(double x) {
    const double a = fabs(x);
    if (a > 40) return copysign(0.5 * math::exp_of(0.5 * a, 0), x) * math::exp_of(0.5 * a, 0);
    const double e = expm1(a);
    return copysign(0.5 * (e + e / (e + 1)), x);
}
DEV double cosh(double x) {
    const double h = exp(0.5 * fabs(x));
    if (fabs(x) > 40) return 0.5 * h * h;
    const double e = exp(fabs(x));
    return 0.5 * (e + 1 / e);
}
DEV double tanh(double x) {
    const double a = fabs(x);
    if (!(a < 20)) return x != x ? x : copysign(1, x);
    const double e = expm1(2 * a);
    return copysign(e / (e + 2), x);
}
DEV double asinh(double x) {
    const double a = fabs(x), z = a * a;
    return copysign(a > 1e150 ? log(a) + math::LN2 : log1p(a + z / (1 + sqrt(1 + z))), x);
}
DEV double acosh(double x) {
    const double t = x - 1;
    return x > 1e150 ? log(x) + math::LN2 : log1p(t + sqrt(t * (t + 2)));
}
DEV double atanh(double x) { return copysign(0.5, x) * log1p(2 * fabs(x) / (1 - fabs(x))); }
DEV double sin(double x) {
    int n;
    const double r = math::quarter_turns(x, n), y = n & 1 ? math::cos_near(r) : math::sin_near(r);
    return n & 2 ? -y : y;
}
DEV double cos(double x) {
    int n;
    const double r = math::quarter_turns(x, n), y = n & 1 ? math::sin_near(r) : math::cos_near(r);
    return (n + 1) & 2 ? -y : y;
}
DEV double tan(double x) {
    int n;
    const double r = math::quarter_turns(x, n), s = math::sin_near(r), c = math::cos_near(r);
    return n & 1 ? -c / s : s / c;
}
DEV double atan2(double y, double x) {
    if (x != x || y != y) return x + y;
    double a = fabs(x), b = fabs(y);
    if (a == math::INFINITE && b == math::INFINITE) a = b = 1;
    const double angle = a == 0 && b == 0 ? 0 : math::atan_quotient(b, a);
    return copysign(math::bits(x) >> 63 ? 2 * math::HALF_PI - (angle - 2 * math::HALF_PI_REST) : angle, y);
}
DEV double atan(double x) { return x != x ? x : copysign(math::atan_quotient(fabs(x), 1), x); }
DEV double asin(double x) { return atan2(x, sqrt((1 - x) * (1 + x))); }
DEV double acos(double x) { return 2 * atan2(sqrt(0.5 * (1 - x)), sqrt(0.5 * (1 + x))); }
DEV double hypot(double x, double y) {
    const double a = fabs(x), b = fabs(y), big = a > b ? a : b, small = a > b ? b : a;
    if (a == math::INFINITE || b == math::INFINITE) return math::INFINITE;
    if (!(big > 0)) return a + b;
    double m;
    const int n = math::split(big, m);
    const double u = math::scale(big, -n), v = math::scale(small, -n);
    return math::scale(sqrt(fma(u, u, v * v)), n);
}
// W. J. Cody, Math. Comp. 23 (1969): erf = x·A(x²)/B(x²) up to 0.46875, erfc = exp(-x²)·C(x)/D(x) beyond
DEV double erf(double x) {
    constexpr double A[] = {3.20937758913846947e3, 3.77485237685302021e2, 1.13864154151050156e2, 3.16112374387056560e0, 1.85777706184603153e-1};
    constexpr double B[] = {2.84423683343917062e3, 1.28261652607737228e3, 2.44024637934444173e2, 2.36012909523441209e1, 1};
    constexpr double C[] = {1.23033935479799725e3, 2.05107837782607147e3, 1.71204761263407058e3, 8.81952221241769090e2, 2.98635138197400131e2,
                            6.61191906371416295e1, 8.88314979438837594e0, 5.64188496988670089e-1, 2.15311535474403846e-8};
    constexpr double D[] = {1.23033935480374942e3, 3.43936767414372164e3, 4.36261909014324716e3, 3.29079923573345963e3, 1.62138957456669019e3,
                            5.37181101862009858e2, 1.17693950891312499e2, 1.57449261107098347e1, 1};
    const double a = fabs(x), z = a * a;
    if (!(a > 0.46875)) return x * (math::polynomial(A, z) / math::polynomial(B, z));
    return copysign(a > 6 ? 1 : 1 - exp(-z) * (math::polynomial(C, a) / math::polynomial(D, a)), x);
}
DEV double pow(double x, double y) {
    if (y == 0 || x == 1) return 1;
    if (x != x || y != y) return x + y;
    const double a = fabs(x);
    const bool whole = rint(y) == y, odd = whole && fabs(y) < 9007199254740992.0 && 2 * rint(0.5 * y) != y;
    if (x < 0 && !whole && a < math::INFINITE) return math::NOT_A_NUMBER;
    double size;
    if (fabs(y) == math::INFINITE) {
        if (a == 1) return 1;
        size = (a > 1) == (y > 0) ? math::INFINITE : 0;
    } else if (a == 0 || a == math::INFINITE) {
        size = (a == 0) == (y > 0) ? 0 : math::INFINITE;
    } else {
        double rest;
        const double l = math::log_of(a, rest), high = y * l;
        size = math::exp_of(high, fabs(high) < 800 ? fma(y, l, -high) + y * rest : 0);
    }
    return odd && math::bits(x) >> 63 ? -size : size;
}
DEV double fmod(double x, double y) {
    double a = fabs(x), m;
    const double b = fabs(y);
    if (!(a < math::INFINITE) || !(b > 0)) return math::NOT_A_NUMBER;
    while (a >= b) {                                           // at most 2⁵⁰ times b at a time, so that the rest is exact
        const int n = math::split(a, m) - math::split(b, m);
        const double step = n > 50 ? math::scale(b, n - 50) : b;
        a = fma(-trunc(a / step), step, a);
        if (a < 0) a += step;
    }
    return copysign(a, x);
}

DEV float fabsf(float x) { return __builtin_fabsf(x); }
DEV float floorf(float x) { return __builtin_floorf(x); }
DEV float ceilf(float x) { return __builtin_ceilf(x); }
DEV float rintf(float x) { return __builtin_rintf(x); }
DEV float truncf(float x) { return __builtin_truncf(x); }
DEV float sqrtf(float x) { return __builtin_sqrtf(x); }
DEV float copysignf(float x, float y) { return __builtin_copysignf(x, y); }
// The compiler expands these.
DEV float expf(float x) { return __builtin_expf(x); }
DEV float exp2f(float x) { return __builtin_exp2f(x); }
DEV float logf(float x) { return __builtin_logf(x); }
DEV float log2f(float x) { return __builtin_log2f(x); }
DEV float log10f(float x) { return __builtin_log10f(x); }
DEV float expm1f(float x) { return (float)expm1((double)x); }
DEV float log1pf(float x) { return (float)log1p((double)x); }
DEV float sinhf(float x) { return (float)sinh((double)x); }
DEV float coshf(float x) { return (float)cosh((double)x); }
DEV float tanhf(float x) { return (float)tanh((double)x); }
DEV float asinhf(float x) { return (float)asinh((double)x); }
DEV float acoshf(float x) { return (float)acosh((double)x); }
DEV float atanhf(float x) { return (float)atanh((double)x); }
DEV float sinf(float x) { return (float)sin((double)x); }
DEV float cosf(float x) { return (float)cos((double)x); }
DEV float tanf(float x) { return (float)tan((double)x); }
DEV float asinf(float x) { return (float)asin((double)x); }
DEV float acosf(float x) { return (float)acos((double)x); }
DEV float atanf(float x) { return (float)atan((double)x); }
DEV float atan2f(float y, float x) { return (float)atan2((double)y, (double)x); }
DEV float hypotf(float x, float y) { return (float)hypot((double)x, (double)y); }
DEV float erff(float x) { return (float)erf((double)x); }
DEV float powf(float x, float y) { return (float)pow((double)x, (double)y); }
DEV float fmodf(float x, float y) { return (float)fmod((double)x, (double)y); }
#endif
