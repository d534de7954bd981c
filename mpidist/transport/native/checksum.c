/* The long part of a CRC-32: folds a message of many bytes to one of 16 with the same remainder. */
#include "native.h"

#ifdef __x86_64__
#include <immintrin.h>

#define BLOCK_BYTES 64
#define CARRYLESS __attribute__((target("pclmul,sse2")))

/* Powers of x modulo the CRC's polynomial, bits reversed: what multiplies the halves of 16 bytes to move them ahead. */
#define MOVE_BLOCK _mm_set_epi64x(0x1c6e41596, 0x154442bd4) /* by 64 bytes */
#define MOVE_PART _mm_set_epi64x(0x0ccaa009e, 0x1751997d0)  /* by 16 bytes */

CARRYLESS static __m128i moved_onto(__m128i sum, __m128i next, __m128i move)
{
    const __m128i low = _mm_clmulepi64_si128(sum, move, 0x00), high = _mm_clmulepi64_si128(sum, move, 0x11);
    return _mm_xor_si128(next, _mm_xor_si128(low, high));
}

CARRYLESS static void fold(const char *from, Py_ssize_t num_blocks, char *folded)
{
    const __m128i *next = (const __m128i *)from, move = MOVE_BLOCK;
    __m128i sums[4];
    for (int at = 0; at < 4; at++) sums[at] = _mm_loadu_si128(next++);
    sums[0] = _mm_xor_si128(sums[0], _mm_cvtsi32_si128(-1)); /* the CRC begins with ones */
    while (--num_blocks > 0)
        for (int at = 0; at < 4; at++) sums[at] = moved_onto(sums[at], _mm_loadu_si128(next++), move);
    for (int at = 1; at < 4; at++) sums[at] = moved_onto(sums[at - 1], sums[at], MOVE_PART);
    _mm_storeu_si128((__m128i *)folded, sums[3]);
}
#endif

PyDoc_STRVAR(fold_crc32_doc,
             "fold_crc32(message)\n--\n\n"
             "Return 16 bytes; their CRC-32 without the initial ones is that of all whole blocks of 64 bytes of a message. "
             "Return nothing for a short message, and on processors that take no less time so.");

static PyObject *fold_crc32(PyObject *Py_UNUSED(module), PyObject *message)
{
    Py_buffer given;
    if (PyObject_GetBuffer(message, &given, PyBUF_SIMPLE) < 0) return NULL;
    Py_ssize_t num_bytes = 0;
    char folded[16];
#ifdef __x86_64__
    if (given.len >= BLOCK_BYTES && __builtin_cpu_supports("pclmul")) {
        Py_BEGIN_ALLOW_THREADS
        fold(given.buf, given.len / BLOCK_BYTES, folded);
        Py_END_ALLOW_THREADS
        num_bytes = sizeof folded;
    }
#endif
    PyBuffer_Release(&given);
    return PyBytes_FromStringAndSize(folded, num_bytes);
}

PyMethodDef checksum_functions[] = {
    {"fold_crc32", fold_crc32, METH_O, fold_crc32_doc},
    {NULL},
};
