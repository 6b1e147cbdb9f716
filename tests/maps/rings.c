// Programs that let the kernel work on their descriptors: rings libaio|io_uring FOLDER [LIBRARY]. The library, or a part of
// the program, may create the ring by itself (inline.c). Ends with 0 if files that were
// opened before and after the ring was made are written and read through it, and by calls meanwhile; 2 if this machine has
// no such ring.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/io_uring.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MUST(what) do { if (!(what)) { printf("line %d: %s: %s\n", __LINE__, #what, strerror(errno)); exit(1); } } while (0)

static aio_context_t context;

static long aio(int op, int fd, void *buffer, size_t bytes, long offset) {
    struct iocb request = {.aio_lio_opcode = op, .aio_fildes = fd, .aio_buf = (unsigned long)buffer,
                           .aio_nbytes = bytes, .aio_offset = offset}, *all = &request;
    struct io_event event;
    if (syscall(SYS_io_submit, context, 1, &all) != 1) return -errno;
    MUST(syscall(SYS_io_getevents, context, 1, 1, &event, NULL) == 1);
    return event.res;
}

static int ring;
static struct io_uring_params params;
static char *queue, *answers;
static struct io_uring_sqe *entries;

#ifdef INLINE
long inline_setup(unsigned, struct io_uring_params *);
#else
#define inline_setup NULL
#endif

static int make_ring(const char *library) {
    long (*set_up)(unsigned, struct io_uring_params *) = inline_setup;
    if (library) {
        void *loaded = dlopen(library, RTLD_NOW);
        MUST(loaded && (set_up = dlsym(loaded, "inline_setup")));
    }
    ring = set_up ? set_up(4, &params) : syscall(SYS_io_uring_setup, 4, &params);
    MUST(ring > -1000);
    if (ring < 0) return 0;
    size_t queued = params.sq_off.array + params.sq_entries * 4;
    size_t answered = params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe);
    queue = mmap(0, queued, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQ_RING);
    answers = mmap(0, answered, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_CQ_RING);
    entries = mmap(0, params.sq_entries * sizeof *entries, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQES);
    MUST(queue != MAP_FAILED && answers != MAP_FAILED && entries != MAP_FAILED);
    return 1;
}

static long uring(int op, int fd, void *buffer, size_t bytes, long offset) {
    unsigned tail = *(unsigned *)(queue + params.sq_off.tail), at = tail & *(unsigned *)(queue + params.sq_off.ring_mask);
    entries[at] = (struct io_uring_sqe){.opcode = op, .fd = fd, .addr = (unsigned long)buffer, .len = bytes, .off = offset};
    ((unsigned *)(queue + params.sq_off.array))[at] = at;
    atomic_store((_Atomic unsigned *)(queue + params.sq_off.tail), tail + 1);
    MUST(syscall(SYS_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) == 1);
    unsigned head = *(unsigned *)(answers + params.cq_off.head);
    struct io_uring_cqe *all = (void *)(answers + params.cq_off.cqes);
    long result = all[head & *(unsigned *)(answers + params.cq_off.ring_mask)].res;
    atomic_store((_Atomic unsigned *)(answers + params.cq_off.head), head + 1);
    return result;
}

int main(int count, char **words) {
    int is_aio = !strcmp(words[1], "libaio");
    char path[4096], bytes[8192];
    snprintf(path, sizeof path, "%s/before", words[2]);
    int before = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    MUST(before >= 0 && write(before, "by a call", 9) == 9);
    int second = dup(before), on_exec = fcntl(before, F_DUPFD_CLOEXEC, 100);
    if (is_aio ? syscall(SYS_io_setup, 8, &context) : !make_ring(words[3])) return 2;
    long (*move)(int, int, void *, size_t, long) = is_aio ? aio : uring;
    int reads = is_aio ? IOCB_CMD_PREAD : IORING_OP_READ, writes = is_aio ? IOCB_CMD_PWRITE : IORING_OP_WRITE;

    // Reads and writes of the file, by either way.
    // (No read of the io_uring reaches past the end: docs/compatibility.md says what the kernel makes of that.)
    MUST(move(reads, before, bytes, 9, 0) == 9 && !memcmp(bytes, "by a call", 9));
    MUST(move(writes, second, "by a ring", 9, 9) == 9);
    MUST(pread(before, bytes, 100, 0) == 18 && !memcmp(bytes, "by a callby a ring", 18));
    MUST(pwrite(on_exec, "BY", 2, 0) == 2 && move(reads, on_exec, bytes, 2, 0) == 2 && !memcmp(bytes, "BY", 2));
    MUST(fcntl(on_exec, F_GETFD) == FD_CLOEXEC && fcntl(before, F_GETFD) == 0);
    MUST(lseek(before, 0, SEEK_CUR) == 9 && read(second, bytes, 100) == 9 && lseek(before, 0, SEEK_END) == 18);

    // A file of later, one for reading only, one without a name.
    snprintf(path, sizeof path, "%s/after", words[2]);
    int after = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600), reader = open(path, O_RDONLY);
    MUST(after >= 0 && move(writes, after, "later", 5, 0) == 5);
    MUST(move(reads, reader, bytes, 5, 0) == 5 && !memcmp(bytes, "later", 5));
    MUST(move(writes, reader, "later", 5, 0) == -EBADF);
    MUST(unlink(path) == 0 && move(writes, after, "LATER", 5, 5) == 5 && pread(reader, bytes, 10, 0) == 10);
    struct stat status;
    MUST(fstat(after, &status) == 0 && status.st_size == 10 && status.st_nlink == 0);
    MUST(ftruncate(after, 3) == 0 && move(reads, reader, bytes, is_aio ? 10 : 3, 0) == 3);

    // A ring closes a descriptor, whose number then is another's.
    if (!is_aio) {
        MUST(uring(IORING_OP_CLOSE, after, NULL, 0, 0) == 0);
        MUST(write(after, "x", 1) == -1 && errno == EBADF);
        snprintf(path, sizeof path, "%s/third", words[2]);
        after = open(path, O_RDWR | O_CREAT, 0600);
        MUST(uring(IORING_OP_CLOSE, after, NULL, 0, 0) == 0);
        int pair[2];
        MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0 && pair[0] == after);
        MUST(write(pair[0], "socket", 6) == 6 && read(pair[1], bytes, 100) == 6 && !memcmp(bytes, "socket", 6));
    }
    return 0;
}
