/* Operations of ordinary C programs on files, in one function for each case: `probe CASE DIR`. DIR is an empty
 * directory on the file system under test. Unless a case says otherwise, it exits with 0 on every correct file
 * system, including the kernel's. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

#define CHECK(what) \
    do { \
        if (!(what)) { \
            fprintf(stderr, "%s:%d: %s (errno %d)\n", __func__, __LINE__, #what, errno); \
            _exit(1); \
        } \
    } while (0)

extern char **environ;
static const char *self;

static int make(const char *name, const char *text) {
    int fd = open(name, O_RDWR | O_CREAT | O_TRUNC, 0644);
    CHECK(fd >= 0);
    CHECK(write(fd, text, strlen(text)) == (ssize_t)strlen(text));
    return fd;
}

static void holds(const char *name, const char *text) {
    char got[4096];
    int fd = open(name, O_RDONLY);
    CHECK(fd >= 0);
    ssize_t bytes = read(fd, got, sizeof got);
    CHECK(bytes == (ssize_t)strlen(text) && memcmp(got, text, bytes) == 0);
    CHECK(close(fd) == 0);
}

static void wait_for(pid_t child) {
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void descriptors(void) {
    int fd = make("a", "0123456789");
    int two = dup(fd), three = fcntl(fd, F_DUPFD, 100), four = fcntl(fd, F_DUPFD_CLOEXEC, 100);
    CHECK(two >= 0 && three >= 100 && four > three);
    CHECK(lseek(fd, 3, SEEK_SET) == 3 && lseek(two, 0, SEEK_CUR) == 3 && lseek(four, 0, SEEK_CUR) == 3);
    CHECK((fcntl(fd, F_GETFD) & FD_CLOEXEC) == 0 && (fcntl(four, F_GETFD) & FD_CLOEXEC) != 0);
    char byte;
    CHECK(read(three, &byte, 1) == 1 && byte == '3' && lseek(fd, 0, SEEK_CUR) == 4);
    int pipes[2];
    CHECK(pipe(pipes) == 0);
    CHECK(dup2(fd, pipes[0]) == pipes[0] && lseek(pipes[0], 0, SEEK_CUR) == 4); /* of the file system under test over the kernel's */
    CHECK(dup2(pipes[1], two) == two && lseek(two, 0, SEEK_CUR) == -1 && errno == ESPIPE); /* and the other way round */
    CHECK(dup2(fd, fd) == fd && dup3(fd, fd, 0) == -1 && errno == EINVAL);
    CHECK(dup2(999, fd) == -1 && errno == EBADF && lseek(fd, 0, SEEK_CUR) == 4);
    CHECK(close(fd) == 0 && close(fd) == -1 && errno == EBADF);
    CHECK(read(three, &byte, 1) == 1 && byte == '4');
    CHECK(fcntl(three, F_GETFL) != -1 && (fcntl(three, F_GETFL) & O_ACCMODE) == O_RDWR);
    CHECK(fcntl(three, F_SETFL, O_APPEND) == 0 && (fcntl(four, F_GETFL) & O_APPEND));
    CHECK(isatty(three) == 0 && errno == ENOTTY);
}

static void close_ranges(void) {
    int low = make("a", "a"), high = fcntl(low, F_DUPFD, 50);
    int pipes[2];
    CHECK(pipe(pipes) == 0);
    CHECK(syscall(SYS_close_range, 3u, 40u, 0) == 0);
    CHECK(fcntl(low, F_GETFD) == -1 && fcntl(pipes[0], F_GETFD) == -1 && lseek(high, 0, SEEK_CUR) == 1);
    CHECK(syscall(SYS_close_range, 3u, ~0u, 4 /* CLOEXEC */) == 0 && (fcntl(high, F_GETFD) & FD_CLOEXEC));
    CHECK(syscall(SYS_close_range, 3u, ~0u, 0) == 0);
    CHECK(fcntl(high, F_GETFD) == -1);
    holds("a", "a"); /* the descriptor still works */
    closefrom(3);
    for (int fd = 3; fd < 70000; fd++) close(fd);
    holds("a", "a");
    CHECK(open("a", O_RDONLY) == 3);
    for (int fd = 3; fd < 20000; fd++) dup2(1, fd); /* also over numbers that a library keeps for itself */
    closefrom(3);
    holds("a", "a");
}

static void numbers_run_out(void) {
    struct rlimit limit = {64, 64};
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    for (int others = 0; others < 4; others++) { /* other files are open, so that each count of free descriptors is tried */
        for (int other = 0; other < others; other++) CHECK(dup(0) >= 0);
        int fd, count = 0;
        while ((fd = open("a", O_RDWR | O_CREAT, 0644)) >= 0) count++;
        CHECK(errno == EMFILE && count > 10 && count <= 61);
        CHECK(open("new", O_RDWR | O_CREAT, 0644) == -1 && errno == EMFILE);
        closefrom(3);
        CHECK(access("new", F_OK) == -1 && errno == ENOENT);
        CHECK((fd = open("a", O_RDONLY)) == 3 && close(fd) == 0);
    }
}

static void fork_shares_offset(void) {
    int fd = make("a", "");
    for (int i = 0; i < 4; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            for (int n = 0; n < 100; n++) CHECK(write(fd, "0123456789", 10) == 10);
            _exit(0);
        }
    }
    for (int i = 0; i < 4; i++) {
        int status;
        CHECK(wait(&status) > 0 && status == 0);
    }
    struct stat st;
    CHECK(fstat(fd, &st) == 0 && st.st_size == 4000 && lseek(fd, 0, SEEK_CUR) == 4000);
    pid_t child = fork();
    if (child == 0) { /* a daemon: forks again, its parent has ended */
        if (fork() > 0) _exit(0);
        setsid();
        int mine = make("daemon", "x");
        CHECK(fsync(mine) == 0);
        _exit(0);
    }
    wait_for(child);
}

static void inherits(void) { /* executed by other cases: descriptor 7 is open on a file, 8 is not */
    CHECK(write(7, "child ", 6) == 6);
    CHECK(fcntl(8, F_GETFD) == -1);
}

static void fork_exec(void) {
    int fd = make("a", "parent "), secret = open("a", O_RDONLY | O_CLOEXEC);
    CHECK(dup2(fd, 7) == 7 && dup3(secret, 8, O_CLOEXEC) == 8);
    pid_t child = fork();
    if (child == 0) {
        execl(self, self, "inherits", ".", (char *)0);
        _exit(9);
    }
    wait_for(child);
    CHECK(write(fd, "again", 5) == 5);
    holds("a", "parent child again");
    child = fork();
    if (child == 0) {
        char *none[] = {0}, *arguments[] = {(char *)self, "inherits", ".", 0};
        execve(self, arguments, none); /* an empty environment */
        _exit(9);
    }
    wait_for(child);
    holds("a", "parent child againchild ");
    CHECK(execl("./nothing", "x", (char *)0) == -1 && errno == ENOENT);
    CHECK(lseek(fd, 0, SEEK_CUR) == 24);
}

static void vfork_exec(void) {
    int fd = make("a", "");
    for (int round = 0; round < 20; round++) {
        pid_t child = vfork();
        if (child == 0) {
            dup2(fd, 7);
            dup2(fd, 8);
            close(8);
            close(fd);
            execl(self, self, "inherits", ".", (char *)0);
            _exit(9);
        }
        wait_for(child);
        CHECK(fcntl(7, F_GETFD) == -1); /* the child's descriptor only */
        CHECK(lseek(fd, 0, SEEK_CUR) == 6 * (round + 1));
    }
    pid_t child = vfork();
    if (child == 0) _exit(0);
    wait_for(child);
    CHECK(write(fd, "x", 1) == 1);
}

/* A child has a umask of its own, although it shares its parent's memory. */
static void vfork_umask(void) {
    struct stat made;
    umask(022);
    pid_t child = vfork();
    if (child == 0) {
        umask(077);
        _exit(mkdir("by-child", 0777));
    }
    wait_for(child);
    close(open("by-parent", O_CREAT | O_WRONLY, 0666));
    CHECK(stat("by-child", &made) == 0 && (made.st_mode & 0777) == 0700);
    CHECK(stat("by-parent", &made) == 0 && (made.st_mode & 0777) == 0644);
    CHECK(umask(022) == 022);
}

/* The first call of a program on the file system under test is that of a child. */
static void vfork_first(void) {
    char folder[PATH_MAX];
    CHECK(getcwd(folder, sizeof folder) && chdir("/") == 0 && setenv("FOLDER", folder, 1) == 0);
    const char *how[] = {"vfork_opens", "vfork_moves"};
    for (int i = 0; i < 2; i++) {
        pid_t child = fork();
        if (child == 0) {
            execl(self, self, how[i], "/", (char *)0);
            _exit(9);
        }
        wait_for(child);
    }
}

static void vfork_moves(void) {
    for (int round = 0; round < 2; round++) {
        pid_t child = vfork();
        if (child == 0) {
            if (chdir(getenv("FOLDER"))) _exit(8);
            syscall(SYS_close_range, 3u, ~0u, 0);
            execl("/bin/true", "true", (char *)0);
            _exit(9);
        }
        wait_for(child);
    }
    CHECK(chdir(getenv("FOLDER")) == 0);
    holds("a", "xyxyxy");
}

static void vfork_opens(void) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/a", getenv("FOLDER"));
    for (int round = 0; round < 3; round++) {
        pid_t child = vfork();
        if (child == 0) {
            int made = open(path, O_CREAT | O_WRONLY | O_APPEND, 0644);
            if (open(path, O_RDONLY) != made + 1) _exit(8);
            _exit(made < 0 || write(made, "x", 1) != 1 || fsync(made) != 0);
        }
        wait_for(child);
        for (int again = 0; again < 20; again++) {
            int fd = open(path, O_RDWR | O_APPEND);
            CHECK(fd >= 0 && (again || write(fd, "y", 1) == 1) && fsync(fd) == 0 && close(fd) == 0);
        }
    }
    holds(path, "xyxyxy");
    int fd = open(path, O_RDWR);
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    CHECK(fd >= 0 && fcntl(fd, F_SETLK, &lock) == 0);
    pid_t child = fork();
    if (child == 0) {
        CHECK(fcntl(fd, F_GETLK, &lock) == 0 && lock.l_type == F_WRLCK && lock.l_pid == getppid());
        _exit(0);
    }
    wait_for(child);
}

static void spawns(void) {
    close(make("a", ""));
    posix_spawn_file_actions_t actions;
    CHECK(posix_spawn_file_actions_init(&actions) == 0);
    CHECK(posix_spawn_file_actions_addopen(&actions, 7, "a", O_WRONLY | O_APPEND, 0) == 0);
    CHECK(posix_spawn_file_actions_addopen(&actions, 1, "out", O_WRONLY | O_CREAT, 0644) == 0);
    char *arguments[] = {(char *)self, "inherits", ".", 0};
    for (int round = 0; round < 3; round++) {
        pid_t child;
        CHECK(posix_spawn(&child, self, &actions, 0, arguments, environ) == 0);
        wait_for(child);
    }
    holds("a", "child child child ");
    CHECK(fcntl(7, F_GETFD) == -1);
    CHECK(system("echo shell > b; echo more >> b") == 0);
    holds("b", "shell\nmore\n");
    FILE *from = popen("cat a", "r");
    char got[64] = "";
    CHECK(from && fread(got, 1, 63, from) == 18 && pclose(from) == 0);
}

static void *thread_main(void *argument) {
    long me = (long)argument;
    char name[32], text[64];
    for (int round = 0; round < 50; round++) {
        snprintf(name, sizeof name, "t%ld-%d", me, round);
        FILE *file = fopen(name, "w+");
        CHECK(file && fprintf(file, "thread %ld round %d\n", me, round) > 0 && fflush(file) == 0);
        rewind(file);
        CHECK(fgets(text, sizeof text, file) && atoi(text + 7) == me);
        CHECK(fclose(file) == 0 && (round % 2 || unlink(name) == 0));
    }
    return 0;
}

static int shared;
static void *appender(void *argument) {
    for (int round = 0; round < 500; round++) CHECK(write(shared, "12345678", 8) == 8);
    return argument;
}

static void *closer(void *argument) {
    char byte;
    for (int round = 0; round < 2000; round++) {
        int fd = open("race", O_RDONLY);
        CHECK(fd >= 0 && pread(fd, &byte, 1, 0) == 1 && byte == 'r');
        CHECK(close(fd) == 0);
        (void)!pread(5 + round % 20, &byte, 1, 0); /* the number may belong to any thread, or to none */
    }
    return argument;
}

static void threads(void) {
    pthread_t ids[4];
    for (long i = 0; i < 4; i++) CHECK(pthread_create(&ids[i], 0, thread_main, (void *)i) == 0);
    for (int i = 0; i < 4; i++) CHECK(pthread_join(ids[i], 0) == 0);
    shared = make("shared", "");
    for (int i = 0; i < 4; i++) CHECK(pthread_create(&ids[i], 0, appender, 0) == 0);
    for (int i = 0; i < 4; i++) CHECK(pthread_join(ids[i], 0) == 0);
    CHECK(lseek(shared, 0, SEEK_END) == 4 * 500 * 8);
    close(make("race", "r"));
    for (int i = 0; i < 4; i++) CHECK(pthread_create(&ids[i], 0, closer, 0) == 0);
    for (int i = 0; i < 4; i++) CHECK(pthread_join(ids[i], 0) == 0);
}

static void stdio(void) {
    FILE *file = fopen("a", "w");
    CHECK(file && fputs("one\n", file) >= 0 && fclose(file) == 0);
    file = fopen("a", "a+");
    CHECK(file && fputs("two\n", file) >= 0 && fseek(file, 0, SEEK_SET) == 0);
    CHECK(fgetc(file) == 'o' && ungetc('X', file) == 'X' && fgetc(file) == 'X' && fclose(file) == 0);
    holds("a", "one\ntwo\n");
    char name[] = "tmpXXXXXX";
    int fd = mkstemp(name);
    CHECK(fd >= 0 && unlink(name) == 0);
    file = fdopen(fd, "w+");
    CHECK(file && fputs("gone", file) >= 0 && fflush(file) == 0);
    struct stat st;
    CHECK(fstat(fd, &st) == 0 && st.st_size == 4 && st.st_nlink == 0);
    pid_t child = fork();
    if (child == 0) {
        file = fopen("late", "w"); /* flushed by exit, after every destructor */
        CHECK(file && fputs("at exit", file) >= 0);
        exit(0);
    }
    wait_for(child);
    holds("late", "at exit");
}

static void bad_buffers(void) {
    char *volatile nowhere = (char *)8, *wild = nowhere, *volatile text = (char *)"constant";
    int fd = make("a", "0123456789");
    long page = sysconf(_SC_PAGESIZE);
    char *memory = mmap(0, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED && munmap(memory + page, page) == 0);
    CHECK(write(fd, memory + page, 10) == -1 && errno == EFAULT);
    CHECK(pread(fd, memory + page, 10, 0) == -1 && errno == EFAULT);
    CHECK(pread(fd, wild, 10, 0) == -1 && errno == EFAULT);
    CHECK(pread(fd, text, 4, 0) == -1 && errno == EFAULT);
    volatile size_t minus_one = -1; /* the result of a failed read, taken for a length */
    CHECK(write(fd, memory, minus_one) == -1 && errno == EFAULT && pwrite(fd, memory, minus_one, 0) == -1);
    CHECK(errno == EFAULT && pread(fd, memory, minus_one, 0) == -1 && errno == EFAULT && lseek(fd, 0, SEEK_END) == 10);
    struct iovec bad = {memory + page, 5};
    CHECK(preadv(fd, &bad, 1, 0) == -1 && errno == EFAULT);
    CHECK(writev(fd, (struct iovec *)8, 1) == -1 && errno == EFAULT);
    CHECK(writev(fd, &bad, -1) == -1 && errno == EINVAL && writev(fd, &bad, 1025) == -1 && errno == EINVAL);
    CHECK(open((char *)8, O_RDONLY) == -1 && errno == EFAULT);
    CHECK(syscall(SYS_newfstatat, AT_FDCWD, "a", (void *)8, 0) == -1 && errno == EFAULT);
    CHECK(stat((char *)(memory + page), (struct stat *)memory) == -1 && errno == EFAULT);
    CHECK(rename("a", (char *)8) == -1 && errno == EFAULT);
    CHECK(syscall(SYS_getdents64, open(".", O_RDONLY), (void *)8, 1000) == -1 && errno == EFAULT);
    strcpy(memory + page - 2, "a"); /* a string that ends with its page */
    CHECK(access(memory + page - 2, F_OK) == 0);
    memory[page - 1] = 'a';
    CHECK(access(memory + page - 1, F_OK) == -1 && errno == EFAULT);
    char path[PATH_MAX + 10];
    memset(path, 'x', sizeof path - 1);
    path[sizeof path - 1] = 0;
    CHECK(open(path, O_RDONLY) == -1 && errno == ENAMETOOLONG);
    CHECK(open("", O_RDONLY) == -1 && errno == ENOENT);
    CHECK(pread(fd, memory, 10, -1) == -1 && errno == EINVAL && lseek(fd, -1, SEEK_SET) == -1 && errno == EINVAL);
    CHECK(ftruncate(fd, -1) == -1 && errno == EINVAL && read(fd, memory, 0) == 0);
}

static int handler_fd;
static volatile int hits;
static void handler(int number) {
    int before = errno;
    hits++;
    CHECK(write(handler_fd, "s", 1) == 1);
    struct stat st;
    CHECK(stat("a", &st) == 0);
    (void)number;
    errno = before;
}

static void signals(void) {
    int fd = make("a", "");
    handler_fd = make("b", "");
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART}, old;
    CHECK(sigaction(SIGALRM, &action, 0) == 0 && sigaction(SIGALRM, 0, &old) == 0);
    CHECK(old.sa_handler == handler && (old.sa_flags & SA_RESTART) && !(old.sa_flags & SA_SIGINFO));
    struct itimerval timer = {{0, 300}, {0, 300}};
    CHECK(setitimer(ITIMER_REAL, &timer, 0) == 0);
    char block[4096];
    memset(block, 'x', sizeof block);
    for (int round = 0; hits < 200 && round < 2000000; round++) {
        CHECK(pwrite(fd, block, sizeof block, 0) == (ssize_t)sizeof block);
        CHECK(open("none", O_RDONLY) == -1 && errno == ENOENT);
    }
    struct itimerval off = {{0, 0}, {0, 0}};
    CHECK(setitimer(ITIMER_REAL, &off, 0) == 0 && hits >= 200);
    struct stat st;
    CHECK(fstat(handler_fd, &st) == 0 && st.st_size == hits);
    sigset_t mask;
    CHECK(sigprocmask(SIG_SETMASK, 0, &mask) == 0);
    for (int number = 1; number < 32; number++) CHECK(sigismember(&mask, number) == 0);
    /* A wait in the kernel is still interrupted, and gives the remaining time. */
    action.sa_flags = 0;
    CHECK(sigaction(SIGALRM, &action, 0) == 0);
    timer.it_interval.tv_usec = timer.it_value.tv_usec = 20000; /* again, if the first one comes before the wait */
    int pipes[2];
    CHECK(pipe(pipes) == 0 && setitimer(ITIMER_REAL, &timer, 0) == 0);
    CHECK(read(pipes[0], block, 1) == -1 && errno == EINTR);
    CHECK(setitimer(ITIMER_REAL, &off, 0) == 0);
    action.sa_handler = SIG_IGN;
    CHECK(sigaction(SIGALRM, &action, &old) == 0 && old.sa_handler == handler);
    CHECK(raise(SIGALRM) == 0);
}

/* The memory in which a child reports that it is about to wait; its parent creates it. */
static int about_to[2];
static void says_so(void) {
    CHECK(write(about_to[1], "w", 1) == 1);
}

/* Waits until the child has reported it, and sleeps. */
static void until_it_waits(pid_t child) {
    char path[64], text[512];
    CHECK(read(about_to[0], text, 1) == 1);
    snprintf(path, sizeof path, "/proc/%d/stat", (int)child);
    for (int asleep = 0; asleep < 3; usleep(10000)) {
        int fd = open(path, O_RDONLY);
        ssize_t bytes = read(fd, text, sizeof text - 1);
        CHECK(fd >= 0 && bytes > 0 && close(fd) == 0);
        text[bytes] = 0;
        char *state = strrchr(text, ')');
        CHECK(state && state[2] != 'Z');
        asleep = state[2] == 'S' ? asleep + 1 : 0;
    }
}

/* A thread waits for a lock that its parent holds. A signal ends the wait or not, depending on its handler. */
static void lock_waits(void) {
    int fd = make("a", ""), status;
    handler_fd = make("b", "");
    CHECK(flock(fd, LOCK_EX) == 0 && pipe(about_to) == 0);
    for (int restart = 0; restart < 2; restart++) {
        pid_t child = fork();
        if (child == 0) {
            struct sigaction action = {.sa_handler = handler, .sa_flags = restart ? SA_RESTART : 0};
            CHECK(sigaction(SIGUSR1, &action, 0) == 0);
            int mine = open("a", O_RDWR);
            says_so();
            int locked = flock(mine, LOCK_EX);
            _exit(restart ? !(locked == 0 && hits == 1) : !(locked == -1 && errno == EINTR && hits == 1));
        }
        until_it_waits(child);
        CHECK(kill(child, SIGUSR1) == 0);
        if (!restart) {
            CHECK(waitpid(child, &status, 0) == child);
        } else {
            usleep(100000);
            CHECK(waitpid(child, &status, WNOHANG) == 0);
            CHECK(flock(fd, LOCK_UN) == 0 && waitpid(child, &status, 0) == child);
        }
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
}

static volatile int info_ok;
static void info_handler(int number, siginfo_t *info, void *context) {
    info_ok += number == SIGUSR1 && info->si_code == SI_QUEUE && info->si_value.sival_int == 77 && context != 0;
}
static void fault_handler(int number, siginfo_t *info, void *context) {
    (void)number;
    (void)context;
    _exit(info->si_addr == (void *)16 ? 0 : 1);
}

static void program_faults(void) {
    close(make("a", "x"));
    struct rlimit no_core = {0, 0};
    CHECK(setrlimit(RLIMIT_CORE, &no_core) == 0);
    struct sigaction action = {.sa_sigaction = info_handler, .sa_flags = SA_SIGINFO};
    CHECK(sigaction(SIGUSR1, &action, 0) == 0);
    union sigval value = {.sival_int = 77};
    CHECK(sigqueue(getpid(), SIGUSR1, value) == 0 && info_ok == 1);
    int status;
    pid_t child = fork();
    if (child == 0) *(volatile int *)16 = 1; /* default action: the signal ends the process */
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
    child = fork();
    if (child == 0) {
        kill(getpid(), SIGSEGV);
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
    struct sigaction old;
    CHECK(sigaction(SIGSEGV, 0, &old) == 0 && old.sa_handler == SIG_DFL);
    action.sa_sigaction = fault_handler;
    child = fork();
    if (child == 0) {
        CHECK(sigaction(SIGSEGV, &action, 0) == 0);
        CHECK(open((char *)16, O_RDONLY) == -1 && errno == EFAULT); /* not a fault of the program */
        *(volatile int *)16 = 1;
    }
    wait_for(child);
    child = fork();
    if (child == 0) abort();
    CHECK(waitpid(child, &status, 0) == child && WTERMSIG(status) == SIGABRT);
}

static void *blocked_reader(void *argument) {
    char byte;
    (void)!read(*(int *)argument, &byte, 1);
    return 0;
}

static void cancels(void) {
    int pipes[2];
    void *result;
    pthread_t thread;
    CHECK(pipe(pipes) == 0 && pthread_create(&thread, 0, blocked_reader, &pipes[0]) == 0);
    usleep(50000);
    CHECK(pthread_cancel(thread) == 0 && pthread_join(thread, &result) == 0 && result == PTHREAD_CANCELED);
    close(make("a", "x"));
    holds("a", "x");
}

static void is_unblocked(void) {
    sigset_t mask;
    CHECK(sigprocmask(SIG_SETMASK, 0, &mask) == 0);
    for (int number = 1; number < 32; number++) CHECK(sigismember(&mask, number) == 0);
}

static int cancel_fd;
static const char *fifo;

static void *writes_forever(void *unused) {
    char block[100] = {0};
    for (;;) {
        CHECK(write(cancel_fd, block, sizeof block) == sizeof block);
        CHECK(lseek(cancel_fd, 0, SEEK_SET) == 0);
    }
    return unused;
}

static void *reads_forever(void *unused) {
    char byte;
    for (;;) CHECK(pread(cancel_fd, &byte, 1, 0) >= 0);
    return unused;
}

static void *syncs_forever(void *unused) {
    for (;;) CHECK(fsync(cancel_fd) == 0);
    return unused;
}

static void *opens_forever(void *unused) {
    for (;;) { /* ends at its close and keeps the number, as natively */
        int fd = open("a", O_RDONLY);
        CHECK(fd >= 0 && close(fd) == 0);
    }
    return unused;
}

static void *prints_forever(void *unused) {
    for (;;) { /* cancelled within the C library, at the flush of the thread's own stream */
        FILE *file = fopen("stream", "w");
        CHECK(file);
        for (int i = 0; i < 100; i++) CHECK(putc('x', file) == 'x' && fflush(file) == 0);
        fclose(file);
    }
    return unused;
}

static void *waits_for_lock(void *unused) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    CHECK(fcntl(cancel_fd, F_SETLKW, &lock) == 0);
    return unused;
}

static void *opens_fifo(void *unused) {
    CHECK(open(fifo, O_RDONLY) >= 0);
    return unused;
}

static void *is_not_cancelled(void *unused) {
    CHECK(pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, 0) == 0);
    for (int i = 0; i < 2000; i++) CHECK(pwrite(cancel_fd, "x", 1, 0) == 1);
    return unused;
}

static void cancel(void *(*what)(void *), int rounds, int delay_us) {
    for (int round = 0; round < rounds; round++) {
        pthread_t thread;
        void *result;
        CHECK(pthread_create(&thread, 0, what, 0) == 0);
        usleep(delay_us + round * 7 % 100);
        CHECK(pthread_cancel(thread) == 0 && pthread_join(thread, &result) == 0);
        CHECK(result == (what == is_not_cancelled ? 0 : PTHREAD_CANCELED));
        CHECK(pwrite(cancel_fd, "y", 1, 0) == 1);
        is_unblocked();
    }
}

static void cancels_files(void) {
    cancel_fd = make("a", "x");
    cancel(writes_forever, 100, 500);
    cancel(reads_forever, 50, 300);
    cancel(syncs_forever, 20, 500);
    cancel(opens_forever, 50, 500);
    cancel(prints_forever, 100, 500);
    cancel(is_not_cancelled, 5, 100);
}

/* Not for a mirror, which waits for its locks in the kernel. */
static void cancels_waits(void) {
    cancel_fd = make("a", "x");
    char path[] = "/tmp/probe-XXXXXX", name[64];
    CHECK(mkdtemp(path));
    snprintf(name, sizeof name, "%s/fifo", path);
    CHECK(mkfifo(name, 0600) == 0 && symlink(name, "link") == 0);
    fifo = name;
    cancel(opens_fifo, 3, 5000);
    fifo = "link";
    cancel(opens_fifo, 3, 5000);
    CHECK(unlink(name) == 0 && rmdir(path) == 0);
    int pipes[2];
    char byte;
    CHECK(pipe(pipes) == 0);
    pid_t child = fork();
    if (child == 0) {
        alarm(60); /* ends the test if the cancellation does not */
        waits_for_lock(0);
        CHECK(write(pipes[1], "x", 1) == 1);
        pause();
    }
    CHECK(read(pipes[0], &byte, 1) == 1);
    cancel(waits_for_lock, 3, 5000);
    CHECK(kill(child, SIGKILL) == 0 && waitpid(child, 0, 0) == child);
    waits_for_lock(0);
}

/* The next library after the preloaded one ends a thread that has set this in its next open. */
extern __thread int ends_in_open __attribute__((weak));

static void *is_ended_in_open(void *path) {
    ends_in_open = 1;
    open(path, O_RDONLY);
    return 0;
}

/* Not by a signal: the stack is unwound through the preloaded library's frames. */
static void ends_in_the_next_library(void) {
    CHECK(symlink("/dev/null", "link") == 0 && &ends_in_open);
    char *paths[] = {"/dev/null", "link"};
    for (int i = 0; i < 2; i++) {
        pthread_t thread;
        void *result;
        CHECK(pthread_create(&thread, 0, is_ended_in_open, paths[i]) == 0 && pthread_join(thread, &result) == 0);
        CHECK(result == PTHREAD_CANCELED);
    }
    close(make("a", "x"));
    holds("a", "x");
}

static void directories(void) {
    char here[PATH_MAX], name[PATH_MAX];
    CHECK(getcwd(here, sizeof here) && mkdir("d", 0755) == 0 && mkdir("d/e", 0755) == 0);
    CHECK(chdir("d") == 0 && getcwd(name, sizeof name) && strncmp(name, here, strlen(here)) == 0);
    CHECK(strcmp(name + strlen(here), "/d") == 0);
    close(make("f", "in d"));
    CHECK(chdir("..") == 0);
    holds("d/f", "in d");
    int dir = open("d", O_RDONLY | O_DIRECTORY), path = open("d", O_PATH | O_DIRECTORY);
    CHECK(dir >= 0 && path >= 0);
    int fd = openat(path, "g", O_CREAT | O_RDWR, 0600);
    CHECK(fd >= 0 && faccessat(dir, "g", R_OK, 0) == 0 && openat(fd, "x", O_RDONLY) == -1 && errno == ENOTDIR);
    CHECK(openat(path, "../d/e/../f", O_RDONLY) >= 0);
    CHECK(read(path, name, 1) == -1 && errno == EBADF);
    CHECK(fchdir(path) == 0 && access("g", F_OK) == 0 && chdir("/") == 0 && access("etc", F_OK) == 0);
    CHECK(openat(path, "f", O_RDONLY) >= 0 && openat(path, "/etc/passwd", O_RDONLY) >= 0);
    CHECK(chdir(here) == 0 && getcwd(name, sizeof name) && strcmp(name, here) == 0);
    for (int i = 0; i < 300; i++) {
        snprintf(name, sizeof name, "d/e/a-file-with-a-name-of-some-length-%d", i);
        close(make(name, ""));
    }
    DIR *list = opendir("d/e");
    CHECK(list);
    int count = 0;
    long middle = 0;
    char there[256] = "";
    struct dirent *entry;
    while ((entry = readdir(list))) {
        if (count == 150) {
            middle = telldir(list);
            entry = readdir(list);
            strcpy(there, entry->d_name);
            count++;
        }
        count++;
    }
    CHECK(count == 302);
    seekdir(list, middle);
    CHECK((entry = readdir(list)) && strcmp(entry->d_name, there) == 0);
    rewinddir(list);
    for (count = 0; readdir(list); count++) {}
    CHECK(count == 302 && closedir(list) == 0);
    CHECK(rmdir("d/e") == -1 && errno == ENOTEMPTY && rmdir("d/f") == -1 && errno == ENOTDIR);
    CHECK(unlink("d") == -1 && (errno == EISDIR || errno == EPERM));
}

static void links(void) {
    char here[PATH_MAX], path[2 * PATH_MAX], outside[] = "/tmp/probe-XXXXXX";
    CHECK(getcwd(here, sizeof here) && mkdtemp(outside));
    close(make("a", "here"));
    CHECK(symlink("a", "relative") == 0 && symlink("/etc/passwd", "away") == 0);
    snprintf(path, sizeof path, "%s/a", here);
    CHECK(symlink(path, "absolute") == 0);
    holds("relative", "here");
    holds("absolute", "here"); /* through / and back into the mount */
    int fd = open("away", O_RDONLY);
    char got[PATH_MAX];
    CHECK(fd >= 0 && read(fd, got, 4) == 4 && memcmp(got, "root", 4) == 0);
    CHECK(open("away", O_RDONLY | O_NOFOLLOW) == -1 && errno == ELOOP);
    struct stat st;
    CHECK(lstat("away", &st) == 0 && S_ISLNK(st.st_mode) && stat("away", &st) == 0 && S_ISREG(st.st_mode));
    CHECK(readlink("away", got, sizeof got) == 11 && memcmp(got, "/etc/passwd", 11) == 0);
    CHECK(realpath("absolute", got) && strcmp(got, path) == 0);
    CHECK(realpath("away", got) && strcmp(got, "/etc/passwd") == 0);
    char in[PATH_MAX];
    snprintf(in, sizeof in, "%s/in", outside);
    CHECK(symlink(here, in) == 0);
    snprintf(path, sizeof path, "%s/in/a", outside);
    holds(path, "here"); /* from outside, through a link */
    snprintf(path, sizeof path, "%s/../..%s/a", outside, here);
    holds(path, "here"); /* through .. */
    snprintf(path, sizeof path, "%s/in/new", outside);
    fd = open(path, O_CREAT | O_EXCL | O_WRONLY, 0644);
    CHECK(fd >= 0 && access("new", F_OK) == 0);
    CHECK(chdir(in) == 0 && access("a", F_OK) == 0 && chdir(here) == 0);
    CHECK(symlink("loop", "loop") == 0 && open("loop", O_RDONLY) == -1 && errno == ELOOP);
    CHECK(rename("a", "b/c") == -1 && errno == ENOENT && link("a", "hard") == 0);
    CHECK(stat("hard", &st) == 0 && st.st_nlink == 2);
    fd = open("a", O_RDONLY);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    ssize_t bytes = readlink(path, got, sizeof got - 1);
    CHECK(bytes > 0 && (got[bytes] = 0, strcmp(strrchr(got, '/'), "/a") == 0));
    holds(path, "here");
    snprintf(path, sizeof path, "/dev/fd/%d", fd);
    CHECK(stat(path, &st) == 0 && st.st_size == 4);
    CHECK(unlink(in) == 0 && rmdir(outside) == 0);
}

static void across(void) { /* only where DIR is on another file system than /tmp */
    char outside[] = "/tmp/probe-XXXXXX";
    int fd = mkstemp(outside);
    close(make("a", "x"));
    CHECK(fd >= 0 && rename("a", outside) == -1 && errno == EXDEV && rename(outside, "b") == -1 && errno == EXDEV);
    CHECK(link("a", outside) == -1 && (errno == EXDEV || errno == EEXIST) && link(outside, "c") == -1 && errno == EXDEV);
    int ours = open("a", O_RDWR);
    CHECK(copy_file_range(fd, 0, ours, 0, 10, 0) == -1 && errno == EXDEV);
    CHECK(unlink(outside) == 0);
}

static void attributes(void) {
    int fd = make("a", "12345");
    struct stat one, two;
    struct statx three;
    CHECK(stat("a", &one) == 0 && fstat(fd, &two) == 0 && statx(fd, "", AT_EMPTY_PATH, STATX_ALL, &three) == 0);
    CHECK(one.st_size == 5 && one.st_ino == two.st_ino && three.stx_ino == one.st_ino && three.stx_size == 5);
    CHECK(one.st_mtime == three.stx_mtime.tv_sec && S_ISREG(one.st_mode) && one.st_dev == two.st_dev);
    CHECK(chmod("a", 0640) == 0 && stat("a", &one) == 0 && (one.st_mode & 07777) == 0640);
    CHECK(fchmod(fd, 0600) == 0 && fstat(fd, &one) == 0 && (one.st_mode & 07777) == 0600);
    struct timespec times[2] = {{1000, 5}, {2000, 7}};
    CHECK(utimensat(AT_FDCWD, "a", times, 0) == 0 && stat("a", &one) == 0);
    CHECK(one.st_mtim.tv_sec == 2000 && one.st_mtim.tv_nsec == 7 && one.st_atim.tv_sec == 1000);
    times[0].tv_nsec = UTIME_OMIT;
    times[1].tv_nsec = UTIME_NOW;
    CHECK(futimens(fd, times) == 0 && stat("a", &one) == 0 && one.st_atim.tv_sec == 1000 && one.st_mtime > 3000);
    CHECK(truncate("a", 2) == 0 && fstat(fd, &one) == 0 && one.st_size == 2 && ftruncate(fd, 9) == 0);
    CHECK(fallocate(fd, 0, 0, 100) == 0 || errno == EOPNOTSUPP);
    umask(027);
    CHECK(mkdir("d", 0777) == 0 && stat("d", &one) == 0 && (one.st_mode & 0777) == 0750);
    CHECK(close(open("e", O_CREAT | O_WRONLY, 0666)) == 0 && stat("e", &one) == 0 && (one.st_mode & 0777) == 0640);
    CHECK(access("a", R_OK) == 0 && access("none", F_OK) == -1 && errno == ENOENT);
    CHECK(fsync(fd) == 0 && fdatasync(fd) == 0 && flock(fd, LOCK_EX) == 0 && flock(fd, LOCK_UN) == 0);
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    CHECK(fcntl(fd, F_SETLK, &lock) == 0 && (lock.l_type = F_UNLCK, fcntl(fd, F_SETLK, &lock) == 0));
}

static void maps(void) {
    long page = sysconf(_SC_PAGESIZE);
    int fd = make("a", "mapped");
    char *map = mmap(0, page, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    CHECK(map != MAP_FAILED && memcmp(map, "mapped", 6) == 0 && map[6] == 0);
    map[0] = 'X';
    holds("a", "mapped");
    CHECK(close(fd) == 0 && map[1] == 'a' && munmap(map, page) == 0);
    fd = open("a", O_RDONLY);
    map = mmap(0, page, PROT_READ, MAP_SHARED, fd, 0);
    CHECK(map != MAP_FAILED && memcmp(map, "mapped", 6) == 0 && munmap(map, page) == 0);
    CHECK(mmap(0, page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED && errno == EACCES);
    CHECK(mmap(0, page, PROT_READ, MAP_PRIVATE, fd, 1) == MAP_FAILED && errno == EINVAL);
    fd = open("a", O_WRONLY);
    CHECK(mmap(0, page, PROT_READ, MAP_PRIVATE, fd, 0) == MAP_FAILED && errno == EACCES);
}

static void refused(void) { /* not on the kernel's own: calls that only a preloaded file system refuses */
    int fd = make("a", "x"), other = open("/dev/null", O_RDWR);
    CHECK(mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED && errno == ENODEV);
    char params[256] = {0};
    CHECK(syscall(SYS_io_uring_setup, 1, params) == -1 && errno == ENOSYS);
    CHECK(splice(fd, 0, other, 0, 10, 0) == -1 && errno == EINVAL);
    CHECK(shutdown(fd, 0) == -1 && errno == ENOTSOCK);
    CHECK(getdents64(fd, params, 200) == -1 && errno == ENOTDIR);
    holds("a", "x");
}

static void waits(void) {
    int fd = make("a", "x"), pipes[2];
    CHECK(pipe(pipes) == 0);
    struct pollfd polled[2] = {{.fd = fd, .events = POLLIN | POLLOUT}, {.fd = pipes[0], .events = POLLIN}};
    CHECK(poll(polled, 2, 10000) == 1 && polled[0].revents == (POLLIN | POLLOUT) && polled[1].revents == 0);
    CHECK(write(pipes[1], "x", 1) == 1 && poll(polled, 2, -1) == 2 && polled[1].revents == POLLIN);
    fd_set set, out;
    FD_ZERO(&set);
    FD_ZERO(&out);
    FD_SET(fd, &set);
    FD_SET(pipes[0], &set);
    FD_SET(fd, &out);
    int most = (fd > pipes[0] ? fd : pipes[0]) + 1;
    CHECK(select(most, &set, &out, 0, 0) == 3 && FD_ISSET(fd, &set) && FD_ISSET(pipes[0], &set) && FD_ISSET(fd, &out));
    int epoll = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN};
    CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == -1 && errno == EPERM);
}

static void programs(void) { /* a program file and a script in DIR */
    int in = open(self, O_RDONLY), out = open("copy", O_CREAT | O_WRONLY, 0755);
    char block[65536];
    ssize_t bytes;
    while ((bytes = read(in, block, sizeof block)) > 0) CHECK(write(out, block, bytes) == bytes);
    close(out);
    int fd = make("a", "");
    CHECK(dup2(fd, 7) == 7);
    pid_t child = fork();
    if (child == 0) {
        execl("./copy", "copy", "inherits", ".", (char *)0);
        _exit(9);
    }
    wait_for(child);
    holds("a", "child ");
    close(make("script", "#!/bin/sh\necho \"$0 $1\" >&7\n"));
    CHECK(access("script", X_OK) == -1 && errno == EACCES);
    CHECK(execl("./script", "x", (char *)0) == -1 && errno == EACCES);
    CHECK(chmod("script", 0755) == 0 && system("./script argument") == 0);
    CHECK(lseek(fd, 0, SEEK_CUR) > 20);
}

static void statically(void) { /* a statically linked program, named by PROBE_STATIC, inherits descriptor 7 */
    int fd = make("a", "");
    CHECK(dup2(fd, 7) == 7);
    pid_t child = fork();
    if (child == 0) {
        execl(getenv("PROBE_STATIC"), "static", "inherits", "/", (char *)0);
        _exit(9);
    }
    wait_for(child);
    CHECK(write(fd, "after", 5) == 5);
    holds("a", "child after");
    CHECK(execl("/nothing/static", "x", (char *)0) == -1 && write(fd, "!", 1) == 1);
}

static void quiet_handler(int number) {
    (void)number;
}

static int *counted;
static void counts(int number) {
    (void)number;
    __atomic_add_fetch(counted, 1, __ATOMIC_SEQ_CST);
}

static void is_default(int number) {
    struct sigaction now;
    CHECK(sigaction(number, 0, &now) == 0 && now.sa_handler == SIG_DFL && (now.sa_flags & SA_RESETHAND));
}

static void ends_by(pid_t child, int number) {
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == number);
}

static sigjmp_buf out_of_fault;
static void leaves_fault(int number, siginfo_t *info, void *context) {
    (void)context;
    CHECK(info->si_addr == (void *)16);
    is_default(number);
    siglongjmp(out_of_fault, 1);
}

static void again(int number) {
    struct sigaction action = {.sa_handler = again, .sa_flags = SA_RESETHAND | SA_NODEFER};
    hits++;
    is_default(number);
    CHECK(sigaction(number, &action, 0) == 0);
}

/* In a child: a signal meets a wait for a lock, the next one the default action. */
static void once_in_a_call(void) {
    struct sigaction action = {.sa_sigaction = info_handler, .sa_flags = SA_SIGINFO | SA_RESETHAND}, old;
    CHECK(sigaction(SIGUSR1, &action, 0) == 0 && sigaction(SIGUSR1, 0, &old) == 0);
    CHECK(old.sa_sigaction == info_handler && (old.sa_flags & SA_RESETHAND) && (old.sa_flags & SA_SIGINFO));
    int mine = open("a", O_RDWR);
    says_so();
    CHECK(flock(mine, LOCK_EX) == -1 && errno == EINTR && info_ok == 1);
    is_default(SIGUSR1);
    is_unblocked();
    close(make("b", "once"));
    raise(SIGUSR1);
}

static pthread_barrier_t both;
static void *sends_to_itself(void *unused) {
    pthread_barrier_wait(&both);
    pthread_kill(pthread_self(), SIGUSR1);
    return unused;
}

/* A handler with SA_RESETHAND: the first signal calls it, wherever it comes, and the next one gets the default
 * action. */
static void handlers_for_once(void) {
    int fd = make("a", ""), *count = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    struct rlimit no_core = {0, 0};
    CHECK(setrlimit(RLIMIT_CORE, &no_core) == 0 && count != MAP_FAILED);
    CHECK(flock(fd, LOCK_EX) == 0 && pipe(about_to) == 0);
    pid_t child = fork();
    if (child == 0) {
        once_in_a_call();
        _exit(9);
    }
    until_it_waits(child);
    union sigval value = {.sival_int = 77};
    CHECK(sigqueue(child, SIGUSR1, value) == 0);
    ends_by(child, SIGUSR1);
    holds("b", "once");
    /* A fault in the library does not use up the program's handler, and the handler does not disturb the library's
     * faults. */
    struct sigaction action = {.sa_sigaction = leaves_fault, .sa_flags = SA_SIGINFO | SA_RESETHAND}, old;
    child = fork();
    if (child == 0) {
        CHECK(sigaction(SIGSEGV, &action, 0) == 0);
        for (int i = 0; i < 3; i++) CHECK(open((char *)16, O_RDONLY) == -1 && errno == EFAULT);
        CHECK(sigaction(SIGSEGV, 0, &old) == 0 && old.sa_sigaction == leaves_fault);
        if (!sigsetjmp(out_of_fault, 1)) *(volatile int *)16 = 1;
        is_default(SIGSEGV);
        for (int i = 0; i < 3; i++) CHECK(open((char *)16, O_RDONLY) == -1 && errno == EFAULT);
        close(make("c", "twice"));
        *(volatile int *)16 = 1;
    }
    ends_by(child, SIGSEGV);
    holds("c", "twice");
    /* A handler as in System V: it sets itself again. */
    action.sa_handler = again;
    action.sa_flags = SA_RESETHAND | SA_NODEFER;
    CHECK(sigaction(SIGUSR2, &action, 0) == 0 && sigaction(SIGCHLD, &action, 0) == 0);
    for (int i = 1; i < 4; i++) CHECK(raise(SIGUSR2) == 0 && hits == i);
    CHECK(raise(SIGCHLD) == 0 && raise(SIGCHLD) == 0 && hits == 5);
    CHECK(signal(SIGCHLD, SIG_DFL) == again && raise(SIGCHLD) == 0 && hits == 5);
    /* A child in its parent's memory has its own handlers. */
    action.sa_handler = quiet_handler;
    CHECK(sigaction(SIGUSR2, &action, 0) == 0);
    child = vfork();
    if (child == 0) {
        raise(SIGUSR2);
        raise(SIGUSR2);
        _exit(9);
    }
    ends_by(child, SIGUSR2);
    CHECK(sigaction(SIGUSR2, 0, &old) == 0 && old.sa_handler == quiet_handler && raise(SIGUSR2) == 0);
    is_default(SIGUSR2);
    /* Two threads at once. */
    for (int round = 0; round < 50; round++) {
        *count = 0;
        child = fork();
        if (child == 0) {
            pthread_t threads[2];
            counted = count;
            action.sa_handler = counts;
            CHECK(sigaction(SIGUSR1, &action, 0) == 0 && pthread_barrier_init(&both, 0, 2) == 0);
            for (int i = 0; i < 2; i++) CHECK(pthread_create(&threads[i], 0, sends_to_itself, 0) == 0);
            for (int i = 0; i < 2; i++) pthread_join(threads[i], 0);
            _exit(9);
        }
        ends_by(child, SIGUSR1);
        CHECK(*count <= 1);
    }
}

/* The new stack of a thread that syscall() creates: the address to which it returns, then the function. */
static char stack[1 << 16] __attribute__((aligned(16)));
static void *stack_for(void (*function)(void)) {
    void (**top)(void) = (void (**)(void))(stack + sizeof stack - 64);
    *top = function;
    return top;
}

static int closed_by_child;
static void closes(void) {
    CHECK(close(closed_by_child) == 0 && fcntl(closed_by_child, F_GETFD) == -1);
    _exit(0);
}

static int is_running;
static void ends(void) {
    syscall(SYS_exit, 0);
}

/* 1 if the process counts as single-threaded, 0 if not, -1 if the mount does not tell. */
static int alone(void) {
    char answer;
    return getxattr(".", "user.hearth.alone", &answer, 1) == 1 ? answer == '1' : -1;
}

/* A thread that the C library does not know. */
static void threads_by_number(void) {
    CHECK(alone() != 0);
    pid_t child = vfork();
    if (child == 0) _exit(0);
    wait_for(child);
    child = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    if (child == 0) _exit(0);
    wait_for(child);
    CHECK(alone() != 0);
    int flags = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM | CLONE_CHILD_CLEARTID;
    is_running = 1;
    CHECK(syscall(SYS_clone, flags, stack_for(ends), 0, &is_running, 0) > 0);
    for (int wait = 0; __atomic_load_n(&is_running, __ATOMIC_SEQ_CST) && wait < 10000; wait++) usleep(1000);
    CHECK(is_running == 0 && alone() != 1);
    close(make("a", "x"));
}

#ifdef OWN_CALL /* a call that the library does not see */
static long makes(long number, long one, long two) {
    long result;
    register long none __asm__("r10") = 0;
    __asm__ volatile("syscall" : "=a"(result) : "0"(number), "D"(one), "S"(two), "d"(0), "r"(none) : "rcx", "r11", "memory");
    return result;
}
#else
#define makes syscall
#endif

/* Children that the C library does not know. They keep files that their parent closes. */
static void forks_by_number(void) {
    unsigned long long how[11] = {[4] = SIGCHLD};
    char byte, got[20];
    for (int round = 0; round < 6; round++) {
        int fd = make("a", "first "), pipes[2];
        CHECK(pipe(pipes) == 0);
#ifndef OWN_CALL
        CHECK(round % 2 == 0 || unlink("a") == 0);
#endif
        pid_t child = round / 2 == 0 ? makes(SYS_fork, 0L, 0L)
            : round / 2 == 1 ? makes(SYS_clone, (long)SIGCHLD, 0L) : makes(SYS_clone3, (long)how, sizeof how);
        if (child == 0) {
            CHECK(read(pipes[0], &byte, 1) == 1 && write(fd, "second", 6) == 6);
            CHECK(pread(fd, got, sizeof got, 0) == 12 && memcmp(got, "first second", 12) == 0);
            _exit(0);
        }
        CHECK(child > 0 && close(fd) == 0);
        for (int i = 0; i < 2000; i++) {
            int other = open("b", O_RDWR | O_CREAT, 0644);
            CHECK(other >= 0 && write(other, "x", 1) == 1 && close(other) == 0);
        }
        CHECK(write(pipes[1], "x", 1) == 1);
        wait_for(child);
        CHECK(close(pipes[0]) == 0 && close(pipes[1]) == 0);
    }
#ifndef OWN_CALL
    /* A child in its parent's memory has its own descriptors. */
    int fd = closed_by_child = make("c", "kept");
    pid_t child = syscall(SYS_clone, CLONE_VM | CLONE_VFORK | SIGCHLD, stack_for(closes), 0, 0, 0);
    CHECK(child > 0);
    wait_for(child);
    CHECK(lseek(fd, 0, SEEK_CUR) == 4 && write(fd, "!", 1) == 1);
    is_unblocked();
#endif
}

/* Signals that arrive while a child in the parent's memory is created and while it runs. */
static void vfork_signals(void) {
    int fd = make("a", "");
    handler_fd = make("b", "");
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART};
    struct itimerval timer = {{0, 200}, {0, 200}}, off = {{0, 0}, {0, 0}};
    CHECK(sigaction(SIGALRM, &action, 0) == 0);
    for (int round = 0; round < 100; round++) {
        CHECK(setitimer(ITIMER_REAL, &timer, 0) == 0);
        int before = hits;
        pid_t child = vfork();
        if (child == 0) {
            if (round % 3 == 0) { /* a signal to the child itself */
                if (fork() == 0) _exit(0);
                if (vfork() == 0) _exit(0);
            }
            close(fd);
            execl("/bin/true", "true", (char *)0);
            _exit(9);
        }
        wait_for(child);
        is_unblocked();
        for (int wait = 0; hits == before && wait < 10000; wait++) usleep(100);
        CHECK(hits > before);
        CHECK(setitimer(ITIMER_REAL, &off, 0) == 0 && lseek(fd, 0, SEEK_CUR) == 0);
    }
    struct stat st;
    CHECK(fstat(handler_fd, &st) == 0 && st.st_size == hits);
}

/* A handler runs for the end of a child at any moment of an exec: the next program has the mask, and its handler
 * runs for the next child. */
static void exec_signals(void) {
    const char *left = getenv("PROBE_LEFT");
    int rounds = left ? atoi(left) : 200;
    is_unblocked();
    if (rounds == 0) return;
    if (!left) {
        int fd = make("a", "");
        CHECK(dup2(fd, 7) == 7);
    }
    CHECK(write(7, "x", 1) == 1 && lseek(7, 0, SEEK_CUR) == 201 - rounds);
    struct sigaction action = {.sa_handler = quiet_handler};
    CHECK(sigaction(SIGCHLD, &action, 0) == 0);
    if (fork() == 0) {
        usleep(rounds * 37 % 2500);
        _exit(0);
    }
    char number[16];
    snprintf(number, sizeof number, "%d", rounds - 1);
    CHECK(setenv("PROBE_LEFT", number, 1) == 0);
    CHECK(execl("/nothing", "x", (char *)0) == -1 && errno == ENOENT);
    execl(self, self, "exec_signals", ".", (char *)0);
    _exit(9);
}

static void chroots(void) { /* a folder of another root, by the same path */
    char here[PATH_MAX], jail[] = "/tmp/probe-XXXXXX", inside[2 * PATH_MAX], *slash;
    if (geteuid() != 0) return;
    close(make("a", "outside"));
    CHECK(getcwd(here, sizeof here) && mkdtemp(jail));
    snprintf(inside, sizeof inside, "%s%s", jail, here);
    for (slash = inside + strlen(jail) + 1; (slash = strchr(slash, '/')); *slash++ = '/') {
        *slash = 0;
        CHECK(mkdir(inside, 0755) == 0 || errno == EEXIST);
    }
    CHECK(mkdir(inside, 0755) == 0);
    pid_t child = fork();
    if (child == 0) {
        CHECK(chroot("/") == 0 && access(here, F_OK) == 0);
        int fd = open("a", O_RDONLY);
        holds("a", "outside");
        CHECK(chroot(jail) == 0 && chdir("/") == 0 && chdir(here) == 0);
        CHECK(access("a", F_OK) == -1 && errno == ENOENT);
        close(make("a", "jail"));
        holds("a", "jail");
        char text[8];
        CHECK(read(fd, text, 7) == 7 && memcmp(text, "outside", 7) == 0);
        _exit(0);
    }
    wait_for(child);
    holds("a", "outside");
    strcat(inside, "/a");
    holds(inside, "jail");
    char remove[2 * PATH_MAX];
    snprintf(remove, sizeof remove, "rm -r %s", jail);
    CHECK(system(remove) == 0);
}

static void of_others(void) { /* by /proc: a file that another process has open, or nothing at all */
    char path[64], text[16];
    int fd = make("a", "content");
    pid_t parent = getpid(), child = fork();
    if (child == 0) {
        snprintf(path, sizeof path, "/proc/%d/fd/%d", parent, fd);
        int theirs = open(path, O_RDONLY);
        CHECK(theirs == -1 || read(theirs, text, sizeof text) != 0);
        theirs = open(path, O_WRONLY | O_APPEND);
        CHECK(theirs == -1 || write(theirs, "more", 4) == 4);
        _exit(theirs == -1 ? 2 : 0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) != 1);
    holds("a", WEXITSTATUS(status) == 2 ? "content" : "contentmore");
}

static const struct {
    const char *name;
    void (*run)(void);
} cases[] = {
    {"descriptors", descriptors}, {"close_ranges", close_ranges}, {"numbers_run_out", numbers_run_out},
    {"fork_shares_offset", fork_shares_offset}, {"fork_exec", fork_exec}, {"inherits", inherits},
    {"vfork_exec", vfork_exec}, {"vfork_umask", vfork_umask}, {"vfork_first", vfork_first},
    {"vfork_opens", vfork_opens}, {"vfork_moves", vfork_moves}, {"spawns", spawns}, {"threads", threads}, {"stdio", stdio},
    {"bad_buffers", bad_buffers}, {"signals", signals}, {"lock_waits", lock_waits},
    {"program_faults", program_faults}, {"cancels", cancels}, {"cancels_files", cancels_files},
    {"cancels_waits", cancels_waits}, {"ends_in_the_next_library", ends_in_the_next_library},
    {"directories", directories}, {"links", links},
    {"across", across}, {"attributes", attributes}, {"maps", maps}, {"refused", refused}, {"waits", waits},
    {"chroots", chroots}, {"of_others", of_others}, {"programs", programs}, {"statically", statically},
    {"vfork_signals", vfork_signals}, {"exec_signals", exec_signals},
    {"handlers_for_once", handlers_for_once}, {"forks_by_number", forks_by_number},
    {"threads_by_number", threads_by_number},
};

int main(int count, char **arguments) {
    self = realpath(arguments[0], 0);
    if (!self) self = "/proc/self/exe";
    CHECK(count == 3 && chdir(arguments[2]) == 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (strcmp(arguments[1], cases[i].name) == 0) {
            cases[i].run();
            return 0;
        }
    return 2;
}
