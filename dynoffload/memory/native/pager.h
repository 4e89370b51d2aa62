/*
 * The user-space pager: regions of anonymous memory whose pages move within a fixed pool.
 *
 * [Note: pages]  A pool has at most P pages. They are populated as they are first needed and kept
 * until the pager is closed. Each page is either in a slot of the pool or at the address of a region.
 * UFFDIO_MOVE moves it from one to the other without a copy. A fetch reads the spill file into free
 * slots ("staged") and moves the pages in place ("resident"). An eviction moves them out into vacant
 * slots, writes them, and frees the slots. So the budget holds by construction.
 *   Where the system runs short of memory the pool gets a lower limit: as slots become free, their
 * pages go back to the system. The slots stay, vacant.
 *
 * [Note: no interpreter]  Nothing here calls into Python. A thread that accesses an absent page
 * sleeps in the kernel, perhaps with the GIL held. The pager's threads wake it and never need the
 * GIL.
 *
 * [Note: dirtiness]  Pages that were only staged are clean. Pages that were ever at their address may
 * have been written: no announcement is relied on, and the kernel cannot tell, as UFFDIO_MOVE makes
 * pages writable and a thread may write before they are protected. So they are compared with the
 * file's copy by hash as they leave, in slots, where nobody reaches them, and written if it differs.
 *   A difference of one word in each of eight interleaved lanes is always found. Others would have to
 * cancel by chance, as once in 2^64 tries. The words that checksums read anyway are compared first. So what changes at
 * every visit, as optimizer state does, is hashed no more after four of them.
 *
 * [Note: sources]  A region's copy may lie in other files, such as a checkpoint, in extents at any
 * offset. It is read there until it is first written, to the spill file. A file whose size or time of
 * modification differs from when it was opened is not read.
 *   What the page cache holds is read from it. Long extents that it lacks are read past it, in aligned
 * pieces, and copied: that takes no memory from the pool's control group, and half of the processor's
 * time.
 *
 * [Note: locked regions]  A region whose content is about to be replaced (its optimizer update is
 * deferred) is locked: it may be staged but not installed. A fault on it is reported to the owner,
 * who updates it at another address ("alias") and unlocks it.
 *
 * [Note: twins]  Two regions of one size may exchange contents: pages, dirtiness and file offset, but
 * not addresses. So a gradient that a deferred update still needs moves out of the way of the next
 * one, in whatever tier it is, without a copy.
 *
 * [Note: clear regions]  A region may be declared to hold zeros only. Until it is next at its address
 * there is nothing to read or write: its pages are zeroed as it is fetched, and dropped as it is
 * evicted. Gradients that stay zero are still read and scaled in place by gradient clipping. So a
 * region that was cleared and then visited is scanned, up to the first byte that is not zero, before
 * it is written or reported as not clear. If it holds zeros only, it is clear again.
 *
 * [Note: releasing the lock]  The owner needs the GIL, and the thread that waits may hold it: numpy
 * and pickle read memory under it. A signal to that thread interrupts its sleep. The handler, which
 * runs on it, releases the GIL, sleeps until the region is unlocked, and takes the GIL again before
 * the access is repeated. To the interrupted code this is like any other place at which an extension
 * lets other threads run.
 *   The signal may arrive late, when the access was served, the region was released or the pager is
 * closed. So the handler reads only the pager's own data, never the arena, and a pager that closes
 * waits for the handlers that read its data. The handler stays installed for good: a signal still
 * queued when its disposition returned to the default would end the process.
 *   PyGILState_Check reports whether a thread holds the GIL. It returns true for every thread once
 * there are sub-interpreters. With them, accesses to locked regions must be announced.
 *
 * [Note: operands]  An operator reads and writes its operands side by side. Unplanned ones would
 * evict each other at every step of its loop, while planned regions stay. So the regions that
 * faulted last are evicted last, and the oldest of them first.
 *
 * [Note: no room]  A request for room that cannot be met ends. When nothing is in flight and nothing
 * can be evicted, because all is pinned or writes fail, writes are tried again every second. Callers
 * of a function get an error: soon if writes fail, after `patience` seconds if all is pinned. A
 * thread that sleeps on an access cannot get one, so the process ends after `patience`, with a
 * message.
 *
 * [Note: one worker]  What may be work for the workers wakes one of them, which wakes the next as it
 * begins a transfer, if there may be more work. So few of them take a core from the computation.
 *
 * [Note: moves]  Pages that the kernel has split, swapped out, or holds for a moment move in parts,
 * with EAGAIN and EBUSY in between. Linux 6.18 also moves pages whose first attempt met a busy lock
 * and then reports EEXIST (it repeats what it has done, and wakes no thread). So after an error the
 * page table is read to find the page. A page that cannot be moved whole is moved back whole.
 *   A driver may hold a page at an address for long. A thread that needs it releases the mutex
 * between two attempts, when the region is whole and may change its state. Pages in slots have no
 * address that a driver could be given, so an install waits for the kernel alone.
 */
#ifndef DYNOFFLOAD_PAGER_H
#define DYNOFFLOAD_PAGER_H

#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stddef.h>

#define API __attribute__((visibility("default")))
#define NEVER INT64_MAX
#define NO_REGION UINT32_MAX
#define EVENT_CAPACITY 65536u
#define FAULT_LOOKAHEAD 8 /* uses by which a fault may advance the plan's position */
#define OPERANDS 4        /* of one operator; see [Note: operands] */
#define SAME_BITS 15      /* of a region's last four evictions */

enum state { FREE = 0, ABSENT, READING, STAGED, RESIDENT, WRITING };
enum slot { TAKEN = 0, FULL, VACANT }; /* by a region, with a page, without */
enum cause { BY_PLAN = 0, BY_FAULT = 1, BY_ROOM = 2 };
enum event_kind { EVENT_FETCH = 0, EVENT_EVICT = 1, EVENT_STALL = 2 };
enum action_kind { ACTION_FETCH = 0, ACTION_EVICT = 1 };
enum failure_kind { FAILED_READ = 1, FAILED_WRITE, FAILED_PINNED, FAILED_LOCKED, FAILED_MOVE };

#define PATIENCE 60u      /* seconds, or rounds of `transfer_watch` */
#define MOVE_SOON_S 0.05  /* there are other pages to evict, or the move is tried again */
#define MOVE_SURELY_S 10. /* a thread needs this one */

struct failure { /* why a function failed */
    int32_t kind, error;
    uint32_t region;
};

struct extent { /* bytes of a file that is not ours; see [Note: sources] */
    int32_t fd, direct; /* the second past the page cache, or -1 */
    int64_t offset, bytes;
    int64_t size, modified_ns; /* of the file, as it was opened */
};

struct region {
    uint8_t state;
    uint8_t dirty;      /* the file's copy, if any, is older than the pages */
    uint8_t has_copy;   /* the file holds its content */
    uint8_t hashed;     /* `hash` is of the file's copy */
    uint8_t same;       /* a bit for each of the last evictions: it may have been unchanged */
    uint8_t clear;      /* see [Note: clear regions] */
    uint8_t cleared;    /* it was clear, and may be again */
    uint8_t locked;     /* see [Note: locked regions] */
    uint8_t waited;     /* a thread waits for it: install as soon as staged */
    uint8_t asleep;     /* a thread sleeps on it in the kernel, and cannot get an error */
    uint8_t queued;     /* in the urgent queue */
    uint8_t prefetched; /* staged by plan and not yet used */
    uint8_t busy;       /* its pages cannot move now (pinned by the kernel) */
    uint8_t reported;   /* its fault under lock was reported to the owner */
    uint8_t shown;      /* its pages are at an alias */
    int32_t pins;
    uint32_t locks;     /* how often it was locked */
    struct failure failure; /* of the last request, for the callers that wait */
    uint32_t told;      /* the last thread that was signalled to release the GIL */
    uint32_t page, pages; /* place in the arena */
    uint64_t bytes;       /* of content, for the counters */
    uint64_t sum, hash;   /* of the file's copy: of some words, and of all if `hashed` */
    int64_t offset;       /* in the spill file */
    struct extent *source; /* where the file's copy is instead, then its name; or NULL */
    uint32_t extents;
    uint32_t *slots;      /* one per page while not at its address */
    int64_t next_use;     /* position in the reference string, or NEVER */
    uint64_t stamp;       /* last use, for LRU */
    uint64_t fault;       /* number of the last fault that fetched it, or 0 */
    double waited_since;
};

struct event {
    double start, end;
    uint64_t bytes;
    uint32_t region;
    uint16_t kind, cause;
};

struct action { /* of a plan, as Python gives it */
    int64_t position, kind, region;
};

struct use {
    int64_t position, region, next; /* the region's next use: its index, or -1 */
};

struct counters {
    uint64_t bytes_in, bytes_out;
    uint64_t prefetched_bytes, used_bytes, wasted_bytes;
    uint64_t faults, stalls, events_lost;
    double stall_s;
    uint64_t pages_in_use, pages_taken, peak_pages; /* taken: in use or empty */
    int32_t error;          /* errno of the last failed transfer, 0 if none */
    uint32_t error_region;
    int32_t error_is_write;
};

struct pager {
    /* the mapping: arena pages first, then the pool's slots */
    char *base;
    uint64_t page_bytes;
    uint32_t arena_pages, pool_pages;
    uint32_t *owner; /* region of each arena page, plus one; untouched entries take no memory */
    int uffd, fd, pagemap, stop_pipe[2];
    uint8_t *slot;           /* what each is */
    uint32_t fulls, reserve; /* fulls: how many slots are */
    uint32_t populated; /* slots that have had a page; grows as the pool is used */
    uint32_t limit;     /* pages that the pool may have; see [Note: pages] */
    uint32_t retired;   /* pages that the system has back */

    struct region *regions;
    uint32_t region_capacity, region_high; /* one past the highest region ever made */
    uint64_t clock;
    uint64_t served; /* faults that fetched a region */

    uint32_t *urgent; /* ring of regions that threads wait for */
    uint32_t urgent_head, urgent_tail;
    uint32_t *handed; /* ring of locked regions that threads wait for */
    uint32_t handed_head, handed_tail;
    double handed_since;
    uint32_t serving; /* threads inside pager_handed */
    uint32_t writing; /* pages being evicted */
    uint32_t waiting; /* regions that threads wait for now */
    double waiting_since;

    /* see [Note: no room] */
    uint32_t moving;   /* regions in flight */
    uint32_t progress; /* counts events that may have made room */
    uint32_t watched;  /* `progress` at the last check */
    uint32_t stuck;    /* checks in a row at which nothing could be done */
    uint32_t patience;
    double watched_at;
    int32_t write_error; /* errno of the last write, 0 if it succeeded */
    uint32_t write_region;

    struct reader *reader; /* see [Note: releasing the lock] */
    uint32_t unlocks;      /* a futex: regions unlocked so far */

    /* the plan */
    int64_t position;
    struct action *action;
    struct use *use;
    uint32_t actions, next_action, uses, next_used;

    struct event *events;
    uint32_t event_count;
    struct counters counters;

    pthread_mutex_t mutex;
    pthread_cond_t work, done, hand;
    pthread_t *workers, fault_thread;
    uint32_t worker_count;
    int fault_started, stopping, debug; /* debug: see file.c, and free slots are poisoned */
};

double pager_now(void);
void pager_let_go(pthread_mutex_t **);
/* Hold the mutex until the end of the block. */
#define HOLD(p)                                                                                     \
    __attribute__((cleanup(pager_let_go))) pthread_mutex_t *held_mutex = &(p)->mutex;               \
    pthread_mutex_lock(held_mutex)
void pager_end(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));
/* Pages available without an eviction. */
static inline uint32_t pager_room(const struct pager *p)
{
    uint32_t most = p->limit + p->fulls, have = p->populated - p->retired;
    return most > have ? most - have : 0;
}
static inline int fail(struct failure *failure, int kind, int error, uint32_t id)
{
    *failure = (struct failure){kind, error, id};
    return 1;
}
static inline char *arena_address(const struct pager *p, const struct region *r)
{
    return p->base + (uint64_t)r->page * p->page_bytes;
}
static inline char *slot_address(const struct pager *p, uint32_t slot)
{
    return p->base + (uint64_t)(p->arena_pages + slot) * p->page_bytes;
}

/* pool.c: 0 or an errno; a failed move is undone */
int pool_map(struct pager *);
void pool_unmap(struct pager *);
int pool_install(struct pager *, struct region *, double patience_s);  /* slots -> address */
int pool_withdraw(struct pager *, struct region *, double patience_s); /* address -> slots */
int pool_relocate(struct pager *, struct region *, uint32_t page, int out, double patience_s);
int pool_again(struct pager *, int error, double since, double patience_s);
int pool_replace(struct pager *, struct region *); /* other pages, without content, in slots */
void pool_take_slots(struct pager *, struct region *);
void pool_free_slots(struct pager *, struct region *);
void pool_retire(struct pager *); /* give free pages beyond the limit back */
void pool_wake(struct pager *, struct region *);

/* transfer.c */
void *transfer_worker(void *);
void transfer_wake(struct pager *); /* one worker, if there may be work: see [Note: one worker] */
void transfer_want(struct pager *, uint32_t region);
void transfer_unwant(struct pager *, uint32_t region); /* sleeping accesses fault again */
int transfer_install(struct pager *, uint32_t region);
void transfer_fill(struct pager *, uint32_t region); /* pages for a region without a copy */
void transfer_record(struct pager *, int kind, int cause, uint32_t region, double start, uint64_t bytes);
void transfer_end_wait(struct pager *, uint32_t region);
void transfer_drop(struct pager *, uint32_t region); /* discard its pages and content */
int transfer_is_clear(struct pager *, uint32_t region);
void transfer_watch(struct pager *);                 /* see [Note: no room] */

/* plan.c */
void plan_clear(struct pager *);
void plan_advance(struct pager *, int64_t position);
int plan_is_due(const struct pager *);
int plan_next(struct pager *, uint32_t *region);
uint32_t plan_victim(struct pager *, int64_t later_than);

/* swap.c */
int region_put_aside(struct pager *, uint32_t id); /* address -> slots, and end its waits */

/* faults.c */
void *fault_serve(void *);
int fault_open(int *user_mode_only);

/* file.c: 0 or an errno; without the mutex */
int file_transfer(struct pager *, struct region *, int write);
void file_unread(const struct region *, uint32_t id, int error) __attribute__((noreturn));
uint64_t file_sum(const struct pager *, const struct region *, int whole); /* of pages in slots */

/* gil_release.c */
int gil_release_enter(struct pager *); /* 0 or an errno */
void gil_release_leave(struct pager *);
void gil_release_signal(uint32_t thread, uint64_t address);
void gil_release_unlocked(struct pager *); /* a region was unlocked or released */

#endif
