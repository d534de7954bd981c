// Moves and sums of device memory, one launch for any number of arrays. Compiled by NVRTC at the first use, without any
// header; the tests compile the same text for the host, PTX included. compiled.py adds the line that makes a kernel of it, for one
// kernel at a time, as NVRTC takes long; kernels.py launches them, copy_table.py makes their tables.
//
// The numbers are those of NumPy, bit by bit. Needs --fmad=false: a product and a sum that are rounded once would be
// others. float32 is added in PTX, because CuPy compiles with -ftz=true, and then C++ makes subnormal numbers zeros.

typedef unsigned char u1;
typedef unsigned short u2;
typedef int i4;
typedef unsigned int u4;
typedef long long i8;
typedef unsigned long long u8;
typedef float f4;
typedef double f8;

struct c8 { f4 re, im; };                // complex64
struct c16 { f8 re, im; };               // complex128
struct b16 { u8 low, high; };            // whatever has 16 bytes

#define INLINE static __device__ __forceinline__

constexpr u4 WARP = 32;

INLINE u4 bits_of(f4 x) { return (u4)__float_as_int(x); }

INLINE bool is_nan(f4 x) { return (bits_of(x) & 0x7fffffffu) > 0x7f800000u; }
INLINE bool is_nan(f8 x) { return x != x; }

INLINE bool is_finite(f4 x) { return (bits_of(x) & 0x7f800000u) != 0x7f800000u; }

// ---- Half precision, as NumPy and ml_dtypes round it: to nearest, ties to even. No number stays no number.

struct f2 {  // float16
    u2 bits;
    f2() = default;
    __device__ explicit f2(f4 x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
    __device__ explicit operator f4() const {
        f4 x;
        asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
        return x;
    }
};

struct bf {  // bfloat16
    u2 bits;
    bf() = default;
    __device__ explicit bf(f4 x) {
        const u4 its = bits_of(x);
        bits = (u2)(is_nan(x) ? (its >> 16) | 0x0040u : (its + 0x7fffu + ((its >> 16) & 1u)) >> 16);
    }
    __device__ explicit operator f4() const { return __int_as_float((int)((u4)bits << 16)); }
};

// ---- Arithmetic that keeps subnormal numbers.

#define IN_PTX(NAME, INSTRUCTION) \
    INLINE f4 NAME(f4 a, f4 b) { \
        f4 c; \
        asm(INSTRUCTION " %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b)); \
        return c; \
    }
IN_PTX(plus, "add.rn.f32")
IN_PTX(minus, "sub.rn.f32")
IN_PTX(times, "mul.rn.f32")
IN_PTX(over, "div.rn.f32")

INLINE bool is_less(f4 a, f4 b) {
    u4 is;
    asm("{.reg .pred p; setp.lt.f32 p, %1, %2; selp.u32 %0, 1, 0, p;}" : "=r"(is) : "f"(a), "f"(b));
    return is;
}

INLINE f8 plus(f8 a, f8 b) { return a + b; }
INLINE f8 minus(f8 a, f8 b) { return a - b; }
INLINE f8 times(f8 a, f8 b) { return a * b; }
INLINE f8 over(f8 a, f8 b) { return a / b; }
INLINE bool is_less(f8 a, f8 b) { return a < b; }

// Whether a finite number has become an infinite float16.
template <class From, class To> INLINE u4 overflows(From, To) { return 0; }
INLINE u4 overflows(f4 x, f2 y) { return is_finite(x) && (y.bits & 0x7fffu) == 0x7c00u; }

// x / n as NumPy divides: complex numbers by Smith's way.
INLINE f4 quotient(f4 x, i8 n) { return over(x, (f4)n); }
INLINE f8 quotient(f8 x, i8 n) { return over(x, (f8)n); }
template <class Complex, class Real> INLINE Complex by_smith(Complex x, Real n) {
    const Real zero = (Real)0, scale = over((Real)1, n);
    Complex result;
    result.re = times(plus(x.re, times(x.im, zero)), scale);
    result.im = times(minus(x.im, times(x.re, zero)), scale);
    return result;
}
INLINE c8 quotient(c8 x, i8 n) { return by_smith(x, (f4)n); }
INLINE c16 quotient(c16 x, i8 n) { return by_smith(x, (f8)n); }

// ---- Up to 16 bytes at once.

template <class T, int N> struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Several { T at[N]; };

template <class Its> INLINE bool is_aligned(const void* at) { return ((u8)at & (alignof(Its) - 1)) == 0; }

// Read what no kernel reads again: 16 bytes at once take no place in the caches from what is needed longer.
template <class Its> INLINE Its read_once(const Its* from) {
    if constexpr (sizeof(Its) == sizeof(uint4)) {
        const uint4 bits = __ldcs((const uint4*)from);
        return *(const Its*)&bits;
    } else {
        return *from;
    }
}

// ---- Copying: a warp takes a row, which is up to 8 KiB of one array.

constexpr u4 ROW_BYTES = 8192;

struct Array {
    u8 source, target;  // addresses
    u4 first_row;       // rows of the arrays before it
    u2 last;            // elements of its last row; the other rows are full
    u2 pad;             // elements after it that become 0
};

template <int NUM> struct Table { Array arrays[NUM]; };

struct Launch {         // what else copy_table.py tells a kernel
    u4 num_arrays, num_rows;
    i8 divisor;
    u4* overflows_seen;  // null: nothing counts
};

template <class From, class To, bool DIVIDES> struct Copy {
    static constexpr int WIDER = sizeof(From) > sizeof(To) ? sizeof(From) : sizeof(To);
    static constexpr int N = WIDER < 16 ? 16 / WIDER : 1;
    static constexpr u4 ROW = ROW_BYTES / WIDER;  // elements

    INLINE To one(From x, i8 divisor, u4& overflow) {
        if constexpr (DIVIDES) {
            return quotient(x, divisor);
        } else {
            const To y = (To)x;
            overflow += overflows(x, y);
            return y;
        }
    }

    template <int M> INLINE void step(const Several<From, M>& read, Several<To, M>* to, i8 divisor, u4& overflow) {
        Several<To, M> written;
        #pragma unroll
        for (int at = 0; at < M; at++) written.at[at] = one(read.at[at], divisor, overflow);
        *to = written;
    }

    // M at a time; DEPTH reads are under way before the first is written, as the memory takes long to answer.
    template <int M, int DEPTH> INLINE void all(
        const From* from, To* to, u4 count, u4 lane, i8 divisor, u4& overflow
    ) {
        typedef Several<From, M> Read;
        const Read* reads = (const Read*)from;
        Several<To, M>* writes = (Several<To, M>*)to;
        u4 at = lane;
        #pragma unroll 1
        for (; at + (DEPTH - 1) * WARP < count / M; at += DEPTH * WARP) {
            Read held[DEPTH];
            #pragma unroll
            for (int its = 0; its < DEPTH; its++) held[its] = reads[at + its * WARP];
            #pragma unroll
            for (int its = 0; its < DEPTH; its++) step<M>(held[its], writes + at + its * WARP, divisor, overflow);
        }
        #pragma unroll 1
        for (; at < count / M; at += WARP) {
            const Read held = reads[at];
            step<M>(held, writes + at, divisor, overflow);
        }
    }

    INLINE void row(const Array& array, u4 row, bool is_last, u4 lane, i8 divisor, u4& overflow) {
        const From* from = (const From*)array.source + (u8)row * ROW;
        To* to = (To*)array.target + (u8)row * ROW;
        const u4 count = is_last ? array.last : ROW;
        if (is_last && lane < array.pad) to[count + lane] = To();
        const u4 head = (u4)((0 - (u8)to) / sizeof(To)) & (N - 1);  // until `to` is aligned
        if (head >= count || !is_aligned<Several<From, N>>(from + head) || !is_aligned<Several<To, N>>(to + head)) {
            all<1, 4>(from, to, count, lane, divisor, overflow);
            return;
        }
        const u4 tail = head + (count - head) / N * N;
        if (lane < head) to[lane] = one(from[lane], divisor, overflow);
        all<N, 4>(from + head, to + head, tail - head, lane, divisor, overflow);
        if (lane < count - tail) to[tail + lane] = one(from[tail + lane], divisor, overflow);
    }
};

// The table is a parameter: it needs no memory of its own, and lies in the constant cache, where a warp looks its array up.
template <class From, class To, bool DIVIDES, int NUM> INLINE void copy(const Table<NUM>& table, const Launch& launch) {
    const u8 thread = (u8)blockIdx.x * blockDim.x + threadIdx.x;
    if (thread / WARP >= launch.num_rows) return;
    const u4 row = (u4)(thread / WARP), lane = (u4)(thread % WARP);
    const bool is_row_each = launch.num_arrays == launch.num_rows;  // as of many small arrays: nothing is looked up
    u4 at = is_row_each ? row : 0;
    u4 end = is_row_each ? row + 1 : launch.num_arrays;  // the last array that begins at or before the row is in [at, end)
    while (end - at > 1) {
        const u4 middle = (at + end) / 2;
        if (table.arrays[middle].first_row <= row) at = middle; else end = middle;
    }
    const Array array = table.arrays[at];
    const bool is_last =
        is_row_each || row + 1 == (end < launch.num_arrays ? table.arrays[end].first_row : launch.num_rows);
    u4 overflow = 0;
    Copy<From, To, DIVIDES>::row(array, row - array.first_row, is_last, lane, launch.divisor, overflow);
    if (overflow && launch.overflows_seen) atomicAdd(launch.overflows_seen, overflow);
}

#define COPIER(NAME, NUM, FROM, TO, DIVIDES) \
    extern "C" __global__ void NAME(const Table<NUM> table, const Launch launch) { \
        copy<FROM, TO, DIVIDES>(table, launch); \
    }

// ---- Joining: several pieces, in order, into one.

enum Op { SUM, PROD, MIN, MAX };

template <class T> struct Of { typedef T Total; };
template <> struct Of<f2> { typedef f4 Total; };
template <> struct Of<bf> { typedef f4 Total; };

template <Op OP, class T> INLINE T joined(T a, T b) {  // the first that is no number wins
    if constexpr (OP == SUM) return plus(a, b);
    else if constexpr (OP == PROD) return times(a, b);
    else return is_nan(a) || (OP == MIN ? is_less(a, b) : is_less(b, a)) ? a : b;
}

template <class T> INLINE T divided(T x, i8 n) { return n == 1 ? x : quotient(x, n); }

struct Parts { u8 addresses[480]; };

// N elements of DEPTH parts: all are under way before one is joined, as the memory takes long to answer.
template <Op OP, int N, int DEPTH, class T> INLINE void join(
    const u8* addresses, u8 at, bool is_first, typename Of<T>::Total (&totals)[N]
) {
    typedef typename Of<T>::Total Total;
    Several<T, N> held[DEPTH];
    #pragma unroll
    for (int part = 0; part < DEPTH; part++) held[part] = read_once((const Several<T, N>*)((const T*)addresses[part] + at));
    #pragma unroll
    for (int part = 0; part < DEPTH; part++) {
        #pragma unroll
        for (int its = 0; its < N; its++) {
            const Total next = (Total)held[part].at[its];
            totals[its] = part == 0 && is_first ? next : joined<OP>(totals[its], next);
        }
    }
}

// Elements `begin` to `end`, N at a time. `out` may be one of the parts: what goes into a result is read before it is
// written, by the same thread.
template <Op OP, int N, class T> INLINE void combine(
    const Parts& parts, i8 number, u8 begin, u8 end, T* out, i8 divisor, bool is_out_aligned, u4& overflow
) {
    typedef typename Of<T>::Total Total;
    typedef Several<T, N> Together;
    const u8 thread = (u8)blockIdx.x * blockDim.x + threadIdx.x, num_threads = (u8)gridDim.x * blockDim.x;
    for (u8 at = begin + thread * N; at + N <= end; at += num_threads * N) {
        Total totals[N] = {};
        i8 first = 0;
        #pragma unroll 1
        for (; first + 4 <= number; first += 4) join<OP, N, 4, T>(parts.addresses + first, at, first == 0, totals);
        if (number - first >= 2) {
            join<OP, N, 2, T>(parts.addresses + first, at, first == 0, totals);
            first += 2;
        }
        if (number - first >= 1) join<OP, N, 1, T>(parts.addresses + first, at, first == 0, totals);
        Together written;
        #pragma unroll
        for (int its = 0; its < N; its++) {
            const Total total = divided(totals[its], divisor);
            written.at[its] = (T)total;
            overflow += overflows(total, written.at[its]);
        }
        if (is_out_aligned) {
            *(Together*)(out + at) = written;
        } else {
            #pragma unroll
            for (int its = 0; its < N; its++) out[at + its] = written.at[its];
        }
    }
}

#define COMBINER(NAME, T, OP) \
    extern "C" __global__ void NAME( \
        const Parts parts, i8 number, i8 count, T* out, i8 divisor, i8 are_parts_aligned, u4* overflows_seen \
    ) { \
        constexpr int N = 16 / sizeof(T); \
        const u8 whole = are_parts_aligned ? (u8)count / N * N : 0; \
        const bool is_out_aligned = is_aligned<Several<T, N>>(out); \
        u4 overflow = 0; \
        combine<OP, N>(parts, number, 0, whole, out, divisor, is_out_aligned, overflow); \
        combine<OP, 1>(parts, number, whole, (u8)count, out, divisor, true, overflow); \
        if (overflow && overflows_seen) atomicAdd(overflows_seen, overflow); \
    }
