/* A disk that fails, for tests: loaded before the C library (LD_PRELOAD), it answers calls on spill
 * files, which are the regular files without a name, as a bad disk would. `fault_arm` says which. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum call { READ = 0, WRITE = 1, ROOM = 2 };
enum kind { FAILS = 0, SHORT = 1, SLOW = 2 };

static atomic_long skip, left, hits;
static int armed_call, armed_kind, armed_error;

/* The next `count` calls but the first `first` ones: fail with `error`, or are short, or slow. */
void fault_arm(int call, int kind, int error, long first, long count)
{
    atomic_store(&left, 0);
    armed_call = call, armed_kind = kind, armed_error = error;
    atomic_store(&skip, first);
    atomic_store(&hits, 0);
    atomic_store(&left, count);
}

long fault_hits(void)
{
    return atomic_load(&hits);
}

static int is_spill(int fd)
{
    struct stat found;
    return !fstat(fd, &found) && S_ISREG(found.st_mode) && found.st_nlink == 0;
}

static int strikes(int call)
{
    if (atomic_load(&left) <= 0 || call != armed_call)
        return 0;
    if (atomic_fetch_sub(&skip, 1) > 0)
        return 0;
    if (atomic_fetch_sub(&left, 1) <= 0)
        return 0;
    atomic_fetch_add(&hits, 1);
    return 1;
}

static int fails(int call)
{
    if (!strikes(call))
        return 0;
    if (armed_kind == FAILS) {
        errno = armed_error;
        return 1;
    }
    struct timespec pause = {0, 20000000};
    nanosleep(&pause, NULL);
    return 0;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define VECTOR(name, call)                                                                          \
    ssize_t name(int fd, const struct iovec *iov, int count, off_t offset)                          \
    {                                                                                               \
        if (is_spill(fd)) {                                                                         \
            if (armed_kind == SHORT && count > 1 && strikes(call))                                  \
                count = count / 2; /* whole pages, as direct I/O has it */                          \
            else if (armed_kind != SHORT && fails(call))                                            \
                return -1;                                                                          \
        }                                                                                           \
        return REAL(name)(fd, iov, count, offset);                                                  \
    }

VECTOR(preadv, READ)
VECTOR(pwritev, WRITE)

int sync_file_range(int fd, off_t offset, off_t nbytes, unsigned flags)
{
    return is_spill(fd) && fails(WRITE) ? -1 : REAL(sync_file_range)(fd, offset, nbytes, flags);
}

int msync(void *at, size_t nbytes, int flags)
{
    return fails(WRITE) ? -1 : REAL(msync)(at, nbytes, flags);
}

int madvise(void *at, size_t nbytes, int advice)
{
    return advice == 22 && fails(READ) ? -1 : REAL(madvise)(at, nbytes, advice); /* POPULATE_READ */
}

int fallocate(int fd, int mode, off_t offset, off_t nbytes)
{
    return mode == 0 && is_spill(fd) && fails(ROOM) ? -1 : REAL(fallocate)(fd, mode, offset, nbytes);
}
