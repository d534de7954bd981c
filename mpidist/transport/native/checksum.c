/* The long part of a CRC-32: folds a message of many bytes to one of 16 with the same remainder. */
#include "native.h"

#ifdef __x86_64__
#include <immintrin.h>

#define BLOCK_BYTES 64
#define CHUNK_BYTES (64 << 10) /* of whole blocks; stays in a core's cache */
#define CARRYLESS __attribute__((target("pclmul,sse2")))

/* Powers of x modulo the CRC's polynomial, bits reversed: what multiplies the halves of 16 bytes to move them ahead. */
#define MOVE_BLOCK _mm_set_epi64x(0x1c6e41596, 0x154442bd4) /* by 64 bytes */
#define MOVE_PART _mm_set_epi64x(0x0ccaa009e, 0x1751997d0)  /* by 16 bytes */

CARRYLESS static __m128i moved_onto(__m128i sum, __m128i next, __m128i move)
{
    const __m128i low = _mm_clmulepi64_si128(sum, move, 0x00), high = _mm_clmulepi64_si128(sum, move, 0x11);
    return _mm_xor_si128(next, _mm_xor_si128(low, high));
}

CARRYLESS static void fold_onto(__m128i *sums, const char *from, Py_ssize_t num_bytes)
{
    const __m128i *next = (const __m128i *)from, *end = (const __m128i *)(from + num_bytes), move = MOVE_BLOCK;
    while (next < end)
        for (int at = 0; at < 4; at++) sums[at] = moved_onto(sums[at], _mm_loadu_si128(next++), move);
}

/* Folds the whole blocks of a message; what [begin, end) holds is copied as long as the core's cache has it. The copy is
 * written past the caches, as it is not read soon. */
CARRYLESS static void fold(const char *from, Py_ssize_t num_bytes, char *to, Py_ssize_t begin, Py_ssize_t end, char *folded)
{
    __m128i sums[4];
    Stream stream = {0};
    for (int at = 0; at < 4; at++) sums[at] = _mm_loadu_si128((const __m128i *)from + at);
    sums[0] = _mm_xor_si128(sums[0], _mm_cvtsi32_si128(-1)); /* the CRC begins with ones */
    for (Py_ssize_t at = 0; at < num_bytes; at += CHUNK_BYTES) {
        const Py_ssize_t chunk_end = num_bytes - at > CHUNK_BYTES ? at + CHUNK_BYTES : num_bytes;
        const Py_ssize_t first = at ? at : BLOCK_BYTES, low = at > begin ? at : begin, high = chunk_end < end ? chunk_end : end;
        fold_onto(sums, from + first, (chunk_end - first) / BLOCK_BYTES * BLOCK_BYTES);
        if (low < high) stream_write(&stream, to + low - begin, from + low, high - low);
    }
    stream_flush(&stream);
    end_streams();
    for (int at = 1; at < 4; at++) sums[at] = moved_onto(sums[at - 1], sums[at], MOVE_PART);
    _mm_storeu_si128((__m128i *)folded, sums[3]);
}
#endif

PyDoc_STRVAR(fold_crc32_doc,
             "fold_crc32(message, copy, begin)\n--\n\n"
             "Return 16 bytes; their CRC-32 without the initial ones is that of all whole blocks of 64 bytes of a message. "
             "Also copy the bytes from `begin` on to `copy`, as many as it has. "
             "Return nothing, and copy nothing, for a short message, and on processors that take no less time so.");

static PyObject *fold_crc32(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    Py_buffer given, copy;
    Py_ssize_t begin, num_bytes = 0;
    char folded[16];
    if (!PyArg_ParseTuple(arguments, "y*w*n", &given, &copy, &begin)) return NULL;
    if (begin < 0 || copy.len > given.len || begin > given.len - copy.len) {
        PyErr_SetString(PyExc_ValueError, "the message ends before the copy");
        num_bytes = -1;
    }
#ifdef __x86_64__
    if (num_bytes == 0 && given.len >= BLOCK_BYTES && __builtin_cpu_supports("pclmul")) {
        Py_BEGIN_ALLOW_THREADS
        fold(given.buf, given.len, copy.buf, begin, begin + copy.len, folded);
        Py_END_ALLOW_THREADS
        num_bytes = sizeof folded;
    }
#endif
    PyBuffer_Release(&given);
    PyBuffer_Release(&copy);
    return num_bytes < 0 ? NULL : PyBytes_FromStringAndSize(folded, num_bytes);
}

PyMethodDef checksum_functions[] = {
    {"fold_crc32", fold_crc32, METH_VARARGS, fold_crc32_doc},
    {NULL},
};
