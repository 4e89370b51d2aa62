/* The signal that makes a thread which waits for a locked region release the GIL: see
 * [Note: releasing the lock]. */
#include "pager.h"

#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

/* An open pager, for the handler. Readers are never freed, only reused. */
struct reader {
    struct pager *pager; /* NULL: closed */
    uint32_t handlers;   /* that read it now */
    struct reader *next;
};

static struct reader *readers;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* held while a pager opens */
static int release_signal; /* 0: there is no interpreter, or no signal to spare */
static int (*holds_lock)(void);
static void *(*save_thread)(void);
static void (*restore_thread)(void *);

static long futex(uint32_t *word, int operation, uint32_t value)
{
    return syscall(SYS_futex, word, operation | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
}

/* Is the region at `address` still under the same lock as at the first call, with `*locks` 0? */
static int still_locked(struct reader *reader, uint64_t address, uint32_t *locks)
{
    struct pager *p = __atomic_load_n(&reader->pager, __ATOMIC_SEQ_CST);
    uint64_t page = p ? (address - (uintptr_t)p->base) / p->page_bytes : 0;
    if (!p || address < (uintptr_t)p->base || page >= p->arena_pages)
        return 0;
    uint32_t id = __atomic_load_n(&p->owner[page], __ATOMIC_SEQ_CST);
    if (!id)
        return 0;
    struct region *r = &p->regions[id - 1];
    uint32_t now = __atomic_load_n(&r->locks, __ATOMIC_SEQ_CST);
    if (!*locks)
        *locks = now;
    return __atomic_load_n(&r->locked, __ATOMIC_SEQ_CST) && now == *locks;
}

/* Sleep, without the GIL, while the region at `address` is locked. Returns the thread state to
 * restore, or NULL if it was not locked. */
static void *wait_unlocked(struct reader *reader, uint64_t address)
{
    uint32_t locks = 0;
    void *state = NULL;
    while (still_locked(reader, address, &locks)) {
        struct pager *p = __atomic_load_n(&reader->pager, __ATOMIC_SEQ_CST);
        uint32_t seen = p ? __atomic_load_n(&p->unlocks, __ATOMIC_SEQ_CST) : 0;
        if (!still_locked(reader, address, &locks))
            break;
        if (!state)
            state = save_thread();
        futex(&p->unlocks, FUTEX_WAIT, seen);
    }
    return state;
}

static void on_release(int number, siginfo_t *info, void *context)
{
    (void)number, (void)context;
    if (info->si_code != SI_QUEUE || info->si_pid != getpid() || !holds_lock())
        return;
    int error = errno;
    void *state = NULL;
    struct reader *reader = __atomic_load_n(&readers, __ATOMIC_SEQ_CST);
    for (; reader && !state; reader = reader->next) {
        __atomic_add_fetch(&reader->handlers, 1, __ATOMIC_SEQ_CST);
        state = wait_unlocked(reader, (uintptr_t)info->si_value.sival_ptr);
        __atomic_sub_fetch(&reader->handlers, 1, __ATOMIC_SEQ_CST);
    }
    if (state)
        restore_thread(state); /* while the interpreter finalizes this may not return */
    errno = error;
}

/* Find the interpreter's functions and an unused signal. */
static void find_signal(void)
{
    struct sigaction now, ours = {.sa_sigaction = on_release, .sa_flags = SA_SIGINFO | SA_RESTART};
    if (release_signal && !sigaction(release_signal, NULL, &now) && now.sa_sigaction == on_release)
        return;
    release_signal = 0; /* other code has replaced the handler */
    *(void **)&holds_lock = dlsym(RTLD_DEFAULT, "PyGILState_Check");
    *(void **)&save_thread = dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
    *(void **)&restore_thread = dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
    for (int number = SIGRTMAX - 2;
         !release_signal && holds_lock && save_thread && restore_thread && number > SIGRTMIN; number--) {
        if (sigaction(number, NULL, &now) || now.sa_handler != SIG_DFL)
            continue;
        if (sigaction(number, &ours, NULL) == 0)
            release_signal = number;
    }
}

int gil_release_enter(struct pager *p)
{
    pthread_mutex_lock(&mutex);
    find_signal();
    struct reader *reader = readers;
    while (reader && reader->pager)
        reader = reader->next;
    if (!reader && (reader = calloc(1, sizeof *reader))) {
        reader->next = readers;
        __atomic_store_n(&readers, reader, __ATOMIC_SEQ_CST);
    }
    if (reader)
        __atomic_store_n(&reader->pager, p, __ATOMIC_SEQ_CST);
    p->reader = reader;
    pthread_mutex_unlock(&mutex);
    return reader ? 0 : ENOMEM;
}

/* Wait until no handler reads the pager any more. */
void gil_release_leave(struct pager *p)
{
    if (!p->reader)
        return;
    __atomic_store_n(&p->reader->pager, NULL, __ATOMIC_SEQ_CST);
    gil_release_unlocked(p);
    while (__atomic_load_n(&p->reader->handlers, __ATOMIC_SEQ_CST))
        sched_yield();
    p->reader = NULL;
}

void gil_release_unlocked(struct pager *p)
{
    __atomic_add_fetch(&p->unlocks, 1, __ATOMIC_SEQ_CST);
    futex(&p->unlocks, FUTEX_WAKE, INT_MAX);
}

void gil_release_signal(uint32_t thread, uint64_t address)
{
    if (!release_signal)
        return;
    siginfo_t info = {.si_code = SI_QUEUE, .si_signo = release_signal};
    info.si_pid = getpid();
    info.si_uid = getuid();
    info.si_value.sival_ptr = (void *)(uintptr_t)address;
    syscall(SYS_rt_tgsigqueueinfo, getpid(), thread, release_signal, &info);
}
