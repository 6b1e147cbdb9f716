/* A child between vfork and exec: its files, and its locks in the program that it executes. `vfork CASE DIR [cold]`: DIR is
 * an empty directory on the file system under test. `cold`: each child makes the first call of its process there. It exits
 * with 0 on every correct file system, including the kernel's. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(what) \
    do { \
        if (!(what)) { \
            fprintf(stderr, "%s:%d: %s (errno %d)\n", __func__, __LINE__, #what, errno); \
            _exit(1); \
        } \
    } while (0)

enum { KEPT = 40, OTHER, ORDERS, ANSWERS };

static const char *self, *folder;
static int cold, to_child = -1, from_child = -1;
static char paths[8][PATH_MAX];
static const char *f = paths[0], *g = paths[1], *renamed = paths[2], *program = paths[3];

static struct flock range_of(int kind, int start) {
    return (struct flock){.l_type = kind, .l_whence = SEEK_SET, .l_start = start, .l_len = 10};
}

static int lock_range(int fd, int start) {
    struct flock lock = range_of(F_WRLCK, start);
    return fcntl(fd, F_SETLK, &lock) == 0 ? 0 : errno == EACCES ? EAGAIN : errno;
}

/* The process with a lock on this range; 0 if it is free. */
static long owner_of_range(const char *path, int start) {
    struct flock lock = range_of(F_WRLCK, start);
    int fd = open(path, O_RDWR);
    CHECK(fd >= 0 && fcntl(fd, F_GETLK, &lock) == 0);
    CHECK((lock.l_type == F_UNLCK ? 0 : EAGAIN) == lock_range(fd, start));
    close(fd);
    return lock.l_type == F_UNLCK ? 0 : lock.l_pid;
}

/* The error of another process that wants the whole file. */
static long refusal_of_whole(const char *path, int unused) {
    int fd = open(path, O_RDWR);
    CHECK(fd >= 0);
    long refused = flock(fd, LOCK_EX | LOCK_NB) == 0 ? 0 : errno;
    close(fd);
    return refused;
}

/* An answer of another process. */
static long asked(long (*what)(const char *, int), const char *path, int start) {
    int pipes[2], status;
    long answer = -1;
    CHECK(pipe2(pipes, O_CLOEXEC) == 0);
    pid_t child = fork();
    if (child == 0) {
        answer = what(path, start);
        _exit(write(pipes[1], &answer, sizeof answer) != sizeof answer);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(read(pipes[0], &answer, sizeof answer) == sizeof answer);
    close(pipes[0]);
    close(pipes[1]);
    return answer;
}

#define WHOLE(path) asked(refusal_of_whole, path, 0)
#define RANGE(path, start) asked(owner_of_range, path, start)

/* A file of this process only, so that it is no longer the child that makes the first call. */
static void warm_up(void) {
    if (cold) return;
    int fd = open(program, O_RDWR | O_CREAT, 0755);
    CHECK(fd >= 0 && write(fd, "\1no program", 11) == 11 && close(fd) == 0);
    CHECK(open(program, O_RDONLY | O_CLOEXEC) >= 0);
}

/* Executes this program after the child has done its part, and waits until it runs. */
static pid_t started(void (*part)(void), const char *next) {
    int orders[2], answers[2];
    char byte;
    CHECK(pipe2(orders, O_CLOEXEC) == 0 && pipe2(answers, O_CLOEXEC) == 0);
    pid_t child = vfork();
    if (child == 0) {
        part();
        dup2(orders[0], ORDERS);
        dup2(answers[1], ANSWERS);
        execl(self, self, next, folder, (char *)0);
        _exit(9);
    }
    CHECK(child > 0);
    close(orders[0]);
    close(answers[1]);
    to_child = orders[1];
    from_child = answers[0];
    CHECK(read(from_child, &byte, 1) == 1 && byte == 'r');
    return child;
}

static void order(char what) {
    char byte;
    CHECK(write(to_child, &what, 1) == 1 && read(from_child, &byte, 1) == 1 && byte == what);
}

static void ends(pid_t child, int expected) {
    int status;
    close(to_child);
    CHECK(waitpid(child, &status, 0) == child && status == expected);
    close(from_child);
}

static void holder(void) { /* executed by a child */
    char order;
    CHECK(fcntl(KEPT, F_GETFD) == 0 && write(ANSWERS, "r", 1) == 1);
    while (read(ORDERS, &order, 1) == 1) {
        if (order == 'u') CHECK(flock(KEPT, LOCK_UN) == 0);
        if (order == 'c') CHECK(close(KEPT) == 0);
        CHECK(write(ANSWERS, &order, 1) == 1);
    }
}

static void keeps(int fd) {
    if (dup2(fd, KEPT) != KEPT || close(fd)) _exit(8);
}

static void locks_whole(void) {
    int fd = open(f, O_RDWR | O_CREAT, 0644);
    if (fd < 0 || flock(fd, LOCK_EX | LOCK_NB)) _exit(8);
    keeps(fd);
}

static void locks_whole_and_fails(void) {
    locks_whole();
    if (execl(program, program, (char *)0) != -1 || errno != ENOEXEC) _exit(7);
    if (execl("/nothing", "nothing", (char *)0) != -1 || errno != ENOENT) _exit(7);
}

static void whole(void) {
    warm_up();
    pid_t child = started(locks_whole, "holder");
    CHECK(WHOLE(f) == EWOULDBLOCK && refusal_of_whole(f, 0) == EWOULDBLOCK);
    order('u');
    CHECK(WHOLE(f) == 0);
    ends(child, 0);
    child = started(locks_whole, "holder");
    CHECK(WHOLE(f) == EWOULDBLOCK);
    order('c');
    CHECK(WHOLE(f) == 0);
    ends(child, 0);
    child = started(cold ? locks_whole : locks_whole_and_fails, "holder");
    CHECK(WHOLE(f) == EWOULDBLOCK);
    CHECK(kill(child, SIGKILL) == 0);
    ends(child, SIGKILL);
    CHECK(WHOLE(f) == 0 && refusal_of_whole(f, 0) == 0);
    child = vfork();
    if (child == 0) {
        locks_whole();
        _exit(0);
    }
    ends(child, 0);
    CHECK(WHOLE(f) == 0);
}

static int parents = -1;

static void locks_its_parents(void) {
    int fd = open(g, O_RDWR | O_CREAT, 0644);
    if (fd < 0 || flock(fd, LOCK_EX) || flock(parents, LOCK_EX)) _exit(8);
    keeps(fd);
    if (dup2(parents, OTHER) != OTHER) _exit(8);
}

/* A description that the child has from its parent, beside one of its own. */
static void both(void) {
    parents = open(f, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    pid_t child = started(locks_its_parents, "holder");
    CHECK(WHOLE(f) == EWOULDBLOCK && WHOLE(g) == EWOULDBLOCK);
    CHECK(close(parents) == 0);
    CHECK(WHOLE(f) == EWOULDBLOCK && WHOLE(g) == EWOULDBLOCK);
    order('c');
    CHECK(WHOLE(f) == EWOULDBLOCK && WHOLE(g) == 0);
    ends(child, 0);
    CHECK(WHOLE(f) == 0);
}

static void locks_ranges(void) {
    int fd = open(f, O_RDWR | O_CREAT, 0644), again = open(f, O_RDONLY);
    int closed = open(g, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (lock_range(fd, 0) || lock_range(fd, 20) || close(again)) _exit(8); /* with that both end */
    if (lock_range(fd, 20) || lock_range(closed, 0)) _exit(8);
    if (dup2(fd, KEPT) != KEPT) _exit(8);
}

static void locks_and_closes(void) {
    int fd = open(f, O_RDWR), again = dup(fd);
    if (lock_range(fd, 20) || close(again) || lock_range(fd, 0)) _exit(8);
    if (dup2(fd, KEPT) != KEPT) _exit(8);
}

static void ranges(void) {
    warm_up();
    pid_t child = started(locks_ranges, "holder");
    CHECK(RANGE(f, 0) == 0 && RANGE(g, 0) == 0);
    CHECK(RANGE(f, 20) == child && owner_of_range(f, 20) == child);
    order('c');
    CHECK(RANGE(f, 20) == 0); /* another descriptor of the file is open still */
    ends(child, 0);
    child = started(locks_and_closes, "holder");
    CHECK(RANGE(f, 20) == 0 && RANGE(f, 0) == child);
    ends(child, 0);
    CHECK(RANGE(f, 0) == 0);
    child = vfork();
    if (child == 0) {
        locks_ranges();
        _exit(0);
    }
    ends(child, 0);
    CHECK(RANGE(f, 20) == 0 && RANGE(g, 0) == 0 && owner_of_range(f, 20) == 0);
}

static pid_t parent;

static void meets_its_parents_locks(void) {
    struct flock lock = range_of(F_WRLCK, 0);
    int fd = open(f, O_RDWR);
    if (lock_range(fd, 0) != EAGAIN || fcntl(fd, F_GETLK, &lock) || lock.l_pid != parent) _exit(8);
    if (lock_range(parents, 40) || close(parents)) _exit(8); /* its own lock ends */
    if (lock_range(fd, 20)) _exit(8);
    if (dup2(fd, KEPT) != KEPT) _exit(8);
}

/* The locks of a parent and those of its child are apart. */
static void apart(void) {
    parent = getpid();
    parents = open(f, O_RDWR | O_CREAT, 0644);
    CHECK(lock_range(parents, 0) == 0);
    pid_t child = started(meets_its_parents_locks, "holder");
    CHECK(RANGE(f, 0) == parent && RANGE(f, 20) == child && RANGE(f, 40) == 0);
    CHECK(lock_range(parents, 20) == EAGAIN && lock_range(parents, 40) == 0);
    ends(child, 0);
    CHECK(RANGE(f, 0) == parent && RANGE(f, 20) == 0 && RANGE(f, 40) == parent);
    child = vfork();
    if (child == 0) {
        int fd = open(f, O_RDWR);
        if (lock_range(fd, 0) != EAGAIN || close(fd)) _exit(8);
        fd = open(f, O_RDWR);
        if (lock_range(fd, 20)) _exit(8);
        _exit(0);
    }
    ends(child, 0);
    CHECK(RANGE(f, 0) == parent && RANGE(f, 20) == 0);
    child = vfork();
    if (child == 0) {
        if (open(f, O_RDWR) < 0) _exit(8);
        execl("/bin/true", "true", (char *)0);
        _exit(9);
    }
    ends(child, 0);
    CHECK(RANGE(f, 0) == parent && close(open(f, O_RDONLY)) == 0 && RANGE(f, 0) == 0);
}

static void opens_at_two(void) {
    int fd = open(f, O_RDWR | O_CREAT | O_APPEND, 0644);
    if (write(fd, "hello", 5) != 5 || lseek(fd, 2, SEEK_SET) != 2) _exit(8);
    keeps(fd);
    fd = open(f, O_RDONLY);
    if (dup3(fd, OTHER, O_CLOEXEC) != OTHER || close(fd)) _exit(8);
}

static void goes_on(void) { /* executed by a child */
    char got[8] = "";
    CHECK(lseek(KEPT, 0, SEEK_CUR) == 2 && fcntl(KEPT, F_GETFD) == 0 && fcntl(OTHER, F_GETFD) == -1);
    CHECK((fcntl(KEPT, F_GETFL) & (O_ACCMODE | O_APPEND)) == (O_RDWR | O_APPEND));
    CHECK(read(KEPT, got, 8) == 3 && memcmp(got, "llo", 3) == 0);
    CHECK(write(KEPT, "X", 1) == 1 && lseek(KEPT, 0, SEEK_CUR) == 6);
    CHECK(write(ANSWERS, "r", 1) == 1);
}

static void offsets(void) {
    char got[8];
    warm_up();
    for (int round = 0; round < 3; round++) {
        pid_t child = started(opens_at_two, "goes_on");
        ends(child, 0);
        int fd = open(f, O_RDONLY);
        CHECK(read(fd, got, 8) == 6 && memcmp(got, "helloX", 6) == 0);
        CHECK(close(fd) == 0 && unlink(f) == 0);
    }
}

static void opens_and_unlinks(void) {
    int fd = open(f, O_RDWR | O_CREAT | O_EXCL, 0644), moved = open(g, O_RDWR | O_CREAT | O_EXCL, 0600);
    if (write(fd, "gone", 4) != 4 || write(moved, "moved", 5) != 5) _exit(8);
    if (unlink(f) || rename(g, renamed) || dup2(moved, OTHER) != OTHER) _exit(8);
    keeps(fd);
}

static void nameless(void) { /* executed by a child */
    struct stat found;
    char got[8];
    CHECK(fstat(KEPT, &found) == 0 && found.st_nlink == 0 && found.st_size == 4);
    CHECK(pread(KEPT, got, 8, 0) == 4 && memcmp(got, "gone", 4) == 0);
    CHECK(write(KEPT, " on", 3) == 3 && pread(KEPT, got, 8, 0) == 7 && fsync(KEPT) == 0);
    CHECK(pread(OTHER, got, 8, 0) == 5 && memcmp(got, "moved", 5) == 0 && fchmod(OTHER, 0) == 0);
    CHECK(write(OTHER, "!", 1) == 1);
    CHECK(write(ANSWERS, "r", 1) == 1);
}

static void names(void) {
    warm_up();
    for (int round = 0; round < 3; round++) {
        struct stat found;
        ends(started(opens_and_unlinks, "nameless"), 0);
        CHECK(stat(renamed, &found) == 0 && found.st_size == 6 && (found.st_mode & 0777) == 0);
        CHECK(access(f, F_OK) == -1 && unlink(renamed) == 0);
    }
}

static pid_t daemon_of_tree;

static void locks_and_kills(void) {
    int fd = open(g, O_RDWR | O_CREAT, 0644);
    if (flock(parents, LOCK_EX) || lock_range(fd, 0)) _exit(8);
    if (dup2(fd, OTHER) != OTHER || dup2(parents, KEPT) != KEPT) _exit(8);
    if (unlink(f)) _exit(8);
    if (daemon_of_tree && kill(daemon_of_tree, SIGKILL)) _exit(7);
    while (daemon_of_tree && kill(daemon_of_tree, 0) == 0) usleep(1000);
}

static void inherits_and_kills(void) {
    if (flock(parents, LOCK_EX) || dup2(parents, KEPT) != KEPT || unlink(f)) _exit(8);
    if (daemon_of_tree && kill(daemon_of_tree, SIGKILL)) _exit(7);
    while (daemon_of_tree && kill(daemon_of_tree, 0) == 0) usleep(1000);
}

static void says(void) { /* executed by a child */
    struct stat found;
    CHECK(fstat(KEPT, &found) == 0 && found.st_nlink == 0 && pwrite(KEPT, "again", 5, 0) == 5);
    CHECK(write(ANSWERS, "r", 1) == 1);
    holder();
}

/* The daemon of the tree dies between vfork and exec. */
static void killed(void (*part)(void)) {
    const char *told = getenv("DAEMON");
    daemon_of_tree = told ? atoi(told) : 0;
    parents = open(f, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    int again = open(f, O_RDWR | O_CLOEXEC);
    CHECK(parents >= 0 && again >= 0 && write(parents, "first", 5) == 5);
    pid_t child = started(part, "says");
    CHECK(flock(again, LOCK_EX | LOCK_NB) == -1 && errno == EWOULDBLOCK);
    if (part == locks_and_kills) CHECK(RANGE(g, 0) == child);
    close(parents);
    ends(child, 0);
    CHECK(flock(again, LOCK_EX | LOCK_NB) == 0 && lock_range(again, 0) == 0);
    if (part == locks_and_kills) CHECK(RANGE(g, 0) == 0);
    char got[8];
    CHECK(pread(again, got, 8, 0) == 5 && memcmp(got, "again", 5) == 0);
}

static void killed_with_own(void) { killed(locks_and_kills); }
static void killed_with_inherited(void) { killed(inherits_and_kills); }

enum { THREADS = 4, ROUNDS = 200 };
static int begin[2], done[2];

static void *uses(void *argument) {
    char name[PATH_MAX], other[PATH_MAX], got[64], byte;
    long me = (long)argument;
    CHECK(read(begin[0], &byte, 1) == 1);
    for (int round = 0; round < ROUNDS; round++) {
        snprintf(name, sizeof name, "%s/t%ld-%d", folder, me, round);
        snprintf(other, sizeof other, "%s/u%ld-%d", folder, me, round);
        int fd = open(name, O_RDWR | O_CREAT | O_EXCL, 0644);
        CHECK(fd >= 0 && write(fd, name, strlen(name)) == (ssize_t)strlen(name));
        CHECK(flock(fd, LOCK_EX | LOCK_NB) == 0 && rename(name, other) == 0);
        int again = open(other, O_RDONLY);
        CHECK(again >= 0 && read(again, got, 8) == 8 && memcmp(got, name, 8) == 0 && close(again) == 0);
        CHECK(lseek(fd, 0, SEEK_CUR) == (off_t)strlen(name) && close(fd) == 0 && unlink(other) == 0);
    }
    CHECK(write(done[1], "d", 1) == 1);
    return 0;
}

static void stays(void) {
    char byte;
    locks_whole();
    for (int thread = 0; thread < THREADS; thread++)
        if (write(begin[1], "b", 1) != 1) _exit(8);
    for (int thread = 0; thread < THREADS; thread++)
        if (read(done[0], &byte, 1) != 1) _exit(8);
    if (write(KEPT, "child", 5) != 5 || lseek(KEPT, 2, SEEK_SET) != 2) _exit(8);
}

/* Other threads of the parent use the file system while a child is between vfork and exec. */
static void long_stay(void) {
    pthread_t threads[THREADS];
    warm_up();
    for (int round = 0; round < 3; round++) {
        CHECK(pipe2(begin, O_CLOEXEC) == 0 && pipe2(done, O_CLOEXEC) == 0);
        for (long me = 0; me < THREADS; me++) CHECK(pthread_create(&threads[me], 0, uses, (void *)me) == 0);
        pid_t child = started(stays, "holder");
        CHECK(WHOLE(f) == EWOULDBLOCK);
        ends(child, 0);
        for (int me = 0; me < THREADS; me++) CHECK(pthread_join(threads[me], 0) == 0);
        CHECK(WHOLE(f) == 0);
        struct stat found;
        CHECK(stat(f, &found) == 0 && found.st_size == 5);
        for (int me = 0; me < 2; me++) close(begin[me]), close(done[me]);
    }
}

static int nameless_file = -1, locked_file = -1;

static void *opens_meanwhile(void *unused) {
    char byte;
    CHECK(read(begin[0], &byte, 1) == 1);
    nameless_file = open(f, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    CHECK(write(nameless_file, "first", 5) == 5 && unlink(f) == 0);
    locked_file = open(g, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    CHECK(flock(locked_file, LOCK_EX) == 0 && lock_range(locked_file, 20) == 0);
    CHECK(write(done[1], "d", 1) == 1);
    return 0;
}

static void waits_for_a_thread(void) {
    char byte;
    int fd = open(renamed, O_RDWR | O_CREAT, 0644);
    if (flock(fd, LOCK_EX) || write(begin[1], "b", 1) != 1 || read(done[0], &byte, 1) != 1) _exit(8);
    keeps(fd);
}

static void has_its_files(void) {
    struct stat found;
    char got[8];
    CHECK(fstat(nameless_file, &found) == 0 && found.st_nlink == 0);
    CHECK(pread(nameless_file, got, 8, 0) == 5 && memcmp(got, "first", 5) == 0);
    CHECK(WHOLE(g) == EWOULDBLOCK && RANGE(g, 20) == getpid());
}

/* Other threads keep the files and locks that they get meanwhile. */
static void keeps_its_own(void) {
    pthread_t thread;
    warm_up();
    CHECK(pipe2(begin, O_CLOEXEC) == 0 && pipe2(done, O_CLOEXEC) == 0);
    CHECK(pthread_create(&thread, 0, opens_meanwhile, 0) == 0);
    pid_t child = started(waits_for_a_thread, "holder");
    CHECK(pthread_join(thread, 0) == 0);
    CHECK(WHOLE(renamed) == EWOULDBLOCK);
    has_its_files();
    ends(child, 0);
    CHECK(WHOLE(renamed) == 0);
    has_its_files();
    CHECK(close(locked_file) == 0 && WHOLE(g) == 0 && RANGE(g, 20) == 0);
}

/* Each call on the tree is refused, also while the parent is within one. The parent's calls leave errno as it is. */
static int is_right(int is_served) {
    return getenv("DAEMON") ? !is_served && errno == EOPNOTSUPP : is_served;
}

static int runs_beside(void *unused) {
    struct stat found;
    char got[8];
    if (!is_right(open(f, O_RDONLY) >= 0)) return 1;
    for (int round = 0; round < 100; round++)
        if (!is_right(syscall(SYS_access, f, F_OK) == 0)) return 1;
    if (!is_right(stat(f, &found) == 0)) return 2;
    if (!is_right(pread(parents, got, 8, 0) == 5)) return 3;
    if (close(parents)) return 4;
    int null = open("/dev/null", O_RDONLY);
    if (null < 0 || read(null, got, 8) != 0) return 5;
    if (getenv("EXECUTES")) execl("/bin/true", "true", (char *)0);
    return 0;
}

/* A process that shares its parent's memory, and runs at the same time. The tree serves the parent only. */
static void beside(void) {
    static char stack[1 << 18] __attribute__((aligned(16)));
    parents = open(f, O_RDWR | O_CREAT, 0644);
    CHECK(parents >= 0 && write(parents, "first", 5) == 5);
    for (int round = 0; round < 20; round++) {
        if (round == 10) CHECK(setenv("EXECUTES", "1", 1) == 0);
        pid_t child = clone(runs_beside, stack + sizeof stack, CLONE_VM | SIGCHLD, 0);
        CHECK(child > 0);
        int status;
        while (waitpid(child, &status, WNOHANG) == 0) {
            struct stat found;
            CHECK(fstat(parents, &found) == 0 && found.st_size == 5);
            int fd = open(g, O_RDWR | O_CREAT, 0644);
            CHECK(fd >= 0 && write(fd, "parent", 6) == 6 && close(fd) == 0 && unlink(g) == 0);
        }
        if (status) fprintf(stderr, "the child's status is %d\n", status);
        CHECK(status == 0 && WHOLE(f) == 0 && system("true") == 0);
    }
}

static void spawns_true(int how_many) {
    char *arguments[] = {"true", 0};
    for (int round = 0; round < how_many; round++) {
        pid_t child;
        errno = posix_spawn(&child, "/bin/true", 0, 0, arguments, environ);
        CHECK(errno == 0);
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
}

/* A process has many descriptors, of which a hundred are of the file system under test, and its limit leaves few. */
static void many(void) {
    struct rlimit limit;
    CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    const int room = 40, most = limit.rlim_max < 20000 ? limit.rlim_max : 20000;
    limit.rlim_cur = limit.rlim_max = most;
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    for (int at = 0; at < 100; at++) CHECK(open(f, O_RDWR | O_CREAT, 0644) >= 0);
    while (open("/dev/null", O_RDONLY) >= 0) {}
    CHECK(errno == EMFILE);
    int given_back = 0;
    for (int fd = most; given_back < room; fd--) given_back += fd > OTHER + 200 && close(fd) == 0;
    spawns_true(3);
    pid_t child = started(locks_whole, "holder");
    CHECK(WHOLE(f) == EWOULDBLOCK);
    ends(child, 0);
    CHECK(WHOLE(f) == 0);
}

static void writes_once(void) {
    int fd = open(f, O_RDWR | O_CREAT, 0644);
    if (fd < 0 || write(fd, "x", 1) != 1 || close(fd)) _exit(errno);
}

/* The process limits its memory, and then needs more of it. */
static void limits(int resource) {
    const char *room = getenv("ROOM");
    unsigned long limit = (room ? atoi(room) : 256) * 1048576ul;
    struct rlimit low = {limit, limit};
    CHECK(setrlimit(resource, &low) == 0);
    for (int round = 0; round < 3; round++) {
        pid_t child = vfork();
        if (child == 0) {
            writes_once();
            execl("/bin/true", "true", (char *)0);
            _exit(99);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child);
        if (status) fprintf(stderr, "status %d\n", status);
        CHECK(status == 0);
        writes_once();
        CHECK(WHOLE(f) == 0);
    }
    CHECK(malloc(32 << 20));
}

static void narrow(void) { limits(RLIMIT_AS); }
static void little_data(void) { limits(RLIMIT_DATA); }

static const struct {
    const char *name;
    void (*run)(void);
} cases[] = {
    {"holder", holder}, {"goes_on", goes_on}, {"nameless", nameless}, {"whole", whole}, {"both", both},
    {"ranges", ranges}, {"apart", apart}, {"offsets", offsets}, {"names", names},
    {"says", says}, {"killed_with_own", killed_with_own}, {"killed_with_inherited", killed_with_inherited},
    {"long_stay", long_stay}, {"keeps_its_own", keeps_its_own},
    {"beside", beside}, {"many", many}, {"narrow", narrow}, {"little_data", little_data},
};

int main(int count, char **arguments) {
    const char *files[] = {"f", "g", "renamed", "program"};
    CHECK(count >= 3 && (self = realpath(arguments[0], 0)));
    folder = arguments[2];
    cold = count > 3;
    for (int i = 0; i < 4; i++) snprintf(paths[i], PATH_MAX, "%s/%s", folder, files[i]);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (strcmp(arguments[1], cases[i].name) == 0) {
            cases[i].run();
            return 0;
        }
    return 2;
}
