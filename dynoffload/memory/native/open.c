/* Opens and closes a pager, and ends the process on errors that no caller can receive. */
#include "pager.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

double pager_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void pager_let_go(pthread_mutex_t **held)
{
    pthread_mutex_unlock(*held);
}

/* Print an error that no caller can receive, and end the process. */
void pager_end(const char *format, ...)
{
    va_list values;
    va_start(values, format);
    fputs("dynoffload: ", stderr);
    vfprintf(stderr, format, values);
    fputs(". The process ends here; the last saved checkpoint is not touched.\n", stderr);
    abort();
}

static void destroy(struct pager *p)
{
    pool_unmap(p);
    if (p->uffd >= 0)
        close(p->uffd);
    if (p->pagemap >= 0)
        close(p->pagemap);
    for (int i = 0; i < 2; i++)
        if (p->stop_pipe[i] >= 0)
            close(p->stop_pipe[i]);
    for (uint32_t i = 0; p->regions && i < p->region_capacity; i++)
        free(p->regions[i].slots), free(p->regions[i].source);
    plan_clear(p);
    free(p->owner);
    free(p->slot);
    free(p->regions);
    free(p->urgent);
    free(p->handed);
    free(p->events);
    free(p->workers);
    free(p);
}

/* End the threads that were started; the fault thread last, as others may wait for its service. */
static void stop(struct pager *p)
{
    pthread_mutex_lock(&p->mutex);
    p->stopping = 1;
    pthread_cond_broadcast(&p->work);
    pthread_cond_broadcast(&p->hand);
    while (p->serving) /* callers of pager_handed return before the memory is freed */
        pthread_cond_wait(&p->done, &p->mutex);
    pthread_mutex_unlock(&p->mutex);
    for (uint32_t i = 0; i < p->worker_count; i++)
        pthread_join(p->workers[i], NULL);
    if (!p->fault_started)
        return;
    if (write(p->stop_pipe[1], "", 1) != 1)
        abort();
    pthread_join(p->fault_thread, NULL);
}

/* 1 if the pager can work here with full rights, 2 in user mode only, else -errno. */
API int pager_probe(void)
{
    int user_mode_only, fd = fault_open(&user_mode_only);
    if (fd < 0)
        return fd;
    close(fd);
    return user_mode_only ? 2 : 1;
}

/* A new pager over `fd`, or NULL with `*error` set. Sizes are in pages of `page_bytes`. `debug`
 * checksums all bytes of each transfer and poisons free slots. */
API struct pager *pager_open(int fd, uint64_t page_bytes, uint32_t arena_pages, uint32_t pool_pages,
                             uint32_t region_capacity, uint32_t workers, int debug, int *error)
{
    struct pager *p = calloc(1, sizeof *p);
    if (!p) {
        *error = ENOMEM;
        return NULL;
    }
    int user_mode_only;
    *p = (struct pager){.patience = PATIENCE, .page_bytes = page_bytes, .arena_pages = arena_pages,
                        .pool_pages = pool_pages, .limit = pool_pages, .region_capacity = region_capacity, .fd = fd,
                        .pagemap = -1, .stop_pipe = {-1, -1}, .debug = debug};
    p->owner = calloc(arena_pages, sizeof *p->owner);
    p->slot = calloc(pool_pages, sizeof *p->slot);
    p->regions = calloc(region_capacity, sizeof *p->regions);
    p->urgent = calloc(region_capacity, sizeof *p->urgent);
    p->handed = calloc(region_capacity, sizeof *p->handed);
    p->events = calloc(EVENT_CAPACITY, sizeof *p->events);
    p->workers = calloc(workers, sizeof *p->workers);
    p->uffd = fault_open(&user_mode_only);
    p->pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    *error = ENOMEM;
    if (!p->owner || !p->slot || !p->regions || !p->urgent || !p->handed ||
        !p->events || !p->workers)
        goto failed;
    if (p->uffd < 0) {
        *error = -p->uffd;
        goto failed;
    }
    if (pipe2(p->stop_pipe, O_CLOEXEC)) {
        *error = errno;
        goto failed;
    }
    if ((*error = pool_map(p)))
        goto failed;
    pthread_mutex_init(&p->mutex, NULL);
    pthread_cond_init(&p->work, NULL);
    pthread_cond_init(&p->done, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&p->hand, &monotonic);
    sigset_t all, before; /* signals belong to the interpreter's threads */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    *error = pthread_create(&p->fault_thread, NULL, fault_serve, p);
    p->fault_started = !*error;
    for (uint32_t i = 0; !*error && i < workers; i++)
        if (!(*error = pthread_create(&p->workers[i], NULL, transfer_worker, p)))
            p->worker_count++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!*error && !(*error = gil_release_enter(p)))
        return p;
    stop(p);
failed:
    destroy(p);
    return NULL;
}

/* End the threads and unmap everything: no tensor may use the arena afterwards. */
API void pager_close(struct pager *p)
{
    gil_release_leave(p);
    stop(p);
    destroy(p);
}
