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

static atomic_long skip, left, hits, met[2][3];
static int armed_call, armed_kind, armed_error;

/* The next `count` calls but the first `first` ones: fail with `error`, or are short, or slow. */
void fault_arm(int call, int kind, int error, long first, long count)
{
    atomic_store(&left, 0);
    armed_call = call, armed_kind = kind, armed_error = error;
    atomic_store(&skip, first);
    atomic_store(&hits, 0);
    for (int at = 0; at < 6; at++)
        atomic_store(&met[at / 3][at % 3], 0);
    atomic_store(&left, count);
}

long fault_hits(void)
{
    return atomic_load(&hits);
}

/* How many calls there were since `fault_arm`, or how many of those can be short. */
long fault_met(int call, int divisible)
{
    return atomic_load(&met[1][call]) + (divisible ? 0 : atomic_load(&met[0][call]));
}

static int is_spill(int fd)
{
    struct stat found;
    return !fstat(fd, &found) && S_ISREG(found.st_mode) && found.st_nlink == 0;
}

static int strikes(int call, int divisible)
{
    atomic_fetch_add(&met[divisible][call], 1);
    if (atomic_load(&left) <= 0 || call != armed_call || (armed_kind == SHORT && !divisible))
        return 0;
    if (atomic_fetch_sub(&skip, 1) > 0)
        return 0;
    if (atomic_fetch_sub(&left, 1) <= 0)
        return 0;
    atomic_fetch_add(&hits, 1);
    if (armed_kind == SLOW)
        nanosleep(&(struct timespec){0, 20000000}, NULL);
    return armed_kind != SLOW;
}

/* Whether a call fails that is all or nothing. */
static int fails(int call)
{
    if (!strikes(call, 0))
        return 0;
    errno = armed_error;
    return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define VECTOR(name, call)                                                                          \
    ssize_t name(int fd, const struct iovec *iov, int count, off_t offset)                          \
    {                                                                                               \
        if (is_spill(fd) && strikes(call, count > 1)) {                                             \
            if (armed_kind == FAILS) {                                                              \
                errno = armed_error;                                                                \
                return -1;                                                                          \
            }                                                                                       \
            count = count / 2; /* whole pages, as direct I/O has it */                              \
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
