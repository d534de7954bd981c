/* Writes to memory that other ranks have read, in the way that takes least.
 *
 * Where the ranks' cores share a cache, sums are best stored where they belong, one by one. Where they share none, a core
 * has to take every line back from the cores that have read the line: stores wait for that one after the other, copies of
 * a block take half of that time, and copies past the caches take a third or less. Which cores a rank has, and what they
 * share, may change at any time on a machine that is shared. So each rank tries the ways now and then.
 */
#include "native.h"
#include <time.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#define LEAST_TIMED_BYTES (16 << 10)  /* less is over before it can be timed */
#define TIMED_CALLS 2                 /* of each way: the faster one counts */
#define UNTIMED_CALLS 8               /* at first, while the system gives new pages */
#define LEAST_INTERVAL 128            /* calls from one trial to the next, if calls have become slower */
#define MOST_INTERVAL 768             /* if not */
#define SLOWER 2
#define WORTH 0.8                     /* a later way leaves more to the ranks that read: it has to save a fifth */

static long long nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

void trial_init(Trial *trial)
{
    *trial = (Trial){.best = STORES, .calls = MOST_INTERVAL - UNTIMED_CALLS};
}

Measured trial_begin(const Trial *trial, Way first, int forced, Py_ssize_t nbytes)
{
    Measured measured = {.way = trial->best, .nbytes = nbytes};
    if (forced >= 0)
        measured.way = (Way)forced;
    else if (nbytes >= LEAST_TIMED_BYTES) {
        const int way = (int)first + trial->calls / TIMED_CALLS;
        if (way < NUM_WAYS) measured.way = (Way)way;
        measured.begun = nanoseconds();
    }
    if (measured.way < first) measured.way = first;
    return measured;
}

void trial_end(Trial *trial, Way first, Measured measured)
{
    if (!measured.begun) return;
    const double cost = (double)(nanoseconds() - measured.begun) / (double)measured.nbytes;
    const int trial_calls = (NUM_WAYS - (int)first) * TIMED_CALLS;
    if (trial->calls < trial_calls) {
        double *least_cost = &trial->costs[measured.way];
        if (trial->calls % TIMED_CALLS == 0 || cost < *least_cost) *least_cost = cost;
    }
    if (++trial->calls == trial_calls) {
        trial->best = first;
        for (Way way = first + 1; way < NUM_WAYS; way++)
            if (trial->costs[way] < WORTH * trial->costs[trial->best]) trial->best = way;
    }
    if (trial->calls >= (cost > SLOWER * trial->costs[trial->best] ? LEAST_INTERVAL : MOST_INTERVAL)) trial->calls = 0;
}

void stream(char *to, const char *from, Py_ssize_t nbytes)
{
#if defined(__x86_64__)
    const Py_ssize_t head = least(-(npy_uintp)to & 15, nbytes);
    memcpy(to, from, head);
    Py_ssize_t at = head;
    for (; at + 64 <= nbytes; at += 64)
        for (int line = 0; line < 64; line += 16)
            _mm_stream_si128((__m128i *)(to + at + line), _mm_loadu_si128((const __m128i *)(from + at + line)));
    _mm_sfence();
    memcpy(to + at, from + at, nbytes - at);
#else
    memcpy(to, from, nbytes);
#endif
}
