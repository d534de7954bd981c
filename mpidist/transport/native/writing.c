/* Writes to memory that other ranks have read, in the way that takes less.
 *
 * Where the ranks' cores share a cache, numbers are best written there. Where they share none, a core has to take every line
 * back from the cores that have read the line, which takes up to seven times as long as to write past the caches. Which
 * cores a rank has, and what they share, may change at any time on a machine that is shared. So each rank measures both.
 */
#include "native.h"
#include <time.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#define LEAST_TIMED_BYTES (16 << 10)  /* less is over before it can be timed */
#define TRIED_CALLS 6                 /* before two ways are compared: a way finds the lines where the other one left them */
#define LEAST_INTERVAL 32
#define MOST_INTERVAL 2048            /* calls from one trial of the other way to the next */
#define WEIGHT 0.25                   /* of the last call in the mean of the costs */
#define MOST_GROWTH 2                 /* what one call counts at most: another program may have had the core meanwhile */
#define WORTH 0.6                     /* what is written past the caches, others read from memory: it has to save two fifths */

long long nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

void choice_init(Choice *choice)
{
    *choice = (Choice){.way = CACHED, .interval = LEAST_INTERVAL};
}

Timing timing_begin(const Choice *choice, int forced, Py_ssize_t nbytes)
{
    const int is_timed = forced < 0 && nbytes >= LEAST_TIMED_BYTES;
    return (Timing){forced < 0 ? choice->way : (Way)forced, is_timed ? nanoseconds() : 0, nbytes};
}

void timing_end(Choice *choice, Timing timing)
{
    if (timing.way == STREAMED) end_streams();
    if (!timing.begun) return;
    const Way other = timing.way == CACHED ? STREAMED : CACHED;
    const double cost = (double)(nanoseconds() - timing.begun) / (double)timing.nbytes * (timing.way == CACHED ? WORTH : 1);
    double *mean = &choice->costs[timing.way];
    if (choice->calls++ == 0)
        *mean = cost;
    else
        *mean += WEIGHT * ((cost < MOST_GROWTH * *mean ? cost : MOST_GROWTH * *mean) - *mean);
    const int is_worse = choice->costs[other] > 0 && choice->costs[other] < *mean && choice->calls >= TRIED_CALLS;
    if (is_worse || choice->calls >= choice->interval) {
        if (!is_worse) choice->interval = (int)least(2 * choice->interval, MOST_INTERVAL);
        choice->way = other;
        choice->calls = 0;
    }
}

/* Copies whole lines. */
static void stream_lines(char *to, const char *from, Py_ssize_t nbytes)
{
#if defined(__x86_64__)
    for (Py_ssize_t at = 0; at < nbytes; at += 16)
        _mm_stream_si128((__m128i *)(to + at), _mm_loadu_si128((const __m128i *)(from + at)));
#else
    memcpy(to, from, nbytes);
#endif
}

void stream_flush(Stream *stream)
{
    char *const start = stream->to - stream->held;
    if (stream->held == CACHE_LINE)
        stream_lines(start, stream->line, CACHE_LINE);
    else if (stream->held)
        memcpy(start, stream->line + (npy_uintp)start % CACHE_LINE, stream->held);
    stream->held = 0;
}

void stream_write(Stream *stream, char *to, const char *from, Py_ssize_t nbytes)
{
    if (to != stream->to) {
        stream_flush(stream);
        stream->to = to;
    }
    while (nbytes > 0) {
        const Py_ssize_t within_line = (npy_uintp)stream->to % CACHE_LINE;
        Py_ssize_t length = least(CACHE_LINE - within_line, nbytes);
        if (length == CACHE_LINE) {
            length = nbytes / CACHE_LINE * CACHE_LINE;
            stream_lines(stream->to, from, length);
        } else {
            memcpy(stream->line + within_line, from, length);
            stream->held += length;
        }
        stream->to += length;
        from += length;
        nbytes -= length;
        if (stream->held && (npy_uintp)stream->to % CACHE_LINE == 0) stream_flush(stream);
    }
}

void end_streams(void)
{
#if defined(__x86_64__)
    _mm_sfence();
#endif
}
