/* Calls whose answers through the mount and the library are compared: `calls CASE DIR`. DIR is an empty directory. A line is a
 * call and its answer, and is to be the same on every file system of Linux's. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <sys/select.h>
#include <linux/fs.h>
#include <linux/openat2.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>
#include <utime.h>

static char *self;

static void say(const char *what, long answer) {
    if (answer < 0)
        printf("%s: %s\n", what, strerrorname_np(errno));
    else
        printf("%s: %ld\n", what, answer);
    fflush(stdout);
}

/* A call and its number. */
#define SAY(call) (errno = 0, say(#call, (long)(call)))
/* A call and whether it works: its number is not the file system's affair. */
#define TRY(call) (errno = 0, say(#call, (long)(call) < 0 ? -1 : 0))

#define NEED(what) \
    do { \
        if (!(what)) { \
            printf("%s:%d: %s: %s\n", __func__, __LINE__, #what, strerrorname_np(errno)); \
            exit(1); \
        } \
    } while (0)

extern char **environ;

static int make(const char *name, const char *text) {
    int fd = open(name, O_RDWR | O_CREAT | O_TRUNC, 0644);
    NEED(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text));
    return fd;
}

static void holds(const char *name, const char *text) {
    char got[64];
    int fd = open(name, O_RDONLY);
    NEED(fd >= 0);
    ssize_t bytes = read(fd, got, sizeof got);
    NEED(bytes == (ssize_t)strlen(text) && memcmp(got, text, bytes) == 0);
    close(fd);
}

static void wait_for(pid_t child) {
    int status;
    NEED(child > 0 && waitpid(child, &status, 0) == child);
    if (WIFSIGNALED(status))
        printf("ended by %s\n", sigabbrev_np(WTERMSIG(status)));
    else if (WEXITSTATUS(status) != 0)
        printf("ended with %d\n", WEXITSTATUS(status));
}

/* Runs the rest of the case in a child, and waits for it. */
#define CHILD for (pid_t child = (fflush(stdout), fork()); child >= 0; wait_for(child), child = -1) \
    for (; child == 0; fflush(stdout), _exit(0))

static void become(uid_t user) {
    NEED(setgroups(0, NULL) == 0 && setresgid(user, user, user) == 0 && setresuid(user, user, user) == 0);
}

/* Links read by an empty path. */
static void empty_links(void) {
    char target[64] = "";
    NEED(symlink("target", "link") == 0);
    int link = open("link", O_PATH | O_NOFOLLOW), file = make("file", "text"), dir = open(".", O_RDONLY);
    NEED(link >= 0 && dir >= 0);
    SAY(readlinkat(link, "", target, sizeof target));
    puts(target);
    SAY(readlinkat(link, "", target, 3));
    SAY(readlinkat(file, "", target, sizeof target));
    SAY(readlinkat(dir, "", target, sizeof target));
    SAY(readlinkat(AT_FDCWD, "", target, sizeof target));
    SAY(readlink("", target, sizeof target));
    SAY(readlink("file", target, sizeof target));
    SAY(readlink("none", target, sizeof target));
    SAY(readlink("link", target, 0));
    SAY(syscall(SYS_readlinkat, link, NULL, target, sizeof target));
    SAY(readlinkat(dir, "link", target, sizeof target));
    SAY(readlinkat(999, "", target, sizeof target));
    SAY(readlinkat(link, "x", target, sizeof target));
}

static struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};

/* Whether another process can lock the file. */
static void look(const char *when, const char *name) {
    fflush(stdout);
    pid_t child = fork();
    NEED(child >= 0);
    if (child == 0) {
        int fd = open(name, O_RDWR);
        NEED(fd >= 0);
        int taken = fcntl(fd, F_SETLK, &whole);
        printf("%s: %s\n", when, taken == 0 ? "free" : errno == EAGAIN ? "held" : strerrorname_np(errno));
        fflush(stdout);
        _exit(0);
    }
    wait_for(child);
}

static void locks_end_with_any_descriptor(void) {
    int fd = make("f", "text"), other = open("f", O_RDONLY), two = dup(fd);
    NEED(other >= 0 && two >= 0);
    SAY(fcntl(fd, F_SETLK, &whole));
    look("locked", "f");
    TRY(close(two));
    look("a duplicate closed", "f");
    SAY(fcntl(fd, F_SETLK, &whole));
    TRY(close(other));
    look("another opening closed", "f");
    two = dup(fd);
    SAY(fcntl(fd, F_SETLK, &whole));
    TRY(dup2(0, two));
    look("a duplicate replaced", "f");
    two = dup(fd);
    int three = dup(two);
    SAY(fcntl(two, F_SETLK, &whole));
    TRY(close_range(three, three, 0));
    look("a duplicate closed by a range", "f");
    SAY(fcntl(two, F_SETLK, &whole));
    TRY(dup2(fd, fd));
    look("a duplicate of itself", "f");
    fflush(stdout);
    CHILD close(fd);
    look("a child closed its own", "f");
    pid_t child = vfork();
    if (child == 0) {
        close(fd);
        _exit(0);
    }
    wait_for(child);
    look("a child on borrowed memory closed its own", "f");
    int path = open("f", O_PATH);
    NEED(path >= 0);
    close(path);
    look("a path closed", "f");
    struct flock half = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 2};
    SAY(flock(fd, LOCK_EX));
    TRY(close(dup(fd)));
    SAY(flock(other = open("f", O_RDONLY), LOCK_EX | LOCK_NB));
    SAY(fcntl(fd, F_OFD_SETLK, &half));
    TRY(close(dup(fd)));
    look("a description's lock stays", "f");
}

/* The program that the next case becomes. */
static void after_exec(void) {
    look("after exec: closed by it", "closed");
    look("after exec: one of two closed", "both");
    look("after exec: open", "open");
}

static void locks_at_exec(void) {
    int closed = make("closed", ""), both = make("both", ""), left = make("open", "");
    int again = fcntl(both, F_DUPFD_CLOEXEC, 0);
    NEED(again >= 0 && fcntl(closed, F_SETFD, FD_CLOEXEC) == 0);
    SAY(fcntl(closed, F_SETLK, &whole));
    SAY(fcntl(both, F_SETLK, &whole));
    SAY(fcntl(left, F_SETLK, &whole));
    SAY(execl("/nonexistent/program", "program", NULL));
    look("an exec failed", "closed");
    look("an exec failed", "both");
    fflush(stdout);
    execl(self, self, "after_exec", ".", NULL);
    NEED(!"exec");
}

/* The uses of a descriptor that is only a path. */
static void paths_only(void) {
    char buffer[64];
    struct stat status;
    struct statfs space;
    struct statx wide;
    int file = make("file", "text");
    close(file);
    int fd = open("file", O_PATH), dir = open(".", O_PATH | O_DIRECTORY);
    NEED(fd >= 0 && dir >= 0);
    SAY(read(fd, buffer, 1));
    SAY(write(fd, "x", 1));
    SAY(pread(fd, buffer, 1, 0));
    SAY(pwrite(fd, "x", 1, 0));
    SAY(lseek(fd, 0, SEEK_SET));
    SAY(fchmod(fd, 0600));
    SAY(fchown(fd, 0, 0));
    SAY(fsetxattr(fd, "user.a", "1", 1, 0));
    SAY(fgetxattr(fd, "user.a", buffer, sizeof buffer));
    SAY(flistxattr(fd, buffer, sizeof buffer));
    SAY(fremovexattr(fd, "user.a"));
    SAY(futimens(fd, NULL));
    SAY(posix_fadvise(fd, 0, 0, POSIX_FADV_NORMAL));
    SAY(readahead(fd, 0, 1));
    SAY(fsync(fd));
    SAY(fdatasync(fd));
    SAY(syncfs(fd));
    SAY(sync_file_range(fd, 0, 0, 7));
    SAY(ftruncate(fd, 0));
    SAY(ftruncate(fd, -1));
    SAY(fallocate(fd, 0, 0, 1));
    SAY(fallocate(fd, 0, -1, 0));
    SAY(flock(fd, LOCK_SH));
    SAY(fcntl(fd, F_SETLK, &whole));
    SAY(fcntl(fd, F_SETFL, O_APPEND));
    SAY(fcntl(fd, F_GETOWN));
    SAY(fcntl(fd, F_GETLEASE));
    SAY(fcntl(fd, F_GETFL) & O_PATH);
    SAY(ioctl(fd, FIONREAD, buffer));
    SAY(ioctl(fd, FIOCLEX));
    SAY(syscall(SYS_getdents64, dir, buffer, sizeof buffer));
    TRY(mmap(NULL, 1, PROT_READ, MAP_PRIVATE, fd, 0) == MAP_FAILED ? -1 : 0);
    struct pollfd asked = {fd, POLLIN, 0};
    SAY(poll(&asked, 1, 0));
    SAY(asked.revents & POLLNVAL);
    fd_set set;
    FD_ZERO(&set);
    FD_SET(fd, &set);
    SAY(select(fd + 1, &set, NULL, NULL, NULL));
    SAY(fstat(fd, &status));
    SAY(fstatfs(fd, &space));
    SAY(statx(fd, "", AT_EMPTY_PATH, STATX_ALL, &wide));
    SAY(fchownat(fd, "", 0, 0, AT_EMPTY_PATH));
    SAY(utimensat(fd, "", NULL, AT_EMPTY_PATH));
    SAY(syscall(452 /* fchmodat2 */, fd, "", 0640, AT_EMPTY_PATH));
    SAY(faccessat(fd, "", R_OK, AT_EMPTY_PATH));
    SAY(fchdir(fd));
    SAY(fchdir(dir));
    TRY(dup(fd));
    SAY(openat(fd, "x", O_RDONLY));
    SAY(fcntl(fd, F_GETFD));
    int pipes[2], epoll = epoll_create1(0), link;
    NEED(pipe(pipes) == 0 && epoll >= 0 && symlink("none", "link") == 0);
    NEED((link = open("link", O_PATH | O_NOFOLLOW)) >= 0);
    struct iovec into = {buffer, 1};
    struct epoll_event event = {EPOLLIN};
    struct timespec no_time[2] = {{0, 2000000000}, {0, 0}}, unchanged[2] = {{0, UTIME_OMIT}, {0, UTIME_OMIT}};
    SAY(fsetxattr(fd, "user.a", NULL, 0, 99));
    SAY(futimens(fd, no_time));
    SAY(futimens(fd, unchanged));
    SAY(preadv2(fd, &into, 1, 0, 0x1000));
    SAY(splice(fd, NULL, pipes[1], NULL, 1, 0));
    SAY(splice(pipes[0], NULL, fd, NULL, 1, SPLICE_F_NONBLOCK));
    SAY(tee(fd, pipes[1], 1, 0));
    SAY(vmsplice(fd, &into, 1, 0));
    SAY(flock(fd, LOCK_MAND | LOCK_READ));
    SAY(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event));
    SAY(syscall(SYS_getdents, dir, buffer, sizeof buffer));
    SAY(recv(fd, buffer, 1, 0));
    SAY(connect(fd, NULL, 0));
    SAY(faccessat(link, "", F_OK, AT_EMPTY_PATH));
    SAY(syscall(439 /* faccessat2 */, link, "", X_OK, AT_EMPTY_PATH));
    snprintf(buffer, sizeof buffer, "/proc/self/fd/%d", fd);
    SAY(truncate(buffer, 3));
    SAY((fstat(fd, &status), status.st_size));
    SAY(truncate((snprintf(buffer, sizeof buffer, "/proc/self/fd/%d", dir), buffer), 3));
    NEED(unlink("file") == 0);
    SAY(faccessat(fd, "", R_OK, AT_EMPTY_PATH));
}

static void fchdir_asks_for_search(void) {
    NEED(mkdir("closed", 0755) == 0 && mkdir("closed/in", 0755) == 0);
    int path = open("closed", O_PATH), dir = open("closed", O_RDONLY);
    NEED(path >= 0 && dir >= 0 && chmod("closed", 0644) == 0);
    SAY(fchdir(dir));
    SAY(chdir(".."));
    CHILD {
        become(65534);
        SAY(fchdir(path));
        SAY(fchdir(dir));
        SAY(chdir("closed"));
    }
}

static long open2(int dir, const char *path, unsigned long long flags, unsigned long long resolve) {
    struct open_how how = {.flags = flags, .resolve = resolve};
    long answer;
    /* While anything is renamed or mounted on the machine, Linux asks for another attempt at a walk by `..`. */
    for (int attempts = 0; attempts < 1000; attempts++) {
        answer = syscall(SYS_openat2, dir, path, &how, sizeof how);
        if (answer >= 0 || errno != EAGAIN || resolve & RESOLVE_CACHED) break;
    }
    return answer;
}

static long sized(size_t size, unsigned long long extra) {
    struct { struct open_how how; unsigned long long extra; } how = {{.flags = O_RDONLY}, extra};
    return syscall(SYS_openat2, AT_FDCWD, "file", &how, size);
}

static long moded(unsigned long long flags, unsigned long long mode) {
    struct open_how how = {.flags = flags, .mode = mode};
    return syscall(SYS_openat2, AT_FDCWD, "moded", &how, sizeof how);
}

static void restricted_walks(void) {
    close(make("file", "text"));
    NEED(mkdir("a", 0755) == 0 && mkdir("a/b", 0755) == 0);
    close(make("a/b/deep", "deep"));
    NEED(symlink("a/b", "to-dir") == 0 && symlink("file", "to-file") == 0 && symlink("/etc", "out") == 0);
    NEED(symlink("../..", "a/b/up") == 0 && symlink("../../..", "a/b/above") == 0 && symlink("/b/deep", "a/root") == 0);
    int here = open(".", O_PATH | O_DIRECTORY), a = open("a", O_RDONLY | O_DIRECTORY);
    NEED(here >= 0 && a >= 0);
    TRY(open2(AT_FDCWD, "file", O_RDONLY, 0));
    TRY(open2(here, "a/b/deep", O_RDONLY, RESOLVE_NO_SYMLINKS));
    TRY(open2(here, "to-dir/deep", O_RDONLY, RESOLVE_NO_SYMLINKS));
    TRY(open2(here, "to-file", O_RDONLY, RESOLVE_NO_SYMLINKS));
    TRY(open2(here, "to-file", O_PATH | O_NOFOLLOW, RESOLVE_NO_SYMLINKS));
    TRY(open2(here, "to-file", O_RDONLY | O_CREAT, RESOLVE_NO_SYMLINKS));
    TRY(open2(here, "to-file", O_RDONLY, RESOLVE_NO_MAGICLINKS));
    TRY(open2(here, "a/b/../../file", O_RDONLY, RESOLVE_BENEATH));
    TRY(open2(a, "../file", O_RDONLY, RESOLVE_BENEATH));
    TRY(open2(a, "b/../../file", O_RDONLY, RESOLVE_BENEATH));
    TRY(open2(a, "b/deep", O_RDONLY, RESOLVE_BENEATH));
    TRY(open2(a, "b/up/file", O_RDONLY, RESOLVE_BENEATH));
    TRY(open2(here, "a/b/up/file", O_RDONLY, RESOLVE_BENEATH));
    TRY(open2(here, "a/b/above", O_RDONLY, RESOLVE_BENEATH));
    TRY(open2(here, "out/passwd", O_RDONLY, RESOLVE_BENEATH));
    TRY(open2(here, "to-dir/deep", O_RDONLY, RESOLVE_BENEATH));
    TRY(open2(here, "/file", O_RDONLY, RESOLVE_BENEATH));
    TRY(open2(a, "..", O_RDONLY, RESOLVE_BENEATH));
    TRY(open2(a, "..", O_RDWR | O_CREAT, RESOLVE_BENEATH));
    TRY(open2(a, "b/..", O_RDWR | O_CREAT, RESOLVE_BENEATH));
    TRY(open2(a, "..", O_RDWR | O_CREAT, RESOLVE_IN_ROOT));
    TRY(open2(a, ".", O_RDONLY, RESOLVE_BENEATH));
    TRY(open2(a, "new", O_RDWR | O_CREAT, RESOLVE_BENEATH));
    TRY(open2(a, "../new", O_RDWR | O_CREAT, RESOLVE_BENEATH));
    TRY(open2(a, "/b/deep", O_RDONLY, RESOLVE_IN_ROOT));
    TRY(open2(a, "../../b/deep", O_RDONLY, RESOLVE_IN_ROOT));
    TRY(open2(a, "root", O_RDONLY, RESOLVE_IN_ROOT));
    TRY(open2(a, "b/above/b/deep", O_RDONLY, RESOLVE_IN_ROOT));
    TRY(open2(a, "/", O_RDONLY, RESOLVE_IN_ROOT));
    TRY(open2(a, "..", O_RDONLY, RESOLVE_IN_ROOT));
    TRY(open2(a, "/file", O_RDONLY, RESOLVE_IN_ROOT));
    TRY(open2(here, "out/passwd", O_RDONLY, RESOLVE_IN_ROOT));
    TRY(open2(a, "root", O_RDONLY, RESOLVE_IN_ROOT | RESOLVE_NO_SYMLINKS));
    TRY(open2(here, "a/b/deep", O_RDONLY, RESOLVE_NO_XDEV));
    TRY(open2(here, "out/passwd", O_RDONLY, RESOLVE_NO_XDEV));
    TRY(open2(here, "file", O_RDONLY, RESOLVE_BENEATH | RESOLVE_IN_ROOT));
    TRY(open2(here, "file", O_RDONLY, 0x40));
    TRY(open2(here, "file", O_RDWR | O_CREAT, RESOLVE_CACHED));
    TRY(open2(here, "file", 1ULL << 40, 0));
    TRY(open2(here, "file", 0x80000000, 0));
    TRY(open2(here, "file", O_PATH | O_RDWR, 0));
    TRY(open2(here, "file", O_PATH | O_CLOEXEC, 0));
    TRY(open2(here, "", O_RDONLY, RESOLVE_BENEATH));
    TRY(open2(999, "file", O_RDONLY, RESOLVE_BENEATH));
    TRY(sized(0, 0));
    TRY(sized(23, 0));
    TRY(sized(24, 1));
    TRY(sized(32, 0));
    TRY(sized(32, 1));
    TRY(sized(5000, 0));
    char path[4200], cwd[4096];
    NEED(getcwd(cwd, sizeof cwd));
    snprintf(path, sizeof path, "%s/a/b/deep", cwd);
    TRY(open2(AT_FDCWD, path, O_RDONLY, RESOLVE_NO_XDEV));
    TRY(open2(AT_FDCWD, path, O_RDONLY, RESOLVE_NO_MAGICLINKS));
    snprintf(path, sizeof path, "/proc/self/fd/%d/b/deep", a);
    errno = 0, say("by a magic link", open2(AT_FDCWD, path, O_RDONLY, 0) < 0 ? -1 : 0);
    errno = 0, say("by none", open2(AT_FDCWD, path, O_RDONLY, RESOLVE_NO_MAGICLINKS));
    errno = 0, say("by no link", open2(AT_FDCWD, path, O_RDONLY, RESOLVE_NO_SYMLINKS));
    errno = 0, say("on one file system", open2(AT_FDCWD, path, O_RDONLY, RESOLVE_NO_XDEV));
    TRY(moded(O_RDWR, 0644));
    TRY(moded(O_RDWR | O_CREAT, 0644));
    TRY(moded(O_RDWR | O_CREAT, 0100644));
}

static void arguments(void) {
    struct statx wide;
    int fd = make("file", "0123456789"), read_only = open("file", O_RDONLY), dir = open(".", O_RDONLY), pipes[2];
    int write_only = open("file", O_WRONLY);
    NEED(read_only >= 0 && dir >= 0 && write_only >= 0 && pipe(pipes) == 0 && symlink("file", "link") == 0);
    SAY(statx(AT_FDCWD, "file", 0, STATX_ALL, &wide));
    SAY(statx(AT_FDCWD, "file", 0x8, STATX_ALL, &wide));
    SAY(statx(AT_FDCWD, "file", 0x10000, STATX_ALL, &wide));
    SAY(statx(AT_FDCWD, "file", AT_STATX_FORCE_SYNC, STATX_ALL, &wide));
    SAY(statx(AT_FDCWD, "file", AT_STATX_DONT_SYNC | AT_NO_AUTOMOUNT, STATX_ALL, &wide));
    SAY(statx(AT_FDCWD, "file", AT_STATX_SYNC_TYPE, STATX_ALL, &wide));
    SAY(statx(AT_FDCWD, "file", 0, 0x80000000, &wide));
    SAY(statx(AT_FDCWD, "none", 0, 0x80000000, &wide));
    SAY(statx(AT_FDCWD, "", 0, STATX_ALL, &wide));
    SAY(syscall(SYS_newfstatat, AT_FDCWD, "file", &wide, 0x8));
    SAY(sync_file_range(fd, 0, 0, 0));
    SAY(sync_file_range(fd, 0, 0, 7));
    SAY(sync_file_range(fd, 0, 0, 8));
    SAY(sync_file_range(fd, -1, 0, 7));
    SAY(sync_file_range(fd, 0, -1, 7));
    SAY(sync_file_range(fd, 1, 0x7fffffffffffffff, 7));
    SAY(sync_file_range(dir, 0, 0, 7));
    SAY(linkat(AT_FDCWD, "file", AT_FDCWD, "hard", 0x8));
    SAY(linkat(AT_FDCWD, "none", AT_FDCWD, "hard", AT_SYMLINK_NOFOLLOW));
    SAY(linkat(AT_FDCWD, "none", AT_FDCWD, "hard", 0));
    SAY(linkat(AT_FDCWD, "file", AT_FDCWD, "hard", 0));
    SAY(linkat(AT_FDCWD, "file", AT_FDCWD, "hard", 0));
    SAY(linkat(AT_FDCWD, "none", AT_FDCWD, "hard", 0));
    SAY(linkat(AT_FDCWD, "link", AT_FDCWD, "followed", AT_SYMLINK_FOLLOW));
    SAY(linkat(fd, "", AT_FDCWD, "by-descriptor", 0));
    SAY(linkat(fd, "", AT_FDCWD, "by-descriptor", AT_EMPTY_PATH));
    SAY(linkat(dir, "", AT_FDCWD, "by-descriptor-2", AT_EMPTY_PATH));
    SAY(linkat(AT_FDCWD, "", AT_FDCWD, "by-descriptor-2", AT_EMPTY_PATH));
    SAY(linkat(AT_FDCWD, "file", AT_FDCWD, "/dev/hearth-none", 0));
    SAY(linkat(AT_FDCWD, "none", AT_FDCWD, "/dev/hearth-none", 0));
    SAY(linkat(AT_FDCWD, "file", AT_FDCWD, "/dev/null", 0));
    SAY(linkat(AT_FDCWD, "file", AT_FDCWD, "/dev/hearth-none/new", 0));
    SAY(linkat(AT_FDCWD, "/proc/none", AT_FDCWD, "new", 0));
    SAY(linkat(AT_FDCWD, "/proc/uptime", AT_FDCWD, "new", 0));
    SAY(linkat(AT_FDCWD, "/proc/uptime", AT_FDCWD, "hard", 0));
    SAY(linkat(AT_FDCWD, "/proc/uptime", AT_FDCWD, "none/new", 0));
    SAY(renameat2(AT_FDCWD, "none", AT_FDCWD, "new", 8));
    SAY(renameat2(AT_FDCWD, "none", AT_FDCWD, "new", RENAME_NOREPLACE | RENAME_EXCHANGE));
    SAY(renameat2(AT_FDCWD, "none", AT_FDCWD, "new", RENAME_WHITEOUT | RENAME_EXCHANGE));
    SAY(renameat2(AT_FDCWD, "none", AT_FDCWD, "new", RENAME_WHITEOUT));
    SAY(renameat2(AT_FDCWD, "", AT_FDCWD, "new", 8));
    SAY(renameat2(AT_FDCWD, "", AT_FDCWD, "new", 0));
    SAY(renameat2(AT_FDCWD, "file", AT_FDCWD, "/proc/new", 8));
    SAY(renameat2(AT_FDCWD, "file", AT_FDCWD, "/proc/new", 0));
    SAY(renameat2(AT_FDCWD, "none", AT_FDCWD, "/proc/new", 0));
    SAY(renameat2(AT_FDCWD, "/proc/uptime", AT_FDCWD, "new", 0));
    SAY(renameat2(AT_FDCWD, "none/none", AT_FDCWD, "/proc/new", 0));
#define MAP(bytes, protection, flags, fd, at) \
    (errno = 0, say("mmap " #bytes " " #protection " " #flags " " #fd " " #at, \
        mmap(NULL, bytes, protection, flags, fd, at) == MAP_FAILED ? -1 : 0))
    MAP(0, PROT_READ, MAP_PRIVATE, fd, 0);
    MAP(10, PROT_READ, MAP_PRIVATE, fd, 100);
    MAP(10, PROT_READ, 0, fd, 0);
    MAP(10, PROT_READ, MAP_SHARED | MAP_PRIVATE, write_only, 0);
    MAP(10, PROT_READ, MAP_PRIVATE, write_only, 0);
    MAP(10, PROT_READ, MAP_SHARED, write_only, 0);
    MAP(0, PROT_READ, MAP_PRIVATE, write_only, 0);
    MAP(10, PROT_READ | PROT_WRITE, MAP_SHARED, read_only, 0);
    MAP(10, PROT_READ | PROT_WRITE, MAP_PRIVATE, read_only, 0);
    MAP(10, PROT_READ, MAP_PRIVATE, dir, 0);
    MAP(10, PROT_READ, MAP_SHARED, dir, 0);
    MAP(10, PROT_READ, MAP_SHARED_VALIDATE | 0x8000000, read_only, 0);
    MAP(~0UL, PROT_READ, MAP_PRIVATE, fd, 0);
    MAP(~0UL - 8191, PROT_READ, MAP_PRIVATE, fd, 0);
    MAP(4096 * 4, PROT_READ, MAP_PRIVATE, fd, ~4095L);
    MAP(10, PROT_READ, MAP_PRIVATE, 999, 0);
    MAP(10, PROT_READ, MAP_SHARED_VALIDATE | MAP_SYNC, read_only, 0);
    MAP(10, PROT_READ, MAP_PRIVATE | MAP_HUGETLB, fd, 0);
    MAP(10, PROT_READ, MAP_PRIVATE | MAP_GROWSDOWN, fd, 0);
    MAP(10, PROT_READ | PROT_GROWSDOWN, MAP_PRIVATE, fd, 0);
    MAP(4096, PROT_READ, MAP_PRIVATE, fd, 0x7ffffffffffff000);
    struct timespec no_time[2] = {{0, 2000000000}, {0, 0}}, unchanged[2] = {{0, UTIME_OMIT}, {0, UTIME_OMIT}};
    SAY(utimensat(AT_FDCWD, "none", no_time, 0));
    SAY(utimensat(AT_FDCWD, "none", unchanged, 0));
    SAY(utimensat(AT_FDCWD, "file", no_time, 0));
    SAY(setxattr("none", "user.a", "1", 1, 99));
    SAY(readahead(fd, 0, -1));
    SAY(fallocate(read_only, FALLOC_FL_UNSHARE_RANGE, 0, 10));
    SAY(pwrite(fd, &wide, 10, 0x7fffffffffffffff));
    SAY(pread(fd, &wide, 10, 0x7fffffffffffffff));
    SAY(lseek(fd, 0, 99));
    SAY(posix_fadvise(fd, 0, 0, 99));
    SAY(posix_fadvise(fd, 0, -1, 0));
    SAY(posix_fadvise(pipes[0], 0, 0, 0));
    SAY(readahead(write_only, 0, 1));
    SAY(readahead(dir, 0, 1));
    SAY(syscall(SYS_faccessat2, AT_FDCWD, "file", 8, 0));
    SAY(syscall(SYS_faccessat2, AT_FDCWD, "file", R_OK, 0x8));
    SAY(syscall(SYS_unlinkat, AT_FDCWD, "file", 0x8));
    SAY(syscall(SYS_fchownat, AT_FDCWD, "file", 0, 0, 0x8));
    SAY(syscall(SYS_utimensat, AT_FDCWD, "file", NULL, 0x8));
    SAY(syscall(SYS_utimensat, AT_FDCWD, NULL, NULL, 0));
    SAY(syscall(SYS_utimensat, fd, NULL, NULL, AT_SYMLINK_NOFOLLOW));
}

/* Names that are empty, missing, impossible or absent: the first one, the second one, or both. */
static char long_name[257], long_path[4097];
static struct { const char *name, *path; } odd_names[] = {
    {"empty", ""}, {"null", NULL}, {"long", long_name}, {"longest", long_path}, {"file", "file"}, {"file/", "file/"}, {"file/x", "file/x"},
    {"none", "none"}, {"none/", "none/"}, {"none/x", "none/x"}, {"dir/.", "dir/."}, {"loop/x", "loop/x"}, {"pipe", "/dev/null"}};

static void odd_name(const char *call, const char *of, const char *at, const char *name, long answer) {
    char text[128];
    snprintf(text, sizeof text, "%s %s%s%s", call, of, at, name);
    say(text, answer);
}

static void order_of_names(void) {
    memset(long_name, 'n', 256);
    memset(long_path, '/', 4096);
    close(make("file", ""));
    NEED(mkdir("dir", 0755) == 0 && symlink("loop", "loop") == 0);
    int dir = open(".", O_RDONLY | O_DIRECTORY), file = open("file", O_RDONLY), kernel = open("/dev/null", O_RDONLY);
    NEED(dir >= 0 && file >= 0 && kernel >= 0);
    struct { const char *name; int fd; } from[] = {{"", AT_FDCWD}, {"at no descriptor ", 999}, {"at a file ", file}, {"at the kernel's ", kernel}, {"at a directory ", dir}};
    for (int i = 0; i < 13; i++) {
        const char *path = odd_names[i].path, *name = odd_names[i].name;
        odd_name("mknod a link", "", "", name, mknod(path, S_IFLNK, 0));
        odd_name("mknod a directory", "", "", name, mknod(path, S_IFDIR, 0));
        odd_name("mknod no type", "", "", name, mknod(path, 0x3000, 0));
        odd_name("symlink", "", "", name, symlink("", path));
        odd_name("symlink", "to null ", "", name, symlink(NULL, path));
        if (i < 4) {
            odd_name("symlink", "to a target ", "", name, symlink("target", path));
            odd_name("mkdir", "", "", name, mkdir(path, 0755));
            odd_name("mknod", "", "", name, mknod(path, S_IFREG, 0));
            odd_name("unlink", "", "", name, unlink(path));
            odd_name("rmdir", "", "", name, rmdir(path));
        }
        /* Every pair has an error: none is about two names that are fine. */
        for (int j = 0; j < 13; j++)
            for (int k = 0; k < 25; k++) {
                const char *other = odd_names[j].path;
                int one = from[k / 5].fd, two = from[k % 5].fd;
                char at[64];
                snprintf(at, sizeof at, "%s%s to ", from[k / 5].name, name);
                char to[64];
                snprintf(to, sizeof to, "%s%s", from[k % 5].name, odd_names[j].name);
                if ((i == 4 && (j == 4 || j == 7 || j == 12)) || i == 12 && (j == 7 || j == 12)) continue;
                odd_name("linkat", "", at, to, syscall(SYS_linkat, one, path, two, other, 0));
                odd_name("linkat of a file", "", at, to, syscall(SYS_linkat, one, path, two, j == 7 ? "" : other, AT_EMPTY_PATH));
                odd_name("renameat", "", at, to, renameat2(one, path, two, other, 0));
                odd_name("renameat without replacing", "", at, to, renameat2(one, path, two, other, RENAME_NOREPLACE));
            }
    }
}

static void watches(void) {
    int watcher = inotify_init(), pipes[2], file = make("file", ""), path = open("file", O_PATH);
    NEED(watcher >= 0 && path >= 0 && pipe(pipes) == 0 && mkdir("dir", 0755) == 0 && symlink("none", "link") == 0);
    const char *paths[] = {"", "file", "none", "dir", NULL};
    for (int i = 0; i < 5; i++) {
        printf("%s:\n", paths[i] ? paths[i] : "null");
        SAY(inotify_add_watch(999, paths[i], IN_MODIFY));
        SAY(inotify_add_watch(-1, paths[i], IN_MODIFY));
        SAY(inotify_add_watch(path, paths[i], IN_MODIFY));
        SAY(inotify_add_watch(pipes[0], paths[i], IN_MODIFY));
        SAY(inotify_add_watch(watcher, paths[i], 0));
        SAY(inotify_add_watch(999, paths[i], 0));
        SAY(inotify_add_watch(watcher, paths[i], IN_MODIFY | IN_MASK_ADD | IN_MASK_CREATE));
    }
    SAY(inotify_add_watch(file, "file", IN_MODIFY));
    SAY(inotify_add_watch(file, "", IN_MODIFY));
    SAY(inotify_add_watch(watcher, "", IN_MODIFY));
    SAY(inotify_add_watch(watcher, "none", IN_MODIFY));
    SAY(inotify_add_watch(watcher, "link", IN_MODIFY));
    SAY(inotify_add_watch(watcher, "file/x", IN_MODIFY));
    SAY(inotify_add_watch(watcher, "file", IN_MODIFY | IN_ONLYDIR));
    SAY(inotify_add_watch(watcher, "link", IN_MODIFY | IN_ONLYDIR | IN_DONT_FOLLOW));
    NEED(chmod("file", 0) == 0);
    CHILD {
        become(65534);
        SAY(inotify_add_watch(watcher, "file", IN_MODIFY));
    }
}

static char *open_path(int fd);

/* Files that open again by the paths of their descriptors. */
static void reopened(void) {
    struct stat status;
    close(make("file", "text"));
    NEED(mkdir("dir", 0755) == 0 && symlink("file", "link") == 0 && symlink("none", "dangling") == 0);
    int file = open("file", O_PATH), dir = open("dir", O_PATH), link = open("link", O_PATH | O_NOFOLLOW), gone = make("gone", "gone");
    int dangling = open("dangling", O_PATH | O_NOFOLLOW), moved = make("moved", "moved"), again;
    NEED(file >= 0 && dir >= 0 && link >= 0 && dangling >= 0 && unlink("gone") == 0 && rename("moved", "dir/moved") == 0);
    close(make("moved", "another"));
    NEED(mknod("socket", S_IFSOCK | 0644, 0) == 0);
    int socket = open("socket", O_PATH), flags[] = {O_RDONLY, O_WRONLY | O_TRUNC, O_RDWR | O_CREAT, O_RDWR | O_CREAT | O_EXCL, O_NOFOLLOW,
        O_DIRECTORY, O_DIRECTORY | O_NOFOLLOW, O_PATH, O_PATH | O_DIRECTORY, O_TMPFILE | O_RDWR, O_TMPFILE | O_RDONLY, O_CREAT | O_DIRECTORY,
        O_PATH | O_CREAT, O_APPEND | O_WRONLY, 0x80000000 | O_RDWR, 4, O_ACCMODE};
    struct { const char *name; int fd; } files[] = {{"file", file}, {"dir", dir}, {"link", link}, {"dangling", dangling}, {"gone", gone},
        {"moved", moved}, {"socket", socket}};
    for (int i = 0; i < 7; i++)
        for (int j = 0; j < 17; j++) {
            printf("%s %#o ", files[i].name, flags[j]);
            errno = 0;
            again = open(open_path(files[i].fd), flags[j], 0640);
            if (again >= 0) {
                NEED(fstat(again, &status) == 0);
                printf("flags %#o mode %#o size %ld links %ld ", fcntl(again, F_GETFL), status.st_mode, S_ISREG(status.st_mode) ? (long)status.st_size : 0, S_ISREG(status.st_mode) ? (long)status.st_nlink : 0);
                close(again);
            }
            say("open", again < 0 ? -1 : 0);
        }
    again = open(open_path(moved), O_RDWR);
    NEED(again >= 0 && write(again, "MOVED", 5) == 5);
    holds("dir/moved", "MOVED");
    holds("moved", "another");
    again = open(open_path(gone), O_RDWR);
    NEED(again >= 0 && write(again, "again", 5) == 5);
    char got[8] = "";
    SAY(pread(gone, got, sizeof got, 0));
    puts(got);
    CHILD {
        SAY(pread(again, got, sizeof got, 0));
        SAY(pwrite(again, "child", 5, 0));
    }
    SAY(pread(gone, got, sizeof got, 0));
    puts(got);
    SAY(chdir(open_path(file)));
    SAY(chdir(open_path(link)));
    SAY(chdir(open_path(dangling)));
    SAY(chdir(open_path(gone)));
    SAY(chdir(open_path(dir)));
    SAY(access("moved", F_OK));
    SAY(fcntl(open("moved", O_RDONLY), F_GETFL));
    SAY(fcntl(open2(AT_FDCWD, "moved", O_RDONLY, 0), F_GETFL));
    SAY(fcntl(open("moved", O_RDWR | 4 | 0x800000 | 0x40000000), F_GETFL));
    TRY(open2(AT_FDCWD, open_path(dir), O_PATH | O_NOFOLLOW, RESOLVE_NO_MAGICLINKS));
    TRY(open2(AT_FDCWD, open_path(dir), O_RDONLY, RESOLVE_NO_MAGICLINKS));
    SAY(open2(AT_FDCWD, open_path(dir), O_RDWR | O_CREAT | O_EXCL, RESOLVE_NO_MAGICLINKS));
    SAY(open2(AT_FDCWD, "", O_CREAT | O_DIRECTORY, 0));
    SAY(open2(AT_FDCWD, "", O_TMPFILE | O_RDONLY, RESOLVE_CACHED));
    SAY(open("", O_CREAT | O_DIRECTORY, 0644));
    SAY(open("", O_TMPFILE | O_RDONLY, 0644));
}

/* Pipes that open by their descriptor's path. */
static void reopened_pipes(void) {
    char got[8] = "";
    NEED(mkfifo("pipe", 0644) == 0);
    int path = open("pipe", O_PATH);
    NEED(path >= 0);
    SAY(open(open_path(path), O_WRONLY | O_NONBLOCK));
    SAY(open(open_path(path), O_RDONLY | O_DIRECTORY));
    int from = open(open_path(path), O_RDONLY | O_NONBLOCK), to = open(open_path(path), O_WRONLY);
    NEED(from >= 0 && to >= 0);
    SAY(write(to, "text", 4));
    SAY(read(from, got, sizeof got));
    puts(got);
    SAY(open(open_path(path), O_RDONLY | O_CREAT | O_EXCL, 0644));
    SAY(open(open_path(path), O_RDONLY | O_NOFOLLOW));
}

static void order_of_errors(void) {
    static char data[4096], name[258];
    memset(data, 'x', sizeof data);
    memset(name, 'n', 257);
    memcpy(name, "user.", 5);
    int file = make("file", "0123456789"), read_only = open("file", O_RDONLY), write_only = open("file", O_WRONLY), dir = open(".", O_RDONLY);
    int append = open("file", O_WRONLY | O_APPEND), path = open("file", O_PATH), pipes[2], end = 0;
    NEED(read_only >= 0 && write_only >= 0 && dir >= 0 && append >= 0 && path >= 0 && pipe(pipes) == 0);
    struct iovec good = {data, 2}, bad = {(void *)8, 2}, negative = {data, -1}, none = {data, 0}, far[2] = {{data, 0x7fffffffffffffff}, {data, 1}};
    const long last = 0x7fffffffffffffff;
    SAY(read(write_only, NULL, 1));
    SAY(write(read_only, NULL, 1));
    SAY(pread(write_only, data, -1, 0));
    SAY(pwrite(read_only, data, -1, 0));
    SAY(readv(write_only, &negative, 1));
    SAY(writev(read_only, &negative, 1));
    SAY(writev(path, &bad, 1));
    SAY(readv(write_only, &good, 1025));
    SAY(readv(read_only, far, 2));
    SAY(writev(write_only, far, 2));
    SAY(readv(dir, &none, 1));
    SAY(readv(dir, NULL, 0));
    SAY(readv(dir, &good, 1));
    SAY(readv(write_only, &none, 1));
    SAY(syscall(SYS_readv, read_only, &good, 1L << 32));
    SAY(preadv2(path, &good, 1, -2, 0));
    SAY(preadv2(write_only, &good, 1, 0, 0x7fffffff));
    SAY(preadv2(read_only, &good, 1, 0, 0x7fffffff));
    SAY(preadv2(read_only, &none, 1, 0, 0x7fffffff));
    SAY(pwritev2(write_only, &good, 1, 0, RWF_APPEND | 0x20));
    SAY(pwritev2(write_only, &none, 1, 0, 0x7fffffff));
    SAY(pwritev2(write_only, &good, 1, 3, RWF_APPEND));
    SAY(lseek(write_only, 0, SEEK_CUR));
    SAY(pwritev2(write_only, &good, 1, -1, RWF_APPEND | RWF_DSYNC));
    SAY(lseek(write_only, 0, SEEK_CUR));
    holds("file", "0123456789xxxx");
    SAY(preadv2(read_only, &good, 1, 0, RWF_APPEND));
    SAY(lseek(file, last - 1, SEEK_SET));
    SAY(read(file, data, 5));
    SAY(write(file, data, 5));
    SAY(lseek(append, last, SEEK_SET));
    SAY(write(append, data, 1));
    SAY(lseek(file, 0, SEEK_SET));
    off_t at = 0, to = last;
    SAY(sendfile(write_only, read_only, &at, -1));
    SAY(sendfile(read_only, read_only, &at, -1));
    SAY(sendfile(write_only, pipes[0], &at, 1));
    SAY(copy_file_range(read_only, &at, write_only, &to, 1, 0));
    SAY(copy_file_range(read_only, &at, write_only, &to, 0, 0));
    SAY(syscall(SYS_getdents64, read_only, NULL, 100));
    SAY(syscall(SYS_getdents64, path, NULL, 100));
    SAY(syscall(SYS_getdents64, dir, NULL, 100));
    SAY(syscall(SYS_getdents64, dir, data, sizeof data) > 0);
    struct flock odd = {.l_type = 99, .l_whence = SEEK_SET, .l_start = 5, .l_len = last};
    SAY(fcntl(file, F_SETLK, &odd));
    SAY(fcntl(file, F_GETLK, &odd));
    SAY(fcntl(file, F_SETFL, O_ASYNC | O_NONBLOCK | O_RDWR));
    SAY(fcntl(file, F_GETFL));
    SAY(ioctl(file, FIONBIO, &end));
    SAY(fcntl(file, F_GETFL));
    SAY((end = 1, ioctl(file, FIONBIO, &end)));
    SAY(fcntl(file, F_GETFL));
    SAY(ioctl(file, FIONBIO, NULL));
    SAY(ioctl(file, FIOASYNC, &end));
    SAY((end = 0, ioctl(file, FIOASYNC, &end)));
    SAY(ioctl(file, FIOASYNC, NULL));
    SAY(ioctl(file, 2 /* FIGETBSZ */, &end));
    SAY(end);
    SAY(ioctl(dir, FIONREAD, &end));
    SAY(fcntl(file, F_SETLEASE, 99));
    SAY(fcntl(file, F_SETPIPE_SZ, 4096));
    SAY(fcntl(file, F_GETPIPE_SZ));
    SAY(fcntl(dir, F_SETFL, O_DIRECT));
    SAY(setxattr("file", "user.a", "1", 1, XATTR_CREATE | XATTR_REPLACE));
    SAY(setxattr("file", "user.a", "1", 1, 0));
    SAY(setxattr("file", "user.a", "2", 1, XATTR_CREATE | XATTR_REPLACE));
    SAY(getxattr("file", "user.a", data, 1));
    SAY(data[0]);
    SAY(setxattr("file", "", data, 65537, 0));
    SAY(setxattr("none", "", NULL, 1, 0));
    SAY(syscall(452 /* fchmodat2 */, file, NULL, 0600, AT_EMPTY_PATH));
    SAY(syscall(SYS_fchownat, file, NULL, 0, 0, AT_EMPTY_PATH));
    SAY(syscall(SYS_faccessat2, file, NULL, R_OK, AT_EMPTY_PATH));
}

/* Names that are links of the kernel's to open files, with slashes after them. */
static void names_of_descriptors(void) {
    struct stat status;
    char path[64], target[64];
    close(make("file", "text"));
    NEED(mkdir("d", 0755) == 0 && mkdir("d/in", 0755) == 0);
    int fds[] = {open("d", O_RDONLY), open("file", O_RDWR), open("d/in", O_PATH)};
    for (int i = 0; i < 3; i++) {
        NEED(fds[i] >= 0);
        for (int slashes = 0; slashes < 3; slashes++) {
            snprintf(path, sizeof path, "/proc/self/fd/%d%.*s", fds[i], slashes, "//");
            printf("%d, %d slashes:\n", i, slashes);
            SAY(mkdir(path, 0755));
            SAY(mknod(path, S_IFREG | 0644, 0));
            SAY(symlink("target", path));
            SAY(link("file", path));
            SAY(link(path, "new"));
            SAY(linkat(AT_FDCWD, path, AT_FDCWD, "d/in", AT_SYMLINK_FOLLOW));
            SAY(rmdir(path));
            SAY(unlink(path));
            SAY(rename(path, "new"));
            SAY(rename("file", path));
            SAY(rename("none", path));
            SAY(readlink(path, target, sizeof target) > 0);
            SAY(stat(path, &status));
            SAY(lstat(path, &status));
            SAY(S_ISLNK(status.st_mode));
            SAY(access(path, R_OK));
            SAY(chmod(path, 0700));
            TRY(open(path, O_RDONLY));
            TRY(open(path, O_RDONLY | O_NOFOLLOW));
            TRY(open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
            TRY(open(path, O_PATH | O_NOFOLLOW));
            if (i != 1) TRY(open(path, O_RDWR | O_CREAT, 0644));
            SAY(truncate(path, 4));
        }
    }
    SAY(access("d", R_OK));
    CHILD {
        become(1000);
        snprintf(path, sizeof path, "/proc/self/fd/%d/", fds[0]);
        SAY(mkdir(path, 0755));
        SAY(symlink("target", path));
        TRY(open(path, O_RDONLY));
        SAY(stat(path, &status));
    }
}

static long clone_range(int to, int from) {
    struct file_clone_range range = {.src_fd = from, .src_length = 4};
    return ioctl(to, FICLONERANGE, &range);
}

static long share(int from, int count, int reserved) {
    static union { struct file_dedupe_range range; char room[8192]; } request;
    memset(&request, 0, sizeof request);
    request.range.src_length = 4;
    request.range.dest_count = count;
    request.range.reserved1 = reserved;
    return ioctl(from, FIDEDUPERANGE, &request);
}

static void requests(void) {
    static char data[64 << 10];
    long long bytes = -1;
    int file = make("file", "0123456789"), read_only = open("file", O_RDONLY), write_only = open("file", O_WRONLY);
    int append = open("file", O_RDWR | O_APPEND), path = open("file", O_PATH), dir = open(".", O_RDONLY), pipes[2];
    int other = open("/etc/passwd", O_RDONLY), other_dir = open("/etc", O_RDONLY);
    NEED(read_only >= 0 && write_only >= 0 && append >= 0 && path >= 0 && dir >= 0 && pipe(pipes) == 0 && other >= 0);
    NEED(pwrite(file, data, sizeof data, 0) == sizeof data && ftruncate(file, 100000) == 0);
    SAY(ioctl(file, FIOQSIZE, &bytes));
    SAY(bytes);
    SAY(ioctl(file, FIOQSIZE, NULL));
    SAY(ioctl(path, FIOQSIZE, &bytes));
    SAY(ioctl(dir, FIOQSIZE, &bytes));
    SAY(ioctl(file, FICLONE, read_only));
    SAY(ioctl(file, FICLONE, -1));
    SAY(ioctl(file, FICLONE, 999));
    SAY(ioctl(file, FICLONE, write_only));
    SAY(ioctl(read_only, FICLONE, file));
    SAY(ioctl(append, FICLONE, file));
    SAY(ioctl(file, FICLONE, append));
    SAY(ioctl(file, FICLONE, path));
    SAY(ioctl(path, FICLONE, file));
    SAY(ioctl(file, FICLONE, dir));
    SAY(ioctl(dir, FICLONE, file));
    SAY(ioctl(dir, FICLONE, write_only));
    SAY(ioctl(file, FICLONE, pipes[0]));
    SAY(ioctl(file, FICLONE, other));
    SAY(ioctl(file, FICLONE, other_dir));
    SAY(ioctl(read_only, FICLONE, other));
    SAY(clone_range(file, read_only));
    SAY(clone_range(file, -1));
    SAY(clone_range(read_only, file));
    SAY(clone_range(file, dir));
    SAY(clone_range(file, other));
    SAY(ioctl(file, FICLONERANGE, NULL));
    SAY(share(file, 1, 0));
    SAY(share(file, 0, 0));
    SAY(share(file, 1, 1));
    SAY(share(read_only, 1, 0));
    SAY(share(write_only, 1, 0));
    SAY(share(path, 1, 0));
    SAY(share(dir, 1, 0));
    SAY(share(file, 126, 0));
    SAY(share(file, 127, 0));
    SAY(share(dir, 200, 1));
    SAY(ioctl(file, FIDEDUPERANGE, NULL));
    pid_t gone = fork();
    NEED(gone >= 0);
    if (gone == 0) _exit(0);
    NEED(waitpid(gone, NULL, 0) == gone);
    SAY(fcntl(file, F_SETOWN, gone));
    SAY(fcntl(file, F_SETOWN, -gone));
    SAY(fcntl(file, F_SETOWN, 0x7fffffff));
    SAY(fcntl(file, F_SETOWN, -0x7fffffff));
    SAY(fcntl(file, F_SETOWN, (int)0x80000000));
    SAY(fcntl(path, F_SETOWN, gone));
    SAY(fcntl(file, F_SETOWN, getpid()));
    SAY(fcntl(file, F_SETOWN, getppid()));
    SAY(fcntl(file, F_SETOWN, -getpgrp()));
    SAY(fcntl(file, F_SETOWN, 1));
    SAY(fcntl(file, F_SETOWN, 0));
    SAY(fcntl(file, F_GETOWN));
    const long last = 0x7fffffffffffffff;
    struct iovec good = {data, 10}, none = {data, 0};
    SAY(pread(dir, data, 10, last));
    SAY(pread(dir, data, 10, last - 10));
    SAY(pread(dir, data, 10, last - 9));
    SAY(pread(dir, data, 0, last));
    SAY(pread(dir, data, 10, -1));
    SAY(preadv(dir, &good, 1, last));
    SAY(preadv(dir, &good, 1, 0));
    SAY(preadv(dir, &none, 1, last));
    SAY(preadv2(dir, &good, 1, last, 0));
    SAY(read(dir, data, 10));
    SAY(read(dir, data, 0));
    SAY(pread(file, data, 10, last));
    SAY(pread(file, data, 10, last - 10));
    SAY(pwrite(file, data, 10, last));
    SAY(pread(read_only, data, 0, last));
    SAY(pread(write_only, data, 10, last));
}

static void written_from(const char *what, const char *name, long answer) {
    int error = errno;
    struct stat status;
    NEED(stat(name, &status) == 0);
    errno = error;
    say(what, answer);
    printf("%o, %ld bytes, %ld blocks%s\n", status.st_mode, (long)status.st_size, (long)status.st_blocks,
           status.st_mtim.tv_sec == 1000000 ? "" : ", new time");
    struct timespec old[2] = {{1000000}, {1000000}};
    NEED(chmod(name, 06777) == 0 && utimensat(AT_FDCWD, name, old, 0) == 0);
}

#define FROM(call) (errno = 0, written_from(#call, "f", (long)(call)))

/* Writes from memory that cannot be read, by the owner of a file. */
static void unreadable_memory(void) {
    const long last = 0x7fffffffffffffff;
    char *bad = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *beyond = (char *)-4096;
    NEED(bad != MAP_FAILED && mprotect(bad + 4096, 4096, PROT_NONE) == 0);
    char *half = bad + 4090;
    bad += 4096;
    NEED(chmod(".", 0777) == 0);
    CHILD {
        become(1000);
        int fd = make("f", "text"), append = open("f", O_WRONLY | O_APPEND), reads = open("f", O_RDONLY), pipes[2];
        NEED(append >= 0 && reads >= 0 && pipe(pipes) == 0);
        FROM(0);
        FROM(write(fd, bad, 10));
        FROM(write(fd, NULL, 10));
        FROM(write(fd, bad, 0));
        FROM(write(append, bad, 10));
        FROM(pwrite(fd, bad, 10, 2));
        FROM(pwrite(fd, bad, 10, last - 5));
        FROM(pwrite(fd, bad, 10, -1));
        FROM(write(reads, bad, 10));
        FROM(write(fd, beyond, 10));
        FROM(write(fd, bad, last));
        FROM(write(fd, half, 10));
        struct iovec two[2] = {{bad, 3}, {bad, 4}}, empty = {bad, 0}, far[2] = {{bad, 3}, {beyond, 4}};
        FROM(writev(fd, two, 2));
        FROM(writev(append, two, 2));
        FROM(writev(fd, &empty, 1));
        FROM(writev(fd, far, 2));
        FROM(writev(fd, NULL, 1));
        FROM(pwritev(fd, two, 2, 1));
        FROM(pwritev(fd, two, 2, last - 3));
        FROM(pwritev2(fd, two, 2, 1, RWF_APPEND));
        FROM(pwritev2(fd, two, 2, -1, 0));
        SAY(lseek(fd, 0, SEEK_CUR));
        struct rlimit limit = {4, 4};
        NEED(signal(SIGXFSZ, SIG_IGN) != SIG_ERR && setrlimit(RLIMIT_FSIZE, &limit) == 0);
        FROM(pwrite(fd, bad, 10, 4));
        FROM(pwrite(fd, bad, 10, 3));
    }
}

/* Writes at an offset of a file that is open to append. */
static void writes_without_appending(void) {
    char got[32] = "";
    int fd = make("file", "0123456789"), append = open("file", O_WRONLY | O_APPEND);
    struct iovec text = {"xx", 2};
    NEED(append >= 0);
    SAY(pwritev2(append, &text, 1, 3, 0x20 /* RWF_NOAPPEND */));
    SAY(lseek(append, 1, SEEK_SET));
    SAY(pwritev2(append, &text, 1, -1, 0x20));
    SAY(lseek(append, 0, SEEK_CUR));
    NEED(pread(fd, got, sizeof got - 1, 0) >= 0);
    puts(got);
}

static void limit_descriptors(rlim_t count) {
    struct rlimit limit;
    NEED(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    limit.rlim_cur = count;
    NEED(setrlimit(RLIMIT_NOFILE, &limit) == 0);
}

static void few_descriptors(void) {
    limit_descriptors(12);
    int count = 0;
    while (open("f", O_RDWR | O_CREAT, 0644) >= 0) count++;
    SAY(count);
    TRY(open("g", O_RDWR | O_CREAT, 0644));
    SAY(close_range(5, 99, 0));
    SAY(access("g", F_OK));
    CHILD {
        int fd = make("h", "of the child");
        SAY(fd);
    }
    pid_t child;
    char *arguments[] = {"sh", "-c", "echo spawned > spawned; cat h > copied; exec 9>&-", NULL};
    SAY(posix_spawn(&child, "/bin/sh", NULL, NULL, arguments, environ));
    wait_for(child);
    holds("copied", "of the child");
    SAY(access("spawned", F_OK));
    limit_descriptors(3);
    TRY(open("f", O_RDONLY));
    char byte;
    SAY(pread(3, &byte, 1, 0));
    limit_descriptors(5);
    char *nothing[] = {"true", NULL};
    SAY(close(4));
    SAY(posix_spawn(&child, "/bin/true", NULL, NULL, nothing, environ));
    wait_for(child);
}

/* The limit is there before the program begins. */
static void few_from_the_start(void) {
    limit_descriptors(12);
    fflush(stdout);
    execl(self, self, "few_descriptors", ".", NULL);
    NEED(!"exec");
}

/* The limit can never be raised again. */
static void few_for_good(void) {
    struct rlimit limit = {12, 12};
    NEED(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    int fd = make("f", "text");
    TRY(dup(fd));
    TRY(open("f", O_RDONLY));
    TRY(open(".", O_RDONLY));
    SAY(pwrite(fd, "x", 1, 0));
    holds("f", "xext");
}

static void limit_of_file_size(void) {
    struct rlimit limit = {1000, RLIM_INFINITY};
    int fd = open("f", O_RDWR | O_CREAT, 0644);
    static char data[2000];
    NEED(fd >= 0);
    CHILD {
        NEED(setrlimit(RLIMIT_FSIZE, &limit) == 0);
        SAY(write(fd, data, sizeof data));
        SAY(write(fd, data, 1));
    }
    CHILD {
        signal(SIGXFSZ, SIG_IGN);
        NEED(setrlimit(RLIMIT_FSIZE, &limit) == 0);
        SAY(write(fd, data, 1));
        SAY(pwrite(fd, data, 600, 600));
        SAY(pwrite(fd, data, 600, 1000));
        SAY(pwrite(fd, data, 0, 5000));
        SAY(ftruncate(fd, 1000));
        SAY(ftruncate(fd, 1001));
        SAY(truncate("f", 1001));
        SAY(truncate("f", 900));
        SAY(fallocate(fd, 0, 500, 600));
        SAY(fallocate(fd, 0, 500, 500));
        int end = open("f", O_WRONLY | O_APPEND);
        SAY(write(end, data, 10));
        SAY(ftruncate(fd, 990));
        SAY(write(end, data, 20));
        limit.rlim_cur = RLIM_INFINITY;
        NEED(setrlimit(RLIMIT_FSIZE, &limit) == 0);
        SAY(write(end, data, 20));
        SAY(ftruncate(fd, 0));
    }
    CHILD {
        NEED(setrlimit(RLIMIT_FSIZE, &limit) == 0);
        SAY(truncate("f", 2000));
    }
    CHILD {
        NEED(setrlimit(RLIMIT_FSIZE, &limit) == 0);
        execl("/bin/dd", "dd", "if=/dev/zero", "of=by-dd", "bs=600", "count=2", "status=none", NULL);
    }
    struct stat status;
    NEED(stat("by-dd", &status) == 0);
    SAY(status.st_size);
}

static void copies(void) {
    char got[64] = "";
    int from = make("from", "0123456789"), to = make("to", ""), pipes[2], dir = open(".", O_RDONLY);
    int read_only = open("from", O_RDONLY), append = open("to", O_WRONLY | O_APPEND);
    NEED(from >= 0 && to >= 0 && pipe(pipes) == 0 && dir >= 0 && read_only >= 0 && append >= 0);
    loff_t at = 2, into = 5;
    SAY(lseek(from, 4, SEEK_SET));
    SAY(copy_file_range(from, NULL, to, NULL, 3, 0));
    SAY(lseek(from, 0, SEEK_CUR));
    SAY(lseek(to, 0, SEEK_CUR));
    SAY(copy_file_range(from, &at, to, &into, 100, 0));
    SAY(at);
    SAY(into);
    SAY(pread(to, got, sizeof got, 0));
    SAY(memcmp(got, "456\0\00023456789", 13));
    SAY(copy_file_range(from, &at, to, &into, 100, 0));
    SAY(copy_file_range(from, NULL, to, NULL, 0, 0));
    SAY(copy_file_range(from, NULL, to, NULL, 1, 1));
    SAY(copy_file_range(read_only, NULL, append, NULL, 1, 0));
    SAY(copy_file_range(from, NULL, read_only, NULL, 1, 0));
    SAY(copy_file_range(append, NULL, to, NULL, 1, 0));
    SAY(copy_file_range(dir, NULL, to, NULL, 1, 0));
    SAY(copy_file_range(from, NULL, dir, NULL, 1, 0));
    SAY(copy_file_range(from, NULL, pipes[1], NULL, 1, 0));
    SAY(copy_file_range(pipes[0], NULL, to, NULL, 1, 0));
    at = 0, into = 2;
    SAY(copy_file_range(from, &at, from, &into, 5, 0));
    into = 10;
    SAY(copy_file_range(from, &at, from, &into, 5, 0));
    at = -1;
    SAY(copy_file_range(from, &at, to, &into, 5, 0));
    SAY(copy_file_range(from, (loff_t *)8, to, &into, 5, 0));
    SAY(copy_file_range(999, NULL, to, NULL, 5, 0));
    off_t begin = 3;
    SAY(sendfile(pipes[1], from, &begin, 4));
    SAY(begin);
    SAY(read(pipes[0], got, sizeof got));
    SAY(memcmp(got, "3456", 4));
    SAY(lseek(from, 7, SEEK_SET));
    SAY(sendfile(pipes[1], from, NULL, 100));
    SAY(lseek(from, 0, SEEK_CUR));
    SAY(read(pipes[0], got, sizeof got));
    SAY(sendfile(pipes[1], from, NULL, 100));
    SAY(lseek(to, 0, SEEK_SET));
    begin = 0;
    SAY(sendfile(to, from, &begin, 10));
    SAY(lseek(to, 0, SEEK_CUR));
    SAY(pread(to, got, 10, 0));
    SAY(memcmp(got, "0123456789", 10));
    SAY(sendfile(to, from, &begin, 0));
    SAY(sendfile(append, from, &begin, 10));
    SAY(sendfile(read_only, from, &begin, 10));
    SAY(sendfile(pipes[1], append, NULL, 10));
    SAY(sendfile(pipes[1], dir, NULL, 10));
    begin = -1;
    SAY(sendfile(pipes[1], from, &begin, 10));
    SAY(sendfile(pipes[1], from, (off_t *)8, 10));
    SAY(sendfile(pipes[0], from, NULL, 10));
    int kernel = open("/proc/self/exe", O_RDONLY);
    begin = 1;
    SAY(lseek(to, 0, SEEK_SET));
    SAY(sendfile(to, kernel, &begin, 3));
    SAY(pread(to, got, 3, 0));
    SAY(memcmp(got, "ELF", 3));
    begin = 1;
    SAY(sendfile(to, kernel, &begin, 100000) > 10000);
    SAY(copy_file_range(kernel, NULL, to, NULL, 0, 0));
    int path = open("from", O_PATH);
    SAY(copy_file_range(path, NULL, to, NULL, 1, 0));
    SAY(copy_file_range(from, NULL, path, NULL, 1, 0));
    SAY(sendfile(path, from, NULL, 1));
    SAY(sendfile(pipes[1], path, NULL, 1));
}

static long blocks_of(int fd) {
    struct stat status;
    NEED(fstat(fd, &status) == 0);
    return status.st_blocks;
}

static void blocks(void) {
    static char data[10000];
    int fd = open("f", O_RDWR | O_CREAT, 0644);
    NEED(fd >= 0);
    SAY(ftruncate(fd, 1 << 30));
    SAY(blocks_of(fd));
    SAY(pwrite(fd, data, 4096, 1 << 29));
    SAY(blocks_of(fd));
    SAY(pwrite(fd, data, 100, 5000));
    SAY(pwrite(fd, data, 100, 5100));
    SAY(blocks_of(fd));
    SAY(pwrite(fd, data, 4096, 1 << 29));
    SAY(blocks_of(fd));
    SAY(pwrite(fd, data, sizeof data, 100000));
    SAY(blocks_of(fd));
    SAY(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 1 << 29, 4096));
    SAY(blocks_of(fd));
    SAY(ftruncate(fd, 6000));
    SAY(blocks_of(fd));
    SAY(ftruncate(fd, 0));
    SAY(blocks_of(fd));
    SAY(fallocate(fd, 0, 0, 100000));
    SAY(blocks_of(fd));
    int grows = open("grows", O_WRONLY | O_CREAT | O_APPEND, 0644);
    long wrong = 0;
    for (int i = 1; i <= 300; i++) {
        NEED(write(grows, data, 100) == 100);
        wrong += blocks_of(grows) != (i * 100 + 4095) / 4096 * 8;
    }
    SAY(wrong);
}

/* More than a pool of 256 MiB has nodes of its tree for at a time, and more than any file system has. */
static void large_allocations(void) {
    struct stat status;
    int fd = open("f", O_RDWR | O_CREAT, 0644), other = make("other", "0123456789");
    NEED(fd >= 0);
    SAY(fallocate(fd, 0, 5000, 150 << 20));
    SAY((fstat(fd, &status), status.st_size));
    SAY(blocks_of(fd));
    SAY(fallocate(other, 0, 0, 1L << 50));
    SAY(fallocate(other, FALLOC_FL_KEEP_SIZE, 5000, 0x7fffffffffffffff - 5000));
    SAY((fstat(other, &status), status.st_size));
    SAY(blocks_of(other));
    CHILD SAY(mkdir("after", 0755));
    SAY(ftruncate(fd, 0));
    SAY(blocks_of(fd));
}

static void zeroed_ranges(void) {
    char got[16384];
    static char data[16384];
    memset(data, 'x', sizeof data);
    int fd = open("f", O_RDWR | O_CREAT, 0644);
    struct stat status;
    NEED(fd >= 0 && write(fd, data, 10000) == 10000);
    SAY(fallocate(fd, FALLOC_FL_ZERO_RANGE, 1000, 5000));
    SAY(pread(fd, got, sizeof got, 0));
    int wrong = 0;
    for (int i = 0; i < 10000; i++) wrong += got[i] != (i >= 1000 && i < 6000 ? 0 : 'x');
    SAY(wrong);
    SAY(fallocate(fd, FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE, 9000, 5000));
    SAY((fstat(fd, &status), status.st_size));
    SAY(fallocate(fd, FALLOC_FL_ZERO_RANGE, 9000, 5000));
    SAY((fstat(fd, &status), status.st_size));
    SAY(pread(fd, got, sizeof got, 0));
    for (int i = 0; i < 14000; i++) wrong += got[i] != (i >= 6000 && i < 9000 || i < 1000 ? 'x' : 0);
    SAY(wrong);
    SAY(fallocate(fd, FALLOC_FL_ZERO_RANGE, 0, 0));
    SAY(fallocate(fd, FALLOC_FL_ZERO_RANGE | FALLOC_FL_PUNCH_HOLE, 0, 10));
    SAY(fallocate(open("f", O_RDONLY), FALLOC_FL_ZERO_RANGE, 0, 10));
}

static char *open_path(int fd) {
    static char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return path;
}

/* A path and what it leads to. */
static void show(const char *path) {
    struct stat status;
    if (lstat(path, &status) < 0) {
        printf("%s: %s\n", path, strerrorname_np(errno));
        return;
    }
    printf("%s: %o %d:%d, %ld links, %ld bytes, device %ld\n", path, status.st_mode, status.st_uid, status.st_gid,
           (long)status.st_nlink, S_ISDIR(status.st_mode) ? 0 : (long)status.st_size, (long)status.st_rdev);
}

static void unnamed_files(void) {
    char got[16] = "";
    struct stat status;
    NEED(mkdir("d", 0755) == 0 && mkdir("group", 0777) == 0);
    NEED(chown("group", 0, 300) == 0 && chmod("group", 02777) == 0);
    umask(027);
    int fd = open("d", O_TMPFILE | O_RDWR, 0666);
    NEED(fd >= 0);
    SAY(write(fd, "hello", 5));
    SAY(pread(fd, got, sizeof got, 0));
    SAY((fstat(fd, &status), status.st_nlink));
    SAY((fstat(fd, &status), status.st_mode));
    SAY(rmdir("d"));
    NEED(mkdir("d", 0755) == 0);
    SAY(fsync(fd));
    SAY(fcntl(fd, F_GETFL));
    SAY(linkat(AT_FDCWD, open_path(fd), AT_FDCWD, "d/named", 0));
    SAY(linkat(AT_FDCWD, open_path(fd), AT_FDCWD, "d/named", AT_SYMLINK_FOLLOW));
    holds("d/named", "hello");
    show("d/named");
    SAY((fstat(fd, &status), status.st_nlink));
    SAY(linkat(fd, "", AT_FDCWD, "d/again", AT_EMPTY_PATH));
    show("d/again");
    SAY(linkat(AT_FDCWD, open_path(fd), AT_FDCWD, "d/again", AT_SYMLINK_FOLLOW));
    SAY(unlink("d/named"));
    SAY(unlink("d/again"));
    SAY(linkat(AT_FDCWD, open_path(fd), AT_FDCWD, "d/late", AT_SYMLINK_FOLLOW));
    SAY(close(fd));
    fd = open("d", O_TMPFILE | O_WRONLY | O_EXCL, 0600);
    NEED(fd >= 0);
    SAY(linkat(AT_FDCWD, open_path(fd), AT_FDCWD, "d/named", AT_SYMLINK_FOLLOW));
    SAY(linkat(fd, "", AT_FDCWD, "d/named", AT_EMPTY_PATH));
    close(fd);
    SAY(open("d", O_TMPFILE | O_RDONLY, 0600));
    SAY(open("d", O_TMPFILE | O_RDWR | O_CREAT, 0600));
    SAY(open("d", O_TMPFILE & ~O_DIRECTORY | O_RDWR, 0600));
    close(make("file", ""));
    SAY(open("file", O_TMPFILE | O_RDWR, 0600));
    SAY(open("none", O_TMPFILE | O_RDWR, 0600));
    /* A child has the file too, and may name it when its parent is gone. */
    fd = open("d", O_TMPFILE | O_RDWR, 0644);
    NEED(fd >= 0 && write(fd, "of a child", 10) == 10);
    CHILD {
        SAY(write(fd, "!", 1));
        SAY(linkat(AT_FDCWD, open_path(fd), AT_FDCWD, "d/by-a-child", AT_SYMLINK_FOLLOW));
    }
    holds("d/by-a-child", "of a child!");
    show("d/by-a-child");
    SAY((fstat(fd, &status), status.st_nlink));
    close(fd);
    CHILD {
        become(1000);
        SAY(open("d", O_TMPFILE | O_RDWR, 0600));
        int mine = open("group", O_TMPFILE | O_RDWR, 02775);
        NEED(mine >= 0);
        SAY(linkat(AT_FDCWD, open_path(mine), AT_FDCWD, "d/mine", AT_SYMLINK_FOLLOW));
        SAY(linkat(AT_FDCWD, open_path(mine), AT_FDCWD, "group/mine", AT_SYMLINK_FOLLOW));
        show("group/mine");
    }
    /* A name outside the rights of the mode, and a descriptor that is passed on to a program. */
    fd = open("d", O_TMPFILE | O_RDWR, 0);
    NEED(fd >= 0 && write(fd, "kept", 4) == 4 && fcntl(fd, F_SETFD, 0) == 0);
    char number[16];
    snprintf(number, sizeof number, "%d", fd);
    setenv("UNNAMED", number, 1);
    fflush(stdout);
    execl(self, self, "unnamed_after_exec", ".", NULL);
}

static void unnamed_after_exec(void) {
    int fd = atoi(getenv("UNNAMED"));
    struct stat status;
    SAY((fstat(fd, &status), status.st_nlink));
    SAY(linkat(AT_FDCWD, open_path(fd), AT_FDCWD, "d/after-exec", AT_SYMLINK_FOLLOW));
    show("d/after-exec");
    holds("d/after-exec", "kept");
}

/* Names for open files, by users who did not open them or do not own them. */
static void after_exec_by_another(void) {
    int fd = atoi(getenv("LINKED"));
    SAY(linkat(fd, "", AT_FDCWD, "by-exec", AT_EMPTY_PATH));
    SAY(linkat(AT_FDCWD, open_path(fd), AT_FDCWD, "by-exec", AT_SYMLINK_FOLLOW));
}

static void links_of_open_files(void) {
    NEED(chmod(".", 0777) == 0);
    int fd = make("mine", "text"), dir = open(".", O_RDONLY | O_DIRECTORY);
    NEED(dir >= 0 && fchown(fd, 1000, 1000) == 0);
    SAY(linkat(fd, "", AT_FDCWD, "by-root", AT_EMPTY_PATH));
    CHILD SAY(linkat(fd, "", AT_FDCWD, "by-a-child-of-root", AT_EMPTY_PATH));
    CHILD {
        become(1000);
        SAY(linkat(fd, "", AT_FDCWD, "by-another", AT_EMPTY_PATH));
        SAY(linkat(fd, "", AT_FDCWD, "mine", AT_EMPTY_PATH));
        SAY(linkat(fd, "", AT_FDCWD, "none/name", AT_EMPTY_PATH));
        SAY(linkat(dir, "mine", AT_FDCWD, "by-another", AT_EMPTY_PATH));
        SAY(linkat(dir, "mine", AT_FDCWD, "by-name", 0));
        SAY(linkat(999, "", AT_FDCWD, "by-another", AT_EMPTY_PATH));
        SAY(linkat(AT_FDCWD, open_path(fd), AT_FDCWD, "by-path", AT_SYMLINK_FOLLOW));
        int own = open("mine", O_RDWR);
        NEED(own >= 0);
        SAY(linkat(own, "", AT_FDCWD, "by-its-opener", AT_EMPTY_PATH));
        SAY(syscall(SYS_linkat, own, NULL, AT_FDCWD, "without-a-path", AT_EMPTY_PATH));
        SAY(setresuid(1000, 1000, 1000));
        SAY(linkat(own, "", AT_FDCWD, "by-the-same", AT_EMPTY_PATH));
        CHILD {
            SAY(linkat(own, "", AT_FDCWD, "by-a-child", AT_EMPTY_PATH));
            SAY(linkat(AT_FDCWD, open_path(own), AT_FDCWD, "by-a-child", AT_SYMLINK_FOLLOW));
        }
        int unnamed = open(".", O_TMPFILE | O_RDWR, 0600);
        NEED(unnamed >= 0);
        SAY(linkat(unnamed, "", AT_FDCWD, "unnamed", AT_EMPTY_PATH));
        char number[16];
        snprintf(number, sizeof number, "%d", own);
        setenv("LINKED", number, 1);
        fflush(stdout);
        execl(self, self, "after_exec_by_another", ".", NULL);
    }
}

/* Links that fs.protected_hardlinks refuses, with the setting that the machine has. */
static void links_of_others_files(void) {
    NEED(chmod(".", 0777) == 0);
    close(make("private", ""));
    close(make("readable", ""));
    close(make("shared", ""));
    close(make("setuid", ""));
    close(make("setgid", ""));
    close(make("owned-setuid", ""));
    close(make("secret", ""));
    int unnamed = open(".", O_TMPFILE | O_RDWR, 0600);
    NEED(unnamed >= 0 && chmod("private", 0600) == 0 && chmod("readable", 0644) == 0 && chmod("shared", 0666) == 0);
    NEED(chmod("setuid", 04777) == 0 && chmod("setgid", 02777) == 0 && mkfifo("pipe", 0) == 0);
    NEED(chmod("pipe", 0666) == 0 && symlink("shared", "symlink") == 0 && mkdir("d", 0777) == 0);
    NEED(chown("owned-setuid", 1000, 1000) == 0 && chmod("owned-setuid", 04700) == 0);
    NEED(mkdir("closed", 0755) == 0 && chown("secret", 1000, 1000) == 0 && chmod("secret", 0) == 0);
    CHILD {
        become(1000);
        SAY(link("private", "by-name-1"));
        SAY(link("readable", "by-name-2"));
        SAY(link("shared", "by-name-3"));
        SAY(link("setuid", "by-name-4"));
        SAY(link("setgid", "by-name-5"));
        SAY(link("pipe", "by-name-6"));
        SAY(link("symlink", "by-name-7"));
        SAY(linkat(AT_FDCWD, "symlink", AT_FDCWD, "by-name-8", AT_SYMLINK_FOLLOW));
        SAY(link("d", "by-name-9"));
        SAY(link("owned-setuid", "by-name-10"));
        SAY(link("secret", "by-name-11"));
        SAY(link("private", "shared"));
        SAY(link("private", "closed/name"));
        SAY(link("shared", "closed/name"));
        SAY(link("private", "none/name"));
        SAY(link("private", "name/"));
        SAY(linkat(AT_FDCWD, open_path(unnamed), AT_FDCWD, "unnamed", AT_SYMLINK_FOLLOW));
    }
    SAY(link("private", "by-root"));
    SAY(link("setuid", "by-root-2"));
}

/* Links and files of others in directories to which many may write. */
static void shared_directories(void) {
    static const struct { const char *name; int mode, owner; } directories[] = {
        {"sticky", 01777, 0}, {"of-another", 01777, 2000}, {"group", 01770, 0}, {"open", 0777, 0}, {"plain", 01755, 0}};
    NEED(chmod(".", 0777) == 0);
    close(make("target", "text"));
    NEED(chmod("target", 0666) == 0 && mkdir("sub", 0777) == 0 && symlink("sub", "to-sub") == 0);
    for (size_t i = 0; i < sizeof directories / sizeof *directories; i++) {
        NEED(mkdir(directories[i].name, 0777) == 0 && chdir(directories[i].name) == 0);
        NEED(symlink("../target", "root-link") == 0 && symlink("../target", "link") == 0);
        NEED(symlink("root-link", "twice") == 0 && symlink("../sub", "dir-link") == 0 && symlink("new", "dangling") == 0);
        NEED(lchown("link", 2000, 2000) == 0 && lchown("twice", 1000, 1000) == 0);
        NEED(lchown("dir-link", 2000, 2000) == 0 && lchown("dangling", 2000, 2000) == 0);
        close(make("file", ""));
        close(make("own", ""));
        close(make("root-file", ""));
        NEED(chmod("file", 0666) == 0 && chown("file", 2000, 2000) == 0 && chown("own", 1000, 1000) == 0);
        NEED(chmod("root-file", 0666) == 0 && mknod("socket", S_IFSOCK | 0666, 0) == 0);
        NEED(chmod("socket", 0666) == 0 && chown("socket", 2000, 2000) == 0 && mkdir("sub", 0777) == 0);
        NEED(chdir("..") == 0 && chown(directories[i].name, directories[i].owner, 1000) == 0);
        NEED(chmod(directories[i].name, directories[i].mode) == 0);
    }
    CHILD {
        become(1000);
        for (size_t i = 0; i < sizeof directories / sizeof *directories; i++) {
            struct stat status;
            printf("%s:\n", directories[i].name);
            NEED(chdir(directories[i].name) == 0);
            TRY(open("root-link", O_RDONLY));
            TRY(open("link", O_RDONLY));
            TRY(open("twice", O_RDONLY));
            TRY(open("link", O_RDWR | O_CREAT, 0600));
            TRY(open("link", O_RDONLY | O_NOFOLLOW));
            TRY(open("link", O_RDWR | O_CREAT | O_NOFOLLOW, 0600));
            TRY(open("dangling", O_RDWR | O_CREAT | O_EXCL, 0600));
            TRY(stat("link", &status));
            TRY(lstat("link", &status));
            TRY(stat("dir-link", &status));
            TRY(stat("dir-link/", &status));
            TRY(stat("dir-link/.", &status));
            TRY(open("dir-link/new", O_RDWR | O_CREAT, 0600));
            TRY(open2(AT_FDCWD, "link", O_RDONLY, RESOLVE_NO_SYMLINKS));
            TRY(truncate("link", 4));
            TRY(open("file", O_RDWR));
            TRY(open("file", O_RDWR | O_CREAT, 0600));
            TRY(open("file", O_RDWR | O_CREAT | O_EXCL, 0600));
            TRY(open("own", O_RDWR | O_CREAT, 0600));
            TRY(open("root-file", O_RDWR | O_CREAT, 0600));
            TRY(open("socket", O_RDWR | O_CREAT, 0600));
            TRY(open("sub", O_RDONLY | O_CREAT, 0600));
            NEED(chdir("..") == 0);
        }
        TRY(open("to-sub/any", O_RDWR | O_CREAT, 0600));
    }
    TRY(open("sticky/link", O_RDONLY));
    TRY(open("sticky/file", O_RDWR | O_CREAT, 0600));
}

static long rename_with(const char *from, const char *to, unsigned flags) {
    return renameat2(AT_FDCWD, from, AT_FDCWD, to, flags);
}

static void whiteouts(void) {
    NEED(mkdir("d", 0777) == 0 && mkdir("group", 0777) == 0);
    NEED(chmod(".", 0777) == 0 && chmod("d", 0777) == 0 && chown("group", 0, 300) == 0 && chmod("group", 02777) == 0);
    int open_file = make("a", "text");
    SAY(rename_with("a", "d/b", RENAME_WHITEOUT));
    show("a");
    show("d/b");
    holds("d/b", "text");
    SAY(open("a", O_RDONLY));
    SAY(rename_with("none", "d/b", RENAME_WHITEOUT));
    SAY(rename_with("d/b", "a", RENAME_WHITEOUT | RENAME_NOREPLACE));
    SAY(rename_with("d/b", "a", RENAME_WHITEOUT | RENAME_EXCHANGE));
    SAY(rename_with("d/b", "a", RENAME_WHITEOUT));
    show("a");
    show("d/b");
    SAY(rename_with("a", "c", RENAME_WHITEOUT | RENAME_NOREPLACE));
    show("c");
    NEED(link("c", "c2") == 0);
    SAY(rename_with("c", "c2", RENAME_WHITEOUT));
    show("c");
    SAY(unlink("d/b"));
    SAY(rename_with("d", "e", RENAME_WHITEOUT));
    show("d");
    show("e");
    show(".");
    SAY(rename_with("e", "e/below", RENAME_WHITEOUT));
    CHILD {
        become(1000);
        close(make("e/mine", "mine"));
        SAY(rename_with("e/mine", "group/mine", RENAME_WHITEOUT));
        show("e/mine");
        SAY(rename_with("group/mine", "group/other", RENAME_WHITEOUT));
        show("group/mine");
        SAY(rename_with("c", "e/c", RENAME_WHITEOUT));
        SAY(mknod("e/null", S_IFCHR | 0600, 0));
        show("e/null");
        SAY(mknod("e/device", S_IFCHR | 0600, 0x103));
        SAY(mknod("e/block", S_IFBLK | 0600, 0));
    }
    close(open_file);
}

/* The folder above the root of the tree, and the working directory as a path from there. */
static char above[4096];

static void where(void) {
    char here[4096];
    if (getcwd(here, sizeof here) == NULL)
        puts(strerrorname_np(errno));
    else if (strncmp(here, above, strlen(above)) == 0)
        printf("in .%s\n", here + strlen(above));
    else
        printf("in %s\n", here);
}

static long is_same(const char *one, const char *other) {
    struct stat first, second;
    if (stat(one, &first) < 0 || stat(other, &second) < 0) return -1;
    return first.st_dev == second.st_dev && first.st_ino == second.st_ino;
}

static long has_text(const char *path, const char *text) {
    char got[64];
    int fd = open(path, O_RDONLY);
    if (fd < 0) return -1;
    long bytes = read(fd, got, sizeof got);
    close(fd);
    return bytes == (long)strlen(text) && memcmp(got, text, bytes) == 0;
}

static long leads_to(const char *path, const char *below) {
    char *whole = realpath(path, NULL), wanted[4200];
    if (whole == NULL) return -1;
    snprintf(wanted, sizeof wanted, "%s%s", above, below);
    return strcmp(whole, wanted) == 0;
}

/* The way out of the root of the tree, which is the folder n1 here, and back. */
static void borders(void) {
    struct stat status;
    char target[64] = "";
    NEED(getcwd(above, sizeof above) != NULL && strrchr(above, '/') != NULL);
    *strrchr(above, '/') = 0;
    NEED(mkdir("d", 0755) == 0 && mkdir("d/e", 0755) == 0 && mkdir("../beside", 0755) == 0);
    close(make("f", "inside"));
    close(make("../outside", "outside"));
    int root = open(".", O_RDONLY), d = open("d", O_PATH), up = open("..", O_RDONLY);
    NEED(root >= 0 && d >= 0 && up >= 0);
    where();
    SAY(chdir(".."));
    where();
    SAY(has_text("n1/f", "inside"));
    SAY(chdir("n1"));
    where();
    SAY(chdir("../beside"));
    where();
    SAY(has_text("../n1/f", "inside"));
    SAY(chdir("../n1/d/../.."));
    where();
    SAY(chdir("n1/d/e"));
    where();
    SAY(chdir("../../.."));
    where();
    SAY(fchdir(d));
    where();
    SAY(fchdir(up));
    where();
    SAY(fchdir(root));
    where();
    SAY(chdir("d/../../n1/../beside/../n1/./d"));
    where();
    SAY(fchdir(root));
    SAY(is_same("..", above));
    SAY(is_same(".", "../n1"));
    SAY(is_same(".", ".."));
    SAY(is_same("d/../..", ".."));
    SAY(is_same("../..", "d/../../.."));
    SAY(is_same("../../../../../../../../../../..", "/"));
    SAY(leads_to("..", ""));
    SAY(leads_to("../n1/d/../f", "/n1/f"));
    SAY(leads_to("d/../../outside", "/outside"));
    SAY(has_text("../outside", "outside"));
    SAY(has_text("d/../../outside", "outside"));
    SAY(has_text("../none", ""));
    SAY(has_text("../outside/", ""));
    SAY(has_text("f/../../outside", ""));
    SAY(has_text("none/../../outside", ""));
    TRY(openat(root, "../outside", O_RDWR));
    TRY(openat(d, "../../outside", O_RDWR));
    TRY(openat(up, "n1/f", O_RDWR));
    TRY(openat(up, "n1/../outside", O_RDWR));
    TRY(openat(up, "n1/none", O_RDWR));
    TRY(openat(up, "n1/new", O_RDWR | O_CREAT, 0600));
    SAY(unlinkat(root, "new", 0));
    TRY(openat(root, "..", O_RDWR));
    TRY(openat(root, "..", O_RDWR | O_CREAT, 0600));
    TRY(openat(root, "..", O_RDONLY | O_NOFOLLOW));
    TRY(open("../new", O_RDWR | O_CREAT | O_EXCL, 0600));
    TRY(open("../new", O_RDWR | O_CREAT | O_EXCL, 0600));
    SAY(is_same("../new", "d/../../new"));
    SAY(rename("../new", "../newer"));
    SAY(chmod("d/../../newer", 0640));
    SAY((stat("../newer", &status), status.st_mode));
    SAY(truncate("../newer", 3));
    SAY(access("../newer", R_OK));
    SAY(utime("../newer", NULL));
    SAY(setxattr("../newer", "user.a", "1", 1, 0));
    SAY(link("../newer", "d/../../beside/newer"));
    SAY(unlink("../beside/newer"));
    SAY(unlink("../newer"));
    SAY(rename("f", "../beside/f"));
    SAY(rename("../outside", "f"));
    SAY(rename("../outside", "new"));
    SAY(rename("d", "../beside/d"));
    SAY(rename("none", "../beside/d"));
    SAY(rename("../none", "new"));
    SAY(rename_with("f", "../outside", RENAME_EXCHANGE));
    SAY(rename_with("f", "../outside", RENAME_NOREPLACE));
    SAY(rename("../n1/f", "../n1/g"));
    SAY(rename("g", "../n1/f"));
    SAY(rename("../n1", "../n2"));
    SAY(rename("../beside", "../n1"));
    SAY(rename("../n1", "d"));
    SAY(rename("..", "new"));
    SAY(rename("d", ".."));
    SAY(rename(".", "new"));
    SAY(rename("d", "../n1"));
    SAY(rename("f", "../n1/"));
    SAY(link("f", "../beside/f"));
    SAY(link("../outside", "new"));
    SAY(link("../outside", "f"));
    SAY(link("../n1/f", "../n1/g"));
    SAY(unlink("../n1/g"));
    SAY(link("..", "new"));
    SAY(rmdir(".."));
    SAY(rmdir("../n1"));
    SAY(rmdir("d/.."));
    SAY(rmdir("."));
    SAY(unlink(".."));
    SAY(unlink("../n1"));
    SAY(mkdir("..", 0755));
    SAY(mkdir("../n1", 0755));
    SAY(mkdir("../n1/", 0755));
    SAY(mkdir("../new", 0750));
    SAY(rmdir("d/../../new/"));
    SAY(mkdir("../n1/new", 0755));
    SAY(rmdir("new"));
    SAY(symlink("target", "../n1"));
    SAY(mknod("../n1", S_IFREG | 0600, 0));
    SAY(mknod("../pipe", S_IFIFO | 0600, 0));
    SAY((lstat("../pipe", &status), S_ISFIFO(status.st_mode)));
    SAY(unlink("../pipe"));
    SAY(symlink("..", "up") + symlink("../outside", "out") + symlink("up/outside", "far") + symlink("../beside/in", "round"));
    SAY(symlink("../n1/f", "../beside/in") + symlink("../n1/up/n1/d", "../beside/to-d"));
    SAY(readlink("up", target, sizeof target));
    SAY(is_same("up", ".."));
    SAY(has_text("up/outside", "outside"));
    SAY(has_text("up/n1/up/n1/f", "inside"));
    SAY(has_text("out", "outside"));
    SAY(has_text("far", "outside"));
    SAY(has_text("round", "inside"));
    SAY(has_text("../beside/in", "inside"));
    SAY(is_same("../beside/to-d", "d"));
    SAY(is_same("../beside/to-d/..", "."));
    SAY(is_same("../beside/to-d/../..", ".."));
    SAY(leads_to("up/n1/up/beside/in", "/n1/f"));
    SAY(chdir("up"));
    where();
    SAY(chdir("beside/to-d"));
    where();
    SAY(chdir("../up/n1"));
    where();
    SAY(lstat("out", &status));
    SAY(S_ISLNK(status.st_mode));
    SAY(chmod("out", 0604));
    SAY((stat("../outside", &status), status.st_mode));
    TRY(open("out", O_RDONLY | O_NOFOLLOW));
    TRY(open("out", O_WRONLY | O_CREAT | O_EXCL, 0600));
    SAY(symlink("../made", "make"));
    TRY(open("make", O_WRONLY | O_CREAT, 0600));
    SAY(unlink("../made"));
    SAY(truncate("round", 2));
    SAY((stat("f", &status), status.st_size));
    SAY(rename("out", "up/beside/out"));
    SAY(rename("up/n1/out", "out2"));
    SAY(unlink("up/n1/out2"));
    NEED(mkdir("t", 0755) == 0 && mkdir("t/u", 0755) == 0 && mkdir("t/u/v", 0755) == 0 && symlink("t/u", "l") == 0);
    NEED(symlink("../n1/t/u", "../beside/l") == 0);
    SAY(rename("../n1/t/u/..", "../n1/new"));
    SAY(rename("../n1/t/u/.", "../n1/new"));
    SAY(rmdir("../n1/t/u/v/."));
    SAY(rmdir("../n1/t/u/v/./"));
    SAY(rmdir("../n1/t/u/v/.."));
    SAY(unlink("../n1/t/u/v/.."));
    SAY(mkdir("../n1/t/u/.", 0755));
    SAY(mkdir("../n1/..", 0755));
    SAY(rmdir("../n1/.."));
    SAY(unlink("../n1/../"));
    SAY(rename("../n1/..", "../new"));
    SAY(rename("../outside", "../n1/.."));
    SAY(rmdir("../n1/l/"));
    SAY(unlink("../n1/l/"));
    SAY(mkdir("../n1/l/", 0755));
    SAY(rename("../n1/l/", "../n1/new"));
    SAY(rmdir("../n1/l/v/"));
    SAY(rename("../n1/l/none/", "../n1/new/"));
    SAY(rmdir("../beside/l/"));
    SAY(rmdir("../beside/l/."));
    SAY(mkdir("../beside/l/", 0755));
    SAY(mkdir("../beside/l/v", 0755));
    SAY(rename("../beside/l/v/", "../n1/new/"));
    SAY(rmdir("../beside/l/../../new/"));
    SAY(unlink("../beside/l") + unlink("l") + rmdir("t/u") + rmdir("t"));
    TRY(open2(root, "..", O_RDONLY, RESOLVE_BENEATH));
    TRY(open2(root, "../outside", O_RDONLY, RESOLVE_BENEATH));
    TRY(open2(root, "../n1/f", O_RDONLY, RESOLVE_BENEATH));
    TRY(open2(root, "d/../f", O_RDONLY, RESOLVE_BENEATH));
    TRY(open2(root, "up/n1/f", O_RDONLY, RESOLVE_BENEATH));
    TRY(open2(root, "..", O_RDONLY, RESOLVE_IN_ROOT));
    TRY(open2(root, "../f", O_RDONLY, RESOLVE_IN_ROOT));
    TRY(open2(root, "../outside", O_RDONLY, RESOLVE_IN_ROOT));
    TRY(open2(root, "up/f", O_RDONLY, RESOLVE_IN_ROOT));
    TRY(open2(root, "up/up/../d/../../f", O_RDONLY, RESOLVE_IN_ROOT));
    TRY(open2(root, "far", O_RDONLY, RESOLVE_IN_ROOT));
    TRY(open2(root, "..", O_RDONLY, RESOLVE_NO_XDEV));
    TRY(open2(root, "../outside", O_RDONLY, RESOLVE_NO_XDEV));
    TRY(open2(root, "d/../f", O_RDONLY, RESOLVE_NO_XDEV));
    TRY(open2(root, "up/outside", O_RDONLY, RESOLVE_NO_XDEV));
    TRY(open2(root, "../outside", O_RDONLY, RESOLVE_NO_SYMLINKS));
    TRY(open2(root, "up/outside", O_RDONLY, RESOLVE_NO_SYMLINKS));
    TRY(open2(AT_FDCWD, "../n1/f", O_RDONLY, RESOLVE_NO_SYMLINKS));
    TRY(open2(up, "n1/f", O_RDONLY, RESOLVE_NO_XDEV));
    TRY(open2(up, "n1/f", O_RDONLY, RESOLVE_NO_SYMLINKS));
    TRY(open2(up, "n1/up/outside", O_RDONLY, RESOLVE_NO_SYMLINKS));
    CHILD {
        become(1000);
        where();
        SAY(chdir("../beside"));
        where();
        SAY(has_text("../n1/../outside", "outside"));
        TRY(open("../n1/new", O_RDWR | O_CREAT, 0600));
        SAY(fchdir(d));
        where();
        SAY(has_text("../../outside", "outside"));
    }
    SAY(chdir("d/e") + rmdir("../e"));
    where();
    SAY(stat(".", &status));
    SAY(chdir(above));
    where();
    SAY(has_text("n1/../n1/d/../f", "in"));
    SAY(unlink("outside") + unlink("beside/in") + unlink("beside/to-d"));
    SAY(rmdir("beside"));
}

/* Renames over a name until the file `enough` exists. */
static void renames_over(void) {
    close(make("begun", ""));
    while (access("enough", F_OK) < 0) {
        close(make("new", "text"));
        NEED(rename("new", "always") == 0);
    }
}

/* Calls on a name that always exists. */
static void meets_renames(void) {
    struct stat status;
    char buffer[256];
    while (access("begun", F_OK) < 0) usleep(1000);
    for (int round = 0; round < 100; round++) {
        int fd = open("always", O_RDONLY), creating = open("always", O_RDWR | O_CREAT, 0644);
        NEED(fd >= 0 && creating >= 0);
        close(fd);
        close(creating);
        NEED(stat("always", &status) == 0);
        NEED(lstat("always", &status) == 0);
        NEED(access("always", R_OK) == 0);
        NEED(chmod("always", 0640) == 0);
        NEED(utime("always", NULL) == 0);
        NEED(listxattr("always", buffer, sizeof buffer) >= 0);
        NEED(setxattr("always", "user.a", "1", 1, 0) == 0);
        NEED(truncate("always", 2) == 0);
    }
    close(make("enough", ""));
    puts("met");
}

static const struct {
    const char *name;
    void (*run)(void);
} cases[] = {
    {"empty_links", empty_links}, {"locks_end_with_any_descriptor", locks_end_with_any_descriptor},
    {"after_exec", after_exec}, {"locks_at_exec", locks_at_exec}, {"paths_only", paths_only},
    {"fchdir_asks_for_search", fchdir_asks_for_search}, {"restricted_walks", restricted_walks},
    {"arguments", arguments}, {"order_of_names", order_of_names}, {"watches", watches}, {"reopened", reopened},
    {"reopened_pipes", reopened_pipes}, {"names_of_descriptors", names_of_descriptors}, {"requests", requests},
    {"borders", borders}, {"unreadable_memory", unreadable_memory},
    {"order_of_errors", order_of_errors}, {"writes_without_appending", writes_without_appending}, {"few_descriptors", few_descriptors}, {"few_from_the_start", few_from_the_start},
    {"few_for_good", few_for_good}, {"renames_over", renames_over}, {"meets_renames", meets_renames},
    {"limit_of_file_size", limit_of_file_size}, {"copies", copies}, {"zeroed_ranges", zeroed_ranges}, {"blocks", blocks}, {"large_allocations", large_allocations},
    {"unnamed_files", unnamed_files}, {"unnamed_after_exec", unnamed_after_exec}, {"whiteouts", whiteouts},
    {"links_of_open_files", links_of_open_files}, {"after_exec_by_another", after_exec_by_another},
    {"links_of_others_files", links_of_others_files}, {"shared_directories", shared_directories},
};

int main(int count, char **given) {
    self = realpath(given[0], NULL);
    NEED(count == 3 && chdir(given[2]) == 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (strcmp(given[1], cases[i].name) == 0) {
            cases[i].run();
            return 0;
        }
    return 2;
}
