/* Threads that take the items of a loop one by one from a counter.
 *
 * Nobody waits for a thread that has not taken an item, so a thread that has lost its processor holds the others up only
 * if it lost it within an item, of which it has one. The calling thread takes items like the others. A thread that finds
 * none spins for a while and then sleeps, since one that spins keeps a processor from other processes, and the scheduler
 * takes it back later.
 */
#pragma once
#include "processor.h"
#include <omp.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/resource.h>
#include <time.h>

#define MOST_THREADS 64

/* Times in nanoseconds. */
#define LONG_SPIN 200000     /* Longer than what Python does between two calls, since to wake a thread takes time too. */
#define SHORT_SPIN 20000     /* Longer than what is between two loops of a call. */
#define CALLER_SPIN 50000    /* Longer than an item. */
#define WINDOW 50000000      /* A thread that loses its processor OFTEN times within this time shares it ... */
#define SHARED 1000000000    /* ... and spins briefly for so long. */
#define OFTEN 4

/* Does one item; `worker` is below the number of threads, and no two threads have the same. */
typedef void (*Body)(const void *about, int64_t item, int worker);

static struct {
    /* The number of the loop (32 bits), its threads (8), and its items that nobody has taken (24). The rest describes the
     * loop, and changes only where no item is left or in work. */
    _Alignas(64) _Atomic uint64_t ticket;
    Body body;
    const void *about;
    int64_t count;
    RoundingMode rounding;
    _Alignas(64) _Atomic int64_t done; /* Items that helpers have done. */
    _Atomic int sleeping, waiting;     /* Helpers that sleep until the next loop; whether the caller does. */
    _Atomic int threads;               /* Threads of the latest call. The other helpers sleep until a call wants more. */
    _Atomic int used;                  /* Whether a call has the helpers. */
    int helpers, prepared;
    pthread_mutex_t mutex;
    pthread_cond_t published, finished, wanted;
} pool = {
    .mutex = PTHREAD_MUTEX_INITIALIZER,
    .published = PTHREAD_COND_INITIALIZER,
    .finished = PTHREAD_COND_INITIALIZER,
    .wanted = PTHREAD_COND_INITIALIZER,
};

#define LEFT(ticket) ((int64_t)((ticket) & 0xffffff))
#define THREADS(ticket) ((int)((ticket) >> 24 & 0xff))
#define MOST_ITEMS 0xffffff

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* Whether the loop has items left for this worker. */
static int has_work(int worker) {
    const uint64_t ticket = atomic_load(&pool.ticket);
    return LEFT(ticket) > 0 && worker < THREADS(ticket);
}

/* Do items until none is left; returns how many. A ticket never comes twice, so whoever has taken an item from it knows
 * that this loop goes on until the item is done. */
static int64_t work(int worker) {
    int64_t done = 0;
    uint64_t ticket = atomic_load(&pool.ticket);
    while (LEFT(ticket) > 0 && worker < THREADS(ticket))
        if (atomic_compare_exchange_weak(&pool.ticket, &ticket, ticket - 1)) {
            if (!done++)
                set_rounding_mode(pool.rounding);
            pool.body(pool.about, pool.count - LEFT(ticket), worker);
            ticket = atomic_load(&pool.ticket);
        }
    return done;
}

/* What a helper knows of other processes on its processor. */
typedef struct {
    int64_t looked, until; /* When it looked last; until when it takes its processor for shared. */
    long lost;             /* How often it has lost it. */
} Neighbours;

/* How long to spin: on a processor that others want, a thread that spins has it less when there is work. */
static int64_t spin(Neighbours *others, int64_t now) {
    const int64_t elapsed = now - others->looked;
    if (elapsed > WINDOW) {
        struct rusage usage;
        getrusage(RUSAGE_THREAD, &usage);
        if (usage.ru_nivcsw - others->lost >= OFTEN && elapsed < 2 * WINDOW)
            others->until = now + SHARED;
        others->lost = usage.ru_nivcsw;
        others->looked = now;
    }
    return now < others->until ? SHORT_SPIN : LONG_SPIN;
}

static void *help(void *given) {
    const int worker = (int)(intptr_t)given;
    Neighbours others = {0, 0, 0};
    for (;;) {
        const int64_t now = nanoseconds(), until = now + spin(&others, now);
        while (!has_work(worker) && nanoseconds() < until)
            for (int i = 0; i < 8 && !has_work(worker); i++)
                pause_thread();
        if (!has_work(worker)) {
            pthread_mutex_lock(&pool.mutex);
            while (worker >= atomic_load(&pool.threads))
                pthread_cond_wait(&pool.wanted, &pool.mutex);
            atomic_fetch_add(&pool.sleeping, 1);
            while (!has_work(worker) && worker < atomic_load(&pool.threads))
                pthread_cond_wait(&pool.published, &pool.mutex);
            atomic_fetch_sub(&pool.sleeping, 1);
            pthread_mutex_unlock(&pool.mutex);
        }
        const int64_t done = work(worker);
        if (done) {
            atomic_fetch_add(&pool.done, done);
            if (atomic_load(&pool.waiting)) {
                pthread_mutex_lock(&pool.mutex);
                pthread_cond_signal(&pool.finished);
                pthread_mutex_unlock(&pool.mutex);
            }
        }
    }
    return 0;
}

/* A child process has none of the helpers, and whatever state they were in. */
static void forget(void) {
    atomic_store(&pool.ticket, 0);
    atomic_store(&pool.sleeping, 0);
    atomic_store(&pool.waiting, 0);
    atomic_store(&pool.used, 0);
    atomic_store(&pool.threads, 0);
    pool.helpers = 0;
    pthread_mutex_init(&pool.mutex, 0);
    pthread_cond_init(&pool.published, 0);
    pthread_cond_init(&pool.finished, 0);
    pthread_cond_init(&pool.wanted, 0);
}

/* Start helpers until there are `wanted`, or as many as the system lets us have. Signals are other threads' business. */
static void start(int wanted) {
    sigset_t all, before;
    if (!pool.prepared)
        pool.prepared = pthread_atfork(0, 0, forget) == 0;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    pthread_t thread;
    while (pool.helpers < wanted && pthread_create(&thread, 0, help, (void *)(intptr_t)(pool.helpers + 1)) == 0) {
        pthread_detach(thread);
        pool.helpers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, 0);
}

/* The threads of a call: our own, or those of torch's OpenMP library. */
typedef struct {
    int count, own;
} Threads;

/* Make a call on threads: the caller alone makes it on our own, which come in at each loop, and all of torch's do. */
#define ON(threads, call)                                 \
    do {                                                  \
        if ((threads).own || (threads).count == 1)        \
            call;                                         \
        else                                              \
            _Pragma("omp parallel num_threads((threads).count)") call; \
    } while (0)

/* Claim up to `wanted` threads for a call. A call that finds our own in use by another runs on one. */
static Threads join(int wanted, int own) {
    wanted = wanted < MOST_THREADS ? wanted : MOST_THREADS;
    if (!own || wanted < 2 || atomic_exchange(&pool.used, 1))
        return (Threads){own ? 1 : wanted, 0};
    if (pool.helpers < wanted - 1)
        start(wanted - 1);
    wanted = wanted < pool.helpers + 1 ? wanted : pool.helpers + 1;
    if (wanted != atomic_load(&pool.threads)) {
        pthread_mutex_lock(&pool.mutex);
        atomic_store(&pool.threads, wanted);
        pthread_cond_broadcast(&pool.wanted);
        pthread_mutex_unlock(&pool.mutex);
    }
    return (Threads){wanted, 1};
}

static void leave(Threads threads) {
    if (threads.own)
        atomic_store(&pool.used, 0);
}

static void await(int64_t helped) {
    const int64_t until = nanoseconds() + CALLER_SPIN;
    while (atomic_load(&pool.done) < helped && nanoseconds() < until)
        for (int i = 0; i < 8 && atomic_load(&pool.done) < helped; i++)
            pause_thread();
    if (atomic_load(&pool.done) < helped) {
        pthread_mutex_lock(&pool.mutex);
        atomic_store(&pool.waiting, 1);
        while (atomic_load(&pool.done) < helped)
            pthread_cond_wait(&pool.finished, &pool.mutex);
        atomic_store(&pool.waiting, 0);
        pthread_mutex_unlock(&pool.mutex);
    }
}

/* Do the items 0, ..., count - 1; to be called within `ON`. So `few` of them take less time than to share them. */
static void each(Threads threads, Body body, const void *about, int64_t count, int64_t few) {
    if (!threads.own) {
#pragma omp for schedule(static)
        for (int64_t item = 0; item < count; item++)
            body(about, item, omp_get_thread_num());
        return;
    }
    if (threads.count == 1 || count <= few || count > MOST_ITEMS) {
        for (int64_t item = 0; item < count; item++)
            body(about, item, 0);
        return;
    }
    const uint64_t number = (atomic_load(&pool.ticket) >> 32) + 1;
    pool.body = body;
    pool.about = about;
    pool.count = count;
    pool.rounding = rounding_mode();
    atomic_store(&pool.done, 0);
    atomic_store(&pool.ticket, number << 32 | (uint64_t)threads.count << 24 | (uint64_t)count);
    if (atomic_load(&pool.sleeping)) {
        pthread_mutex_lock(&pool.mutex);
        pthread_cond_broadcast(&pool.published);
        pthread_mutex_unlock(&pool.mutex);
    }
    await(count - work(0));
}
