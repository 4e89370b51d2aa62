/* The thread that serves page faults on absent pages, which the kernel reports by userfaultfd. */
#include "pager.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define FEATURE_MOVE (1u << 16)
#define FEATURE_THREAD_ID (1u << 8)
#define MODE_USER_ONLY 1
#define GRACE_S 60.0

/* A descriptor with UFFD_FEATURE_MOVE, or -errno. It tries a privileged one first: then system calls
 * on absent memory wait too; without privilege they return EFAULT. */
int fault_open(int *user_mode_only)
{
    int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
    *user_mode_only = 0;
    if (fd < 0 && errno == EPERM) {
        *user_mode_only = 1;
        fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | MODE_USER_ONLY);
    }
    if (fd < 0)
        return -errno;
    struct uffdio_api api = {.api = UFFD_API, .features = FEATURE_MOVE | FEATURE_THREAD_ID};
    if (ioctl(fd, UFFDIO_API, &api)) {
        int error = errno;
        close(fd);
        return -error;
    }
    return fd;
}

static void serve(struct pager *p, uint64_t address, uint32_t thread)
{
    uint64_t page = (address - (uintptr_t)p->base) / p->page_bytes;
    uint32_t id = page < p->arena_pages ? p->owner[page] - 1 : NO_REGION;
    if (id == NO_REGION)
        pager_end("access to memory of a region that was released (page %llu of the arena), which "
                  "is a bug", (unsigned long long)page);
    struct region *r = &p->regions[id];
    p->counters.faults++;
    if (r->next_use > p->position && r->next_use != NEVER &&
        r->next_use - p->position <= FAULT_LOOKAHEAD) {
        plan_advance(p, r->next_use);
        transfer_wake(p);
    }
    if (r->state == RESIDENT) {
        pool_wake(p, r);
    } else if (r->locked) {
        if (!r->reported) {
            r->reported = 1;
            if (p->handed_head == p->handed_tail)
                p->handed_since = pager_now();
            p->handed[p->handed_tail++ % p->region_capacity] = id;
            pthread_cond_broadcast(&p->hand);
        }
        if (r->told != thread) {
            r->told = thread;
            gil_release_signal(thread, address);
        }
    } else {
        r->asleep = 1;
        if (r->state == STAGED)
            transfer_install(p, id);
        else
            transfer_want(p, id);
    }
}

void *fault_serve(void *context)
{
    struct pager *p = context;
    struct pollfd fds[2] = {{p->uffd, POLLIN, 0}, {p->stop_pipe[0], POLLIN, 0}};
    struct uffd_msg messages[16];
    for (;;) {
        int ready = poll(fds, 2, 1000);
        if (ready < 0 && errno != EINTR)
            abort();
        if (fds[1].revents)
            return NULL;
        pthread_mutex_lock(&p->mutex);
        if (p->handed_head != p->handed_tail && pager_now() - p->handed_since > GRACE_S)
            pager_end("a thread has waited %.0f s for a parameter whose optimizer update is still to "
                      "be made, while it holds the interpreter's lock (for instance by reading a "
                      "numpy view of it). Call session.flush() before such an access, or set "
                      "defer_updates='never'", GRACE_S);
        transfer_watch(p);
        ssize_t got = read(p->uffd, messages, sizeof messages);
        for (ssize_t i = 0; i < got / (ssize_t)sizeof *messages; i++)
            if (messages[i].event == UFFD_EVENT_PAGEFAULT)
                serve(p, messages[i].arg.pagefault.address, messages[i].arg.pagefault.feat.ptid);
        pthread_mutex_unlock(&p->mutex);
    }
}
