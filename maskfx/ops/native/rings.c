/* Messages between processes of one machine, through rings of bytes in memory that they share.
 *
 * The memory begins with a word for each rank, set when the rank has left. Each ordered pair of
 * ranks has a ring: the bytes written and the bytes read so far, each in a cache line, and the
 * content. One process writes to a ring and one reads it. A message is its number, its size and
 * its bytes. */

#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define WORDS 4096  /* bytes of the words of all ranks */
#define LINE 64     /* bytes of a cache line */
#define MOST 64     /* ranks */
#define STRIDE 65536 /* bytes that are copied before the other end may see them */
#define FRAME 16    /* bytes of a message's number and size */

#define SPINS 400    /* passes before the core is offered to others */
#define YIELDS 400   /* passes before the process sleeps between them */
#define SLEEPS 200   /* short sleeps before long ones */

#define LATE -1
#define LEFT -2
#define DISORDER -3

struct operation {
    int64_t peer, incoming, number, nbytes;
    uint8_t *data;
    int64_t framed, moved; /* whether number and size are through, and the bytes that are */
    int64_t needed;        /* whether to wait for it */
};

struct ring {
    uint64_t *written, *read;
    uint8_t *content;
    uint64_t capacity;
};

static struct ring ring_of(uint8_t *base, int64_t ranks, int64_t capacity, int64_t from, int64_t to)
{
    uint8_t *start = base + WORDS + (from * ranks + to) * (2 * LINE + capacity);
    struct ring found = {(uint64_t *)start, (uint64_t *)(start + LINE), start + 2 * LINE, capacity};
    return found;
}

static void copy(struct ring *ring, uint64_t at, uint8_t *data, uint64_t count, int incoming)
{
    uint64_t place = at % ring->capacity;
    uint64_t first = ring->capacity - place < count ? ring->capacity - place : count;
    if (incoming) {
        memcpy(data, ring->content + place, first);
        memcpy(data + first, ring->content, count - first);
    } else {
        memcpy(ring->content + place, data, first);
        memcpy(ring->content, data + first, count - first);
    }
}

/* Move at most `count` bytes, at least `least` or none; return how many. */
static uint64_t move(struct ring *ring, uint8_t *data, uint64_t count, uint64_t least, int incoming)
{
    uint64_t written = __atomic_load_n(ring->written, __ATOMIC_ACQUIRE);
    uint64_t read = __atomic_load_n(ring->read, __ATOMIC_ACQUIRE);
    uint64_t there = incoming ? written - read : ring->capacity - (written - read);
    if (there < least)
        return 0;
    if (count > there)
        count = there;
    if (count > STRIDE)
        count = STRIDE;
    if (count == 0)
        return 0;
    copy(ring, incoming ? read : written, data, count, incoming);
    if (incoming)
        __atomic_store_n(ring->read, read + count, __ATOMIC_RELEASE);
    else
        __atomic_store_n(ring->written, written + count, __ATOMIC_RELEASE);
    return count;
}

/* Move what can be moved of one message; return 1 if something was, 0 if not, or DISORDER. */
static int advance(struct operation *op, struct ring *ring)
{
    int moved = 0;
    if (!op->framed) {
        int64_t frame[2] = {op->number, op->nbytes};
        if (!move(ring, (uint8_t *)frame, FRAME, FRAME, (int)op->incoming))
            return 0;
        if (frame[0] != op->number || frame[1] != op->nbytes)
            return DISORDER;
        op->framed = moved = 1;
    }
    while (op->moved < op->nbytes) {
        uint64_t count = move(ring, op->data + op->moved, op->nbytes - op->moved, 1, (int)op->incoming);
        if (!count)
            break;
        op->moved += count;
        moved = 1;
    }
    return moved;
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

static void rest(int64_t idle)
{
    if (idle < SPINS)
        return;
    if (idle < SPINS + YIELDS) {
        sched_yield();
        return;
    }
    struct timespec time = {0, idle < SPINS + YIELDS + SLEEPS ? 20000 : 500000};
    nanosleep(&time, NULL);
}

/* Send and receive messages, those of one pair in the order of `ops`, until all that are needed are
 * through; if none is, only what can be moved at once. `culprit` gets the rank that is waited for.
 * Return 0, LATE, LEFT or DISORDER. */
int ring_run(uint8_t *base, int64_t rank, int64_t ranks, int64_t capacity, struct operation **ops,
             int64_t count, double seconds, int64_t *culprit)
{
    double until = now() + seconds;
    int64_t idle = 0;
    for (;;) {
        uint8_t busy[2][MOST] = {{0}};
        int moved = 0, missing = 0;
        for (int64_t i = 0; i < count; i++) {
            struct operation *op = ops[i];
            if (op->framed && op->moved == op->nbytes)
                continue;
            uint8_t *waits = &busy[op->incoming != 0][op->peer];
            if (!*waits) {
                int64_t from = op->incoming ? op->peer : rank, to = op->incoming ? rank : op->peer;
                struct ring ring = ring_of(base, ranks, capacity, from, to);
                int found = advance(op, &ring);
                if (found < 0) {
                    *culprit = op->peer;
                    return found;
                }
                moved |= found;
                if (op->framed && op->moved == op->nbytes)
                    continue;
                *waits = 1;
            }
            if (op->needed && !missing) {
                missing = 1;
                *culprit = op->peer;
            }
        }
        if (!missing)
            return 0;
        if (moved) {
            idle = 0;
            continue;
        }
        uint32_t *left = (uint32_t *)base;
        for (int64_t peer = 0; peer < ranks; peer++)
            if ((busy[0][peer] || busy[1][peer]) && __atomic_load_n(left + peer, __ATOMIC_ACQUIRE)) {
                *culprit = peer;
                return LEFT;
            }
        if (idle >= SPINS && now() > until)
            return LATE;
        rest(idle++);
    }
}

/* Let all that wait for a rank fail. */
int ring_leave(uint8_t *base, int64_t rank)
{
    __atomic_store_n((uint32_t *)base + rank, 1, __ATOMIC_RELEASE);
    return 0;
}
