/* Reductions in the order of the ranks. */
#include "native.h"

#define BLOCK_BYTES 4096 /* what is reduced at once of more than two parts, where totals do not stay in registers */
#define VECTOR_BYTES 32

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx2", "default")))
#if __GNUC__ >= 11 /* older ones cannot ask a processor for F16C */
#define HAS_F16C 1
#include <immintrin.h>
#endif
#else
#define FOR_EACH_PROCESSOR
#endif

#define EACH(STATEMENT)                                                                                              \
    _Pragma("GCC ivdep") for (Py_ssize_t i = 0; i < length; i++) { STATEMENT; }

#define DEFINE_COMBINE(NAME, TYPE, OF)                                                                               \
    FOR_EACH_PROCESSOR static void NAME(char *const *parts, Py_ssize_t num_parts, Py_ssize_t count,                  \
                                        Py_ssize_t divide_by, char *out, char *second)                               \
    {                                                                                                                \
        enum { BLOCK = BLOCK_BYTES / sizeof(TYPE) };                                                                 \
        const Py_ssize_t step = num_parts == 2 ? count : BLOCK;                                                      \
        const TYPE divisor = (TYPE)divide_by;                                                                        \
        TYPE totals[BLOCK];                                                                                          \
        for (Py_ssize_t begin = 0; begin < count; begin += step) {                                                   \
            const Py_ssize_t length = least(step, count - begin);                                                    \
            const TYPE *total = (const TYPE *)parts[0] + begin, *last = (const TYPE *)parts[num_parts - 1] + begin;  \
            TYPE *to = (TYPE *)out + begin, *also = second ? (TYPE *)second + begin : to;                            \
            for (Py_ssize_t at = 1; at + 1 < num_parts; at++) {                                                      \
                const TYPE *part = (const TYPE *)parts[at] + begin;                                                  \
                EACH(totals[i] = OF(total[i], part[i]))                                                              \
                total = totals;                                                                                      \
            }                                                                                                        \
            if (divide_by != 1)                                                                                      \
                EACH(to[i] = also[i] = OF(total[i], last[i]) / divisor)                                              \
            else if (second)                                                                                         \
                EACH(to[i] = also[i] = OF(total[i], last[i]))                                                        \
            else                                                                                                     \
                EACH(to[i] = OF(total[i], last[i]))                                                                  \
        }                                                                                                            \
    }

/* Reads all parts side by side, in their order, and keeps the totals of four vectors in registers: no total is stored and
 * read again, and ranks that add at one time do not all read the first part first, which one core serves. */
#define DEFINE_COMBINE_IN_REGISTERS(NAME, TYPE, OPERATOR)                                                            \
    FOR_EACH_PROCESSOR static void NAME(char *const *parts, Py_ssize_t num_parts, Py_ssize_t count,                  \
                                        Py_ssize_t divide_by, char *out, char *second)                               \
    {                                                                                                                \
        typedef TYPE Vector __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(TYPE)), may_alias));            \
        enum { STEP = 4 * VECTOR_BYTES / sizeof(TYPE) };                                                             \
        const TYPE divisor = (TYPE)divide_by;                                                                        \
        Py_ssize_t at = 0;                                                                                           \
        for (; at + STEP <= count; at += STEP) {                                                                     \
            const Vector *part = (const Vector *)((const TYPE *)parts[0] + at);                                      \
            Vector first = part[0], next = part[1], third = part[2], last = part[3];                                 \
            for (Py_ssize_t other = 1; other < num_parts; other++) {                                                 \
                part = (const Vector *)((const TYPE *)parts[other] + at);                                            \
                first = first OPERATOR part[0], next = next OPERATOR part[1];                                        \
                third = third OPERATOR part[2], last = last OPERATOR part[3];                                        \
            }                                                                                                        \
            if (divide_by != 1) first /= divisor, next /= divisor, third /= divisor, last /= divisor;                \
            Vector *to = (Vector *)((TYPE *)out + at), *also = second ? (Vector *)((TYPE *)second + at) : to;        \
            to[0] = first, to[1] = next, to[2] = third, to[3] = last;                                                \
            if (second) also[0] = first, also[1] = next, also[2] = third, also[3] = last;                            \
        }                                                                                                            \
        for (; at < count; at++) {                                                                                   \
            TYPE total = ((const TYPE *)parts[0])[at];                                                               \
            for (Py_ssize_t other = 1; other < num_parts; other++)                                                   \
                total = (TYPE)(total OPERATOR ((const TYPE *)parts[other])[at]);                                     \
            if (divide_by != 1) total = (TYPE)(total / divisor);                                                     \
            ((TYPE *)out)[at] = total;                                                                               \
            if (second) ((TYPE *)second)[at] = total;                                                                \
        }                                                                                                            \
    }

/* NaN, which differs from itself, if either is; of 0.0 and -0.0 the other. */
#define OF_MIN(ONE, OTHER) ((ONE < OTHER) | (ONE != ONE) ? ONE : OTHER)
#define OF_MAX(ONE, OTHER) ((ONE > OTHER) | (ONE != ONE) ? ONE : OTHER)

/* Whole numbers are added and multiplied as unsigned ones: signed ones wrap around, too, with the same bits. They are never
 * divided, as means of whole numbers are floats. */
DEFINE_COMBINE_IN_REGISTERS(add_float32, npy_float32, +)
DEFINE_COMBINE_IN_REGISTERS(add_float64, npy_float64, +)
DEFINE_COMBINE_IN_REGISTERS(add_8, npy_uint8, +)
DEFINE_COMBINE_IN_REGISTERS(add_16, npy_uint16, +)
DEFINE_COMBINE_IN_REGISTERS(add_32, npy_uint32, +)
DEFINE_COMBINE_IN_REGISTERS(add_64, npy_uint64, +)
DEFINE_COMBINE_IN_REGISTERS(multiply_float32, npy_float32, *)
DEFINE_COMBINE_IN_REGISTERS(multiply_float64, npy_float64, *)
DEFINE_COMBINE_IN_REGISTERS(multiply_32, npy_uint32, *)
DEFINE_COMBINE_IN_REGISTERS(multiply_64, npy_uint64, *)
DEFINE_COMBINE(least_float32, npy_float32, OF_MIN)
DEFINE_COMBINE(least_float64, npy_float64, OF_MIN)
DEFINE_COMBINE(least_32, npy_int32, OF_MIN)
DEFINE_COMBINE(least_64, npy_int64, OF_MIN)
DEFINE_COMBINE(most_float32, npy_float32, OF_MAX)
DEFINE_COMBINE(most_float64, npy_float64, OF_MAX)
DEFINE_COMBINE(most_32, npy_int32, OF_MAX)
DEFINE_COMBINE(most_64, npy_int64, OF_MAX)

typedef union {
    npy_uint32 bits;
    float number;
} Float32;

/* bfloat16 is the upper half of float32. */
static inline float widened_bfloat16(npy_uint16 number)
{
    const Float32 wide = {.bits = (npy_uint32)number << 16};
    return wide.number;
}

/* Rounds to the nearest, to even if there are two. As ml_dtypes does, it leaves of a NaN the sign alone. */
static inline npy_uint16 narrowed_bfloat16(float number)
{
    const Float32 wide = {.number = number};
    const npy_uint32 rounded = (wide.bits + 0x7FFF + (wide.bits >> 16 & 1)) >> 16;
    const npy_uint32 nan = (wide.bits >> 16 & 0x8000) | 0x7FC0;
    return (npy_uint16)((wide.bits & 0x7FFFFFFF) > 0x7F800000 ? nan : rounded);
}

#define BIASES ((127 - 15) << 23) /* between the exponents of float32 and float16, in float32's place */
#define LEAST_NORMAL (113 << 23)  /* 2^-14, of float16 */

/* By bits, as compilers vectorise no branch around arithmetic that may trap. */
static inline npy_uint32 either(int is_first, npy_uint32 first, npy_uint32 second)
{
    const npy_uint32 mask = -(npy_uint32)is_first;
    return (first & mask) | (second & ~mask);
}

static inline float widened_float16(npy_uint16 number)
{
    const npy_uint32 sign = (npy_uint32)(number & 0x8000) << 16, size = (npy_uint32)(number & 0x7FFF) << 13;
    const Float32 least = {.bits = LEAST_NORMAL}, one_more = {.bits = size + LEAST_NORMAL};
    const Float32 subnormal = {.number = one_more.number - least.number};
    const npy_uint32 is_infinite = size >= 0x1F << 23; /* or no number */
    const npy_uint32 normal = size + BIASES + is_infinite * BIASES;
    const Float32 wide = {.bits = sign | either(size < 1 << 23, subnormal.bits, normal)};
    return wide.number;
}

/* Rounds to the nearest, to even if there are two. */
static inline npy_uint16 narrowed_float16(float number)
{
    const Float32 wide = {.number = number};
    const npy_uint32 sign = wide.bits >> 16 & 0x8000, size = wide.bits & 0x7FFFFFFF;
    const npy_uint32 normal = (size - BIASES + 0xFFF + (size >> 13 & 1)) >> 13;
    /* The last bit of a half is worth that of a float16, so the processor rounds the sum to a subnormal. */
    const Float32 half = {.number = 0.5f}, absolute = {.bits = size}, sum = {.number = absolute.number + half.number};
    const npy_uint32 finite = either(size < LEAST_NORMAL, sum.bits - half.bits, normal);
    const npy_uint32 others = size > 0x7F800000 ? 0x7E00 : 0x7C00; /* NaN, or infinity, which 65520 is rounded to */
    return (npy_uint16)(sign | either(size >= 0x477FF000, others, finite));
}

/* Adds and divides in float32, and rounds once. */
#define DEFINE_ADD_HALF(NAME, WIDENED, NARROWED)                                                                     \
    FOR_EACH_PROCESSOR static void NAME(char *const *parts, Py_ssize_t num_parts, Py_ssize_t count,                  \
                                        Py_ssize_t divide_by, char *out, char *second)                               \
    {                                                                                                                \
        enum { BLOCK = BLOCK_BYTES / sizeof(float) };                                                                \
        const float divisor = (float)divide_by;                                                                      \
        float sums[BLOCK];                                                                                           \
        for (Py_ssize_t begin = 0; begin < count; begin += BLOCK) {                                                  \
            const Py_ssize_t length = least(BLOCK, count - begin);                                                   \
            const npy_uint16 *first = (const npy_uint16 *)parts[0] + begin;                                          \
            npy_uint16 *to = (npy_uint16 *)out + begin, *also = second ? (npy_uint16 *)second + begin : to;          \
            EACH(sums[i] = WIDENED(first[i]))                                                                        \
            for (Py_ssize_t at = 1; at < num_parts; at++) {                                                          \
                const npy_uint16 *part = (const npy_uint16 *)parts[at] + begin;                                      \
                EACH(sums[i] += WIDENED(part[i]))                                                                    \
            }                                                                                                        \
            if (divide_by != 1) EACH(sums[i] /= divisor)                                                             \
            EACH(to[i] = also[i] = NARROWED(sums[i]))                                                                \
        }                                                                                                            \
    }

DEFINE_ADD_HALF(add_bfloat16, widened_bfloat16, narrowed_bfloat16)
DEFINE_ADD_HALF(add_float16, widened_float16, narrowed_float16)

#ifdef HAS_F16C
/* The same where the processor converts float16: eight numbers at once, and the rest as above. */
__attribute__((target("avx2,f16c"))) static void add_float16_f16c(char *const *parts, Py_ssize_t num_parts, Py_ssize_t count,
                                                                  Py_ssize_t divide_by, char *out, char *second)
{
    const __m256 divisor = _mm256_set1_ps((float)divide_by);
    char *rest[MOST_PARTS];
    Py_ssize_t begin = 0;
    for (; begin + 8 <= count; begin += 8) {
        const Py_ssize_t at = begin * (Py_ssize_t)sizeof(npy_uint16);
        __m256 sum = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(parts[0] + at)));
        for (Py_ssize_t part = 1; part < num_parts; part++)
            sum = _mm256_add_ps(sum, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(parts[part] + at))));
        if (divide_by != 1) sum = _mm256_div_ps(sum, divisor);
        const __m128i rounded = _mm256_cvtps_ph(sum, _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128((__m128i *)(out + at), rounded);
        if (second) _mm_storeu_si128((__m128i *)(second + at), rounded);
    }
    const Py_ssize_t at = begin * (Py_ssize_t)sizeof(npy_uint16);
    for (Py_ssize_t part = 0; part < num_parts; part++) rest[part] = parts[part] + at;
    if (begin < count) add_float16(rest, num_parts, count - begin, divide_by, out + at, second ? second + at : NULL);
}

static Combine add_of_float16(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") ? add_float16_f16c : add_float16;
}
#else
static Combine add_of_float16(void)
{
    return add_float16;
}
#endif

static int is_bfloat16(PyArray_Descr *dtype)
{
    return PyTypeNum_ISUSERDEF(dtype->type_num) && strcmp(dtype->typeobj->tp_name, "ml_dtypes.bfloat16") == 0;
}

int divides(PyArray_Descr *dtype)
{
    return dtype->kind == 'f' || is_bfloat16(dtype);
}

enum { FLOAT32, FLOAT64, BITS_8, BITS_16, BITS_32, BITS_64, NUM_FORMS };

static const Combine COMBINES[NUM_OPS][NUM_FORMS] = {
    [SUM] = {add_float32, add_float64, add_8, add_16, add_32, add_64},
    [PROD] = {multiply_float32, multiply_float64, NULL, NULL, multiply_32, multiply_64},
    [MIN] = {least_float32, least_float64, NULL, NULL, least_32, least_64},
    [MAX] = {most_float32, most_float64, NULL, NULL, most_32, most_64},
};

Combine combine_of(Op op, PyArray_Descr *dtype)
{
    const Py_ssize_t bits = 8 * PyDataType_ELSIZE(dtype);
    if (!PyArray_ISNBO(dtype->byteorder)) return NULL;
    if (is_bfloat16(dtype)) return op == SUM ? add_bfloat16 : NULL;
    if (dtype->type_num == NPY_HALF) return op == SUM ? add_of_float16() : NULL;
    if (dtype->type_num == NPY_FLOAT) return COMBINES[op][FLOAT32];
    if (dtype->type_num == NPY_DOUBLE) return COMBINES[op][FLOAT64];
    if (dtype->kind == 'u' && (op == MIN || op == MAX)) return NULL;
    if (dtype->kind != 'i' && dtype->kind != 'u') return NULL;
    return bits == 8 ? COMBINES[op][BITS_8] : bits == 16 ? COMBINES[op][BITS_16] : COMBINES[op][bits == 32 ? BITS_32 : BITS_64];
}

Combine combine_for(Op op, PyArray_Descr *dtype, Py_ssize_t divide_by, Py_ssize_t num_parts)
{
    const Combine combine = combine_of(op, dtype);
    if (combine && (divide_by == 1 || divides(dtype)) && num_parts <= MOST_PARTS) return combine;
    PyErr_SetString(PyExc_ValueError, "these numbers are reduced by NumPy");
    return NULL;
}

int set_op(PyObject *name, void *op)
{
    static const char *const NAMES[NUM_OPS] = {[SUM] = "sum", [PROD] = "prod", [MIN] = "min", [MAX] = "max"};
    for (Op at = 0; at < NUM_OPS; at++)
        if (PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(name, NAMES[at]) == 0) {
            *(Op *)op = at;
            return 1;
        }
    PyErr_Format(PyExc_ValueError, "an operation is sum, prod, min or max, not %R", name);
    return 0;
}

int is_plain(PyObject *item, PyArray_Descr *dtype)
{
    if (!PyArray_Check(item) || !PyArray_IS_C_CONTIGUOUS((PyArrayObject *)item)) return 0;
    PyArray_Descr *its = PyArray_DESCR((PyArrayObject *)item);
    const int is_alike = its->kind == dtype->kind && PyDataType_ELSIZE(its) == PyDataType_ELSIZE(dtype);
    return PyArray_ISALIGNED((PyArrayObject *)item) && (its == dtype || (is_alike && combine_of(SUM, its)));
}

/* Returns where an array's numbers lie, if it is plain, of this length, and overlaps the result nowhere or everywhere. */
static char *part_of(PyObject *item, PyArrayObject *out)
{
    if (!is_plain(item, PyArray_DESCR(out)) || PyArray_SIZE((PyArrayObject *)item) != PyArray_SIZE(out)) return NULL;
    char *part = PyArray_BYTES((PyArrayObject *)item), *begin = PyArray_BYTES(out);
    const int is_apart = part >= begin + PyArray_NBYTES(out) || begin >= part + PyArray_NBYTES(out);
    return is_apart || part == begin ? part : NULL;
}

PyDoc_STRVAR(combine_doc,
             "combine(op, parts, out, divide_by, second)\n--\n\n"
             "Reduce arrays in order, divide the totals, and write them to `out`, and to `second` if it is an array.\n\n"
             "Returns whether that was done: NumPy reduces what has another dtype or another layout.");

static PyObject *combine(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t num_given)
{
    Op op;
    if (num_given != 5 || !PyList_Check(given[1]) || !PyArray_Check(given[2])) {
        PyErr_SetString(PyExc_TypeError,
                        "combine: needed are an operation, a list of arrays, an array, a divisor, an array or None");
        return NULL;
    }
    if (!set_op(given[0], &op)) return NULL;
    PyArrayObject *out = (PyArrayObject *)given[2];
    PyArray_Descr *dtype = PyArray_DESCR(out);
    const Py_ssize_t num_parts = PyList_GET_SIZE(given[1]), divide_by = PyLong_AsSsize_t(given[3]);
    if (divide_by == -1 && PyErr_Occurred()) return NULL;
    const Combine combine = combine_of(op, dtype);
    char *parts[MOST_PARTS], *second = NULL;
    if (!combine || num_parts < 2 || num_parts > MOST_PARTS || (divide_by != 1 && !divides(dtype)) ||
        !is_plain(given[2], dtype) || !PyArray_ISWRITEABLE(out))
        Py_RETURN_FALSE;
    for (Py_ssize_t at = 0; at < num_parts; at++)
        if (!(parts[at] = part_of(PyList_GET_ITEM(given[1], at), out))) Py_RETURN_FALSE;
    if (given[4] != Py_None) {
        if (!(second = part_of(given[4], out)) || !PyArray_ISWRITEABLE((PyArrayObject *)given[4])) Py_RETURN_FALSE;
        for (Py_ssize_t at = 0; at < num_parts; at++) {
            const Py_ssize_t nbytes = PyArray_NBYTES(out);
            if (parts[at] != second && parts[at] < second + nbytes && second < parts[at] + nbytes) Py_RETURN_FALSE;
        }
    }
    if (PyArray_NBYTES(out) < FREES_GIL_BYTES)
        combine(parts, num_parts, PyArray_SIZE(out), divide_by, PyArray_BYTES(out), second);
    else {
        Py_BEGIN_ALLOW_THREADS
        combine(parts, num_parts, PyArray_SIZE(out), divide_by, PyArray_BYTES(out), second);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_TRUE;
}

PyDoc_STRVAR(combines_doc, "combines(op, dtype)\n--\n\nWhether numbers of a dtype are reduced here.");

static PyObject *combines(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t num_given)
{
    Op op;
    if (num_given != 2 || !PyArray_DescrCheck(given[1])) {
        PyErr_SetString(PyExc_TypeError, "combines: needed are an operation and a dtype");
        return NULL;
    }
    if (!set_op(given[0], &op)) return NULL;
    return PyBool_FromLong(combine_of(op, (PyArray_Descr *)given[1]) != NULL);
}

PyMethodDef combining_functions[] = {
    {"combine", (PyCFunction)(void (*)(void))combine, METH_FASTCALL, combine_doc},
    {"combines", (PyCFunction)(void (*)(void))combines, METH_FASTCALL, combines_doc},
    {NULL},
};
