/* One of the processes that run a sequence of calls in lock step: `actor FOLDER`. Reads calls from its standard input, one a
 * line, and answers each with one line: the result or the name of the error, and what the call read. Numbers that may differ
 * between two runs are left out (times of now, processes) or marked (`i=` stands before the number of an inode).
 *
 * The words of a call are those of the system call, with descriptors as numbers. `.` as the descriptor of a directory is
 * AT_FDCWD, `""` the empty path, `@N` in a path a name of N bytes. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/openat2.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#define COUNT(array) (sizeof array / sizeof *array)
#define WORDS 16
#define BYTES (1 << 20)
#define NAMES 256

static const char *folder, *program;
static char *words[WORDS + 1];
static char answer[BYTES];
static size_t answered;
static char buffer[BYTES];
/* Maps of this process. */
static struct { char *start; size_t length; } maps[2];
static sigjmp_buf after_fault;

static void say(const char *format, ...) {
    va_list list;
    va_start(list, format);
    answered += vsnprintf(answer + answered, sizeof answer - answered, format, list);
    va_end(list);
    if (answered >= sizeof answer) abort();
}

static void say_error(void) {
    const char *name = strerrorname_np(errno);
    name ? say("%s", name) : say("error %d", errno);
}

/* The result of a call; whether it succeeded. */
static int result(long value) {
    if (value < 0) say_error();
    else say("%ld", value);
    return value >= 0;
}

/* Bytes, as runs. */
static void say_bytes(const char *bytes, long count) {
    for (long at = 0; at < count;) {
        long end = at;
        while (end < count && bytes[end] == bytes[at]) end++;
        unsigned char byte = bytes[at];
        byte > ' ' && byte < 127 ? say(" %ld*%c", end - at, byte) : say(" %ld*\\%d", end - at, byte);
        at = end;
    }
}

/* A path, without what differs between two runs. */
static void say_path(const char *path) {
    size_t length = strlen(folder), root = strstr(folder, "/n1/") - folder;
    const char *number = strstr(path, "/#");
    if (number) say(" unnamed%s", number + 2 + strspn(number + 2, "0123456789"));
    else if (strncmp(path, folder, length) == 0) say(" FOLDER%s", path + length);
    else if (strncmp(path, folder, root) == 0) say(" ROOT%s", path + root);
    else say(" %s", path);
}

/* The target of a link. */
static void say_link(int fd, const char *path) {
    long got = readlinkat(fd, path, buffer, 4096);
    if (got < 0) say_error();
    else {
        buffer[got] = 0;
        say_path(buffer);
    }
}

static const struct { const char *name; long value; } constants[] = {
    {"0", 0},
#define CONSTANT(name) {#name, name}
    CONSTANT(O_RDONLY), CONSTANT(O_WRONLY), CONSTANT(O_RDWR), CONSTANT(O_CREAT), CONSTANT(O_EXCL), CONSTANT(O_TRUNC),
    CONSTANT(O_APPEND), CONSTANT(O_DIRECTORY), CONSTANT(O_NOFOLLOW), CONSTANT(O_PATH), CONSTANT(O_TMPFILE),
    CONSTANT(O_NONBLOCK), CONSTANT(O_CLOEXEC), CONSTANT(O_SYNC), CONSTANT(O_NOATIME), CONSTANT(O_DIRECT),
    CONSTANT(AT_SYMLINK_NOFOLLOW), CONSTANT(AT_SYMLINK_FOLLOW), CONSTANT(AT_EMPTY_PATH), CONSTANT(AT_REMOVEDIR),
    CONSTANT(AT_EACCESS), CONSTANT(RENAME_NOREPLACE), CONSTANT(RENAME_EXCHANGE), CONSTANT(RENAME_WHITEOUT),
    CONSTANT(SEEK_SET), CONSTANT(SEEK_CUR), CONSTANT(SEEK_END), CONSTANT(SEEK_DATA), CONSTANT(SEEK_HOLE),
    CONSTANT(LOCK_SH), CONSTANT(LOCK_EX), CONSTANT(LOCK_UN), CONSTANT(LOCK_NB),
    CONSTANT(F_RDLCK), CONSTANT(F_WRLCK), CONSTANT(F_UNLCK), CONSTANT(F_SETLK), CONSTANT(F_OFD_SETLK),
    CONSTANT(F_GETLK), CONSTANT(F_OFD_GETLK),
    CONSTANT(FALLOC_FL_KEEP_SIZE), CONSTANT(FALLOC_FL_PUNCH_HOLE), CONSTANT(FALLOC_FL_ZERO_RANGE),
    CONSTANT(FALLOC_FL_COLLAPSE_RANGE), CONSTANT(FALLOC_FL_INSERT_RANGE),
    CONSTANT(XATTR_CREATE), CONSTANT(XATTR_REPLACE),
    CONSTANT(R_OK), CONSTANT(W_OK), CONSTANT(X_OK), CONSTANT(F_OK),
    CONSTANT(PROT_READ), CONSTANT(PROT_WRITE),
    CONSTANT(S_IFREG), CONSTANT(S_IFIFO), CONSTANT(S_IFSOCK), CONSTANT(S_IFCHR),
    CONSTANT(RESOLVE_BENEATH), CONSTANT(RESOLVE_IN_ROOT), CONSTANT(RESOLVE_NO_SYMLINKS),
    CONSTANT(RESOLVE_NO_MAGICLINKS), CONSTANT(RESOLVE_NO_XDEV),
};

/* A number, decimal or octal, or names of constants with `|` between them. */
static long number(int word) {
    if (!words[word]) abort();
    char *end, text[256];
    long value = strtol(words[word], &end, 0);
    if (*end == 0) return value;
    value = 0;
    snprintf(text, sizeof text, "%s", words[word]);
    for (char *rest = text, *name; (name = strsep(&rest, "|"));) {
        size_t at = 0;
        while (at < COUNT(constants) && strcmp(constants[at].name, name)) at++;
        if (at == COUNT(constants)) {
            fprintf(stderr, "no such constant: %s\n", name);
            abort();
        }
        value |= constants[at].value;
    }
    return value;
}

static int base(int word) {
    return strcmp(words[word], ".") ? number(word) : AT_FDCWD;
}

static const char *path(int word) {
    static char paths[4][8192];
    static int next;
    char *to = paths[next++ % 4], *start = to;
    const char *from = words[word];
    if (strcmp(from, "\"\"") == 0) return "";
    if (strncmp(from, "FOLDER", 6) == 0) {
        to += sprintf(to, "%s", folder);
        from += 6;
    }
    while (*from) {
        if (*from != '@') {
            *to++ = *from++;
            continue;
        }
        char *end;
        long count = strtol(from + 1, &end, 10);
        memset(to, 'x', count);
        to += count;
        from = end;
    }
    *to = 0;
    return start;
}

static int is(const char *name) {
    return strcmp(words[0], name) == 0;
}

static char kind(mode_t mode) {
    return S_ISREG(mode) ? 'f' : S_ISDIR(mode) ? 'd' : S_ISLNK(mode) ? 'l' : S_ISFIFO(mode) ? 'p' : S_ISSOCK(mode) ? 's' : 'c';
}

/* The size of a directory is the file system's own business. */
static void say_status(mode_t mode, long links, long size, unsigned uid, unsigned gid, unsigned long inode) {
    say(" %c%04o n=%ld", kind(mode), mode & 07777, links);
    if (!S_ISDIR(mode)) say(" s=%ld", size);
    say(" %u:%u i=%lu", uid, gid, inode);
}

static void status(int failed, const struct stat *found) {
    if (result(failed))
        say_status(found->st_mode, found->st_nlink, found->st_size, found->st_uid, found->st_gid, found->st_ino);
}

static char *fill(long count, int word) {
    memset(buffer, words[word][0], count);
    return buffer;
}

static int compare(const void *one, const void *other) {
    return strcmp(*(char *const *)one, *(char *const *)other);
}

/* Reads the entries of an open directory, sorted, as `NAME:KIND,i=INODE`; returns the answer of the last call. */
static long entries(int fd, char **names, size_t *count) {
    static char block[4096];
    long got = lseek(fd, 0, SEEK_SET);
    *count = 0;
    while (got >= 0 && (got = syscall(SYS_getdents64, fd, block, sizeof block)) > 0)
        for (long at = 0; at < got && *count < NAMES;) {
            struct dirent64 *entry = (void *)(block + at);
            static const char kinds[16] = {[DT_REG] = 'f', [DT_DIR] = 'd', [DT_LNK] = 'l', [DT_FIFO] = 'p',
                                           [DT_SOCK] = 's', [DT_CHR] = 'c', [DT_UNKNOWN] = '?'};
            if (asprintf(&names[(*count)++], "%s:%c,i=%lu", entry->d_name, kinds[entry->d_type & 15], entry->d_ino) < 0) abort();
            at += entry->d_reclen;
        }
    qsort(names, *count, sizeof *names, compare);
    return got;
}

static void list(int fd) {
    char *names[NAMES];
    size_t count;
    result(entries(fd, names, &count));
    for (size_t at = 0; at < count; at++) {
        say(" %s", names[at]);
        free(names[at]);
    }
}

/* All that is below an open directory: attributes, targets of links, contents. */
static void tree(int fd, int depth) {
    char *names[NAMES];
    size_t count;
    result(entries(fd, names, &count));
    say("(");
    for (size_t at = 0; at < count; at++) {
        struct stat found = {0};
        *strchr(names[at], ':') = 0;
        if (strcmp(names[at], ".") && strcmp(names[at], "..")) {
            say(" %s ", names[at]);
            status(fstatat(fd, names[at], &found, AT_SYMLINK_NOFOLLOW), &found);
            if (S_ISLNK(found.st_mode)) say_link(fd, names[at]);
            if ((S_ISREG(found.st_mode) || S_ISDIR(found.st_mode)) && depth < 8) {
                int below = openat(fd, names[at], O_RDONLY);
                if (below < 0) say_error();
                else if (S_ISDIR(found.st_mode)) tree(below, depth + 1);
                else say_bytes(buffer, pread(below, buffer, sizeof buffer, 0));
                close(below);
            }
        }
        free(names[at]);
    }
    say(")");
}

/* Calls that open or change descriptors. */
static int on_descriptors(void) {
    if (is("open")) {
        result(openat(base(1), path(2), number(3), number(4)));
    } else if (is("open2")) {
        struct open_how how = {.flags = number(3), .resolve = number(4)};
        result(syscall(SYS_openat2, base(1), path(2), &how, sizeof how));
    } else if (is("reopen")) {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%ld", number(1));
        result(open(link, number(2)));
    } else if (is("close")) result(close(number(1)));
    else if (is("dup")) result(dup(number(1)));
    else if (is("dup2")) result(dup2(number(1), number(2)));
    else if (is("dup3")) result(dup3(number(1), number(2), number(3)));
    else if (is("dupfd")) result(fcntl(number(1), F_DUPFD, number(2)));
    else if (is("getfd")) result(fcntl(number(1), F_GETFD));
    else if (is("setfd")) result(fcntl(number(1), F_SETFD, number(2)));
    else if (is("getfl")) {
        long flags = fcntl(number(1), F_GETFL);
        flags < 0 ? say_error() : say("%lo", flags);
    } else if (is("setfl")) result(fcntl(number(1), F_SETFL, number(2)));
    else if (is("flock")) result(flock(number(1), number(2)));
    else if (is("lock")) {
        struct flock lock = {.l_type = number(3), .l_whence = SEEK_SET, .l_start = number(4), .l_len = number(5)};
        if (result(fcntl(number(1), number(2), &lock)) && (number(2) == F_GETLK || number(2) == F_OFD_GETLK)) {
            say(" %d", lock.l_type);
            if (lock.l_type != F_UNLCK) say(" %ld %ld", (long)lock.l_start, (long)lock.l_len);
            if (lock.l_type != F_UNLCK && words[6]) say(" %s", lock.l_pid < 0 ? "OFD" : "process");
        }
    } else return 0;
    return 1;
}

/* At the mount, the kernel counts the position after an append from an old end, if the file became longer elsewhere. */
static void position(int fd, long wrote) {
    if (wrote >= 0 && (fcntl(fd, F_GETFL) & O_APPEND)) lseek(fd, 0, SEEK_END);
}

/* At the mount, copies by the kernel end where it knows the end of the file, unless it asks for the attributes. */
static void learn_end(int fd) {
    struct stat found;
    fstat(fd, &found);
}

/* Calls on contents. */
static int on_contents(void) {
    if (is("read") || is("pread")) {
        long got = is("read") ? read(number(1), buffer, number(2)) : pread(number(1), buffer, number(2), number(3));
        if (result(got)) say_bytes(buffer, got);
    } else if (is("readv") || is("preadv")) {
        struct iovec parts[2] = {{buffer, number(2)}, {buffer + number(2), number(3)}};
        long got = is("readv") ? readv(number(1), parts, 2) : preadv(number(1), parts, 2, number(4));
        if (result(got)) say_bytes(buffer, got);
    } else if (is("write")) {
        long wrote = write(number(1), fill(number(2), 3), number(2));
        result(wrote);
        position(number(1), wrote);
    } else if (is("pwrite")) result(pwrite(number(1), fill(number(2), 3), number(2), number(4)));
    else if (is("writev") || is("pwritev")) {
        fill(number(2) + number(3), 4);
        struct iovec parts[2] = {{buffer, number(2)}, {buffer + number(2), number(3)}};
        long wrote = is("writev") ? writev(number(1), parts, 2) : pwritev(number(1), parts, 2, number(5));
        result(wrote);
        if (is("writev")) position(number(1), wrote);
    } else if (is("lseek")) {
        /* The end of a directory is the file system's own business. A call for the attributes would teach the kernel the end
         * of a file. */
        int is_file = number(3) <= SEEK_CUR || (faccessat(number(1), ".", F_OK, 0) < 0 && errno != EACCES);
        if (is_file) result(lseek(number(1), number(2), number(3)));
        else say("a directory");
    } else if (is("ftruncate")) result(ftruncate(number(1), number(2)));
    else if (is("truncate")) result(truncate(path(1), number(2)));
    else if (is("fallocate")) result(fallocate(number(1), number(2), number(3), number(4)));
    else if (is("fsync")) result(fsync(number(1)));
    else if (is("fdatasync")) result(fdatasync(number(1)));
    else if (is("copy")) {
        learn_end(number(1));
        loff_t from = number(2), to = number(4);
        long copied = copy_file_range(number(1), from < 0 ? NULL : &from, number(3), to < 0 ? NULL : &to, number(5), 0);
        if (result(copied)) say(" %ld %ld", (long)from, (long)to);
    } else if (is("sendfile")) {
        learn_end(number(2));
        off_t from = number(3);
        long sent = sendfile(number(1), number(2), from < 0 ? NULL : &from, number(4));
        if (result(sent)) say(" %ld", (long)from);
    } else return 0;
    return 1;
}

/* Calls on names. */
static int on_names(void) {
    if (is("link")) result(linkat(base(1), path(2), base(3), path(4), number(5)));
    else if (is("linkfd")) {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%ld", number(1));
        result(linkat(AT_FDCWD, link, base(2), path(3), AT_SYMLINK_FOLLOW));
    } else if (is("unlink")) result(unlinkat(base(1), path(2), number(3)));
    else if (is("rename")) result(renameat2(base(1), path(2), base(3), path(4), number(5)));
    else if (is("symlink")) result(symlinkat(path(1), base(2), path(3)));
    else if (is("mkdir")) result(mkdirat(base(1), path(2), number(3)));
    else if (is("mknod")) result(mknodat(base(1), path(2), number(3) | number(4), 0));
    else if (is("readlink")) {
        say_link(base(1), path(2));
    } else if (is("fdpath")) {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%ld", number(1));
        say_link(AT_FDCWD, link);
    } else if (is("chdir")) result(chdir(path(1)));
    else if (is("fchdir")) result(fchdir(number(1)));
    else if (is("getcwd")) getcwd(buffer, sizeof buffer) ? say_path(buffer) : say_error();
    else if (is("list") || is("tree")) {
        int fd = openat(base(1), path(2), O_RDONLY | O_DIRECTORY);
        if (fd < 0) say_error();
        else {
            is("list") ? list(fd) : tree(fd, 0);
            close(fd);
        }
    } else if (is("listfd")) list(number(1));
    else return 0;
    return 1;
}

/* An explicit time is small; all others are now. */
static void say_time(const char *name, const struct timespec *time) {
    time->tv_sec < 1000000000 ? say(" %s=%ld.%ld", name, (long)time->tv_sec, time->tv_nsec) : say(" %s=now", name);
}

/* Calls on attributes. */
static int on_attributes(void) {
    struct stat found;
    if (is("stat")) status(fstatat(base(1), path(2), &found, number(3)), &found);
    else if (is("fstat")) status(fstat(number(1), &found), &found);
    else if (is("blocks")) {
        if (result(fstat(number(1), &found))) say(" %ld %ld", (long)found.st_size, (long)found.st_blocks);
    } else if (is("statx")) {
        struct statx x;
        if (result(statx(base(1), path(2), number(3), STATX_BASIC_STATS, &x)))
            say_status(x.stx_mode, x.stx_nlink, x.stx_size, x.stx_uid, x.stx_gid, x.stx_ino);
    } else if (is("mtime")) {
        if (result(fstatat(base(1), path(2), &found, number(3)))) say_time("m", &found.st_mtim);
    } else if (is("access")) result(faccessat(base(1), path(2), number(3), number(4)));
    else if (is("chmod")) result(fchmodat(base(1), path(2), number(3), 0));
    else if (is("fchmod")) result(fchmod(number(1), number(2)));
    else if (is("chown")) result(fchownat(base(1), path(2), number(3), number(4), number(5)));
    else if (is("fchown")) result(fchown(number(1), number(2), number(3)));
    else if (is("utimens") || is("futimens")) {
        int by_path = is("utimens");
        struct timespec times[2] = {{number(by_path ? 3 : 2), 1}, {number(by_path ? 3 : 2), 2}};
        result(by_path ? utimensat(base(1), path(2), times, number(4)) : futimens(number(1), times));
    } else if (is("touch")) result(utimensat(base(1), path(2), NULL, number(3)));
    else if (is("ftouch")) result(futimens(number(1), NULL));
    else if (is("setxattr")) result(setxattr(path(1), words[2], fill(number(3), 4), number(3), number(5)));
    else if (is("lsetxattr")) result(lsetxattr(path(1), words[2], fill(number(3), 4), number(3), number(5)));
    else if (is("fsetxattr")) result(fsetxattr(number(1), words[2], fill(number(3), 4), number(3), number(5)));
    else if (is("getxattr") || is("lgetxattr") || is("fgetxattr")) {
        long got = is("getxattr") ? getxattr(path(1), words[2], buffer, number(3))
            : is("lgetxattr") ? lgetxattr(path(1), words[2], buffer, number(3))
            : fgetxattr(number(1), words[2], buffer, number(3));
        if (result(got) && number(3) > 0) say_bytes(buffer, got);
    } else if (is("removexattr")) result(removexattr(path(1), words[2]));
    else if (is("fremovexattr")) result(fremovexattr(number(1), words[2]));
    else if (is("listxattr") || is("flistxattr")) {
        long got = is("listxattr") ? listxattr(path(1), buffer, sizeof buffer) : flistxattr(number(1), buffer, sizeof buffer);
        char *names[64];
        size_t count = 0;
        for (long at = 0; at < got && count < COUNT(names); at += strlen(buffer + at) + 1) names[count++] = buffer + at;
        qsort(names, count, sizeof *names, compare);
        if (result(got))
            for (size_t at = 0; at < count; at++) say(" %s", names[at]);
    } else return 0;
    return 1;
}

static void on_fault(int signal) {
    siglongjmp(after_fault, signal);
}

/* Calls on maps: `map` keeps one, `private` makes one, stores to it if it is told to, and ends it. */
static int on_maps(void) {
    if (is("map")) {
        int at = number(1);
        if (maps[at].start) munmap(maps[at].start, maps[at].length);
        maps[at].length = number(4);
        maps[at].start = mmap(NULL, maps[at].length, number(3), MAP_SHARED, number(2), number(5));
        if (maps[at].start == MAP_FAILED) {
            maps[at].start = NULL;
            say_error();
        } else say("0");
    } else if (is("load") || is("store") || is("msync") || is("unmap")) {
        int at = number(1);
        if (!maps[at].start) {
            say("no map");
            return 1;
        }
        int fault = sigsetjmp(after_fault, 1);
        if (fault) say("%s", fault == SIGBUS ? "SIGBUS" : "SIGSEGV");
        else if (is("load")) {
            if (number(2) + number(3) <= (long)maps[at].length) {
                memcpy(buffer, maps[at].start + number(2), number(3));
                say_bytes(buffer, number(3));
            } else say("beyond");
        } else if (is("store")) {
            if (number(2) + number(3) <= (long)maps[at].length) {
                memset(maps[at].start + number(2), words[4][0], number(3));
                say("0");
            } else say("beyond");
        } else if (is("msync")) result(msync(maps[at].start, maps[at].length, MS_SYNC));
        else {
            result(munmap(maps[at].start, maps[at].length));
            maps[at].start = NULL;
        }
    } else if (is("private")) {
        long length = number(3);
        char *start = mmap(NULL, length, number(2), MAP_PRIVATE, number(1), number(4));
        if (start == MAP_FAILED) {
            say_error();
            return 1;
        }
        int fault = sigsetjmp(after_fault, 1);
        if (fault) say(" %s", fault == SIGBUS ? "SIGBUS" : "SIGSEGV");
        else {
            memcpy(buffer, start, length);
            say_bytes(buffer, length);
            if (number(2) & PROT_WRITE) {
                memset(start + 1, 'P', 10);
                say_bytes(start, 20);
            }
        }
        munmap(start, length);
    } else return 0;
    return 1;
}

static void perform(void);
static void serve(void);

/* Descriptors of a process that has a child which goes on: calls for it, its answers. */
enum { TO_CHILD = 100, FROM_CHILD = 101 };

static int has_child(void) {
    return fcntl(TO_CHILD, F_GETFD) >= 0;
}

static void close_child(void) {
    close(TO_CHILD);
    close(FROM_CHILD);
}

/* Starts a child that gets calls through its parent, and goes on by itself or by an exec with what it has open. */
static void bear(int execs) {
    int calls[2], answers[2];
    if (has_child()) {
        say("a child already");
        return;
    }
    if (pipe(calls) < 0 || pipe(answers) < 0) abort();
    dup2(calls[1], TO_CHILD);
    dup2(answers[0], FROM_CHILD);
    close(calls[1]);
    close(answers[0]);
    pid_t child = fork();
    if (child == 0) {
        close_child();
        dup2(calls[0], 0);
        dup2(answers[1], 1);
        close(calls[0]);
        close(answers[1]);
        if (execs) {
            execl(program, program, folder, "born", NULL);
            _exit(4);
        }
        serve();
        exit(0);
    }
    close(calls[0]);
    close(answers[1]);
    if (child < 0) {
        say_error();
        close_child();
    } else say("0");
}

/* Passes a call on to the child, and its answer back. */
static void tell_child(void) {
    if (!has_child()) {
        say("no child");
        return;
    }
    for (int at = 1; words[at]; at++) dprintf(TO_CHILD, "%s%s", words[at], words[at + 1] ? " " : "\n");
    do {
        long got = read(FROM_CHILD, answer + answered, sizeof answer - 1 - answered);
        if (got <= 0) {
            say(" the child has ended");
            return;
        }
        answered += got;
    } while (answer[answered - 1] != '\n');
    answered--;
}

/* Ends the child: it exits, or is killed. */
static void end_child(int kills) {
    if (!has_child()) {
        say("no child");
        return;
    }
    if (kills) {
        pid_t child = 0;
        dprintf(TO_CHILD, "pid\n");
        char line[32] = {0};
        for (char *to = line; read(FROM_CHILD, to, 1) == 1 && *to != '\n'; to++) {}
        child = atoi(line);
        if (child > 1) kill(child, SIGKILL);
    }
    close_child();
    int how = 0;
    waitpid(-1, &how, 0) < 0 ? say_error() : say("ended with %x", how);
}

static void send_answer(void) {
    answer[answered++] = '\n';
    for (size_t at = 0; at < answered;) {
        long wrote = write(1, answer + at, answered - at);
        if (wrote <= 0) _exit(3);
        at += wrote;
    }
    answered = 0;
}

/* Whether an ended process has given the answer itself. */
static int has_answered(pid_t child) {
    int how;
    if (child < 0 || waitpid(child, &how, 0) != child) {
        say_error();
        return 0;
    }
    if (WIFEXITED(how) && WEXITSTATUS(how) == 0) return 1;
    say("a child ended with %x", how);
    return 0;
}

/* Becomes a user, in a group and with further groups if they are given. The saved numbers stay, for the way back, unless the
 * change is for good. With other real numbers an exec would come without the library. */
static long become(long uid, long gid, const char *more, int for_good) {
    gid_t groups[16];
    size_t count = 0;
    /* A process that has not kept number 0 stays as it is. */
    if (geteuid() != 0 && setresuid(0, 0, 0) < 0) return -1;
    for (char *end; more && *more >= '0' && *more <= '9'; more = *end ? end + 1 : end) groups[count++] = strtol(more, &end, 10);
    if (more && setgroups(count, groups) < 0) return -1;
    if (setresgid(gid, gid, for_good ? gid : 0) < 0) return -1;
    return uid == 0 ? 0 : setresuid(uid, uid, for_good ? uid : 0);
}

/* Calls on the process; whether the answer was given by another one. */
static int on_process(int *given) {
    if (is("umask")) say("%o", umask(number(1)));
    else if (is("user")) result(become(number(1), number(words[2] ? 2 : 1), words[3], words[3] && words[4]));
    else if (is("effective")) {
        long uid = number(1), gid = number(words[2] ? 2 : 1);
        /* The group first, unless the process has no right to that yet. */
        long failed = uid == 0 ? seteuid(uid) : 0;
        if (failed == 0) failed = setegid(gid);
        result(failed == 0 && uid != 0 ? seteuid(uid) : failed);
    } else if (is("ids")) {
        unsigned ids[6];
        getresuid(ids, ids + 1, ids + 2);
        getresgid(ids + 3, ids + 4, ids + 5);
        gid_t groups[16];
        int count = getgroups(COUNT(groups), groups);
        for (size_t at = 0; at < COUNT(ids); at++) say("%u ", ids[at]);
        for (int at = 0; at < count; at++) say(" %u", groups[at]);
    } else if (is("fork")) {
        memmove(words, words + 1, WORDS * sizeof *words);
        pid_t child = fork();
        if (child == 0) {
            perform();
            _exit(0);
        }
        *given = has_answered(child);
    } else if (is("spawn")) {
        char *arguments[WORDS + 4] = {(char *)program, (char *)folder};
        for (int at = 0; words[at + 1]; at++) arguments[2 + at] = words[at + 1];
        pid_t child = vfork();
        if (child == 0) {
            execv(program, arguments);
            _exit(4);
        }
        *given = has_answered(child);
    } else if (is("exec")) {
        execl(program, program, folder, "executed", NULL);
        say_error();
    } else if (is("executed")) say("0");
    else if (is("bear")) bear(words[1] != NULL);
    else if (is("child")) tell_child();
    else if (is("bury")) end_child(0);
    else if (is("killchild")) end_child(1);
    else if (is("pid")) say("%d", getpid());
    else return 0;
    return 1;
}

static void perform(void) {
    int given = 0;
    if (!on_descriptors() && !on_contents() && !on_names() && !on_attributes() && !on_maps() && !on_process(&given)) {
        fprintf(stderr, "no such call: %s\n", words[0]);
        abort();
    }
    if (!given) send_answer();
}

/* Reads calls up to the end of the input. */
static void serve(void) {
    static char line[65536];
    size_t filled = 0;
    for (;;) {
        long got = read(0, line + filled, sizeof line - 1 - filled);
        if (got <= 0) return;
        filled += got;
        if (line[filled - 1] != '\n') continue;
        line[filled - 1] = 0;
        filled = 0;
        memset(words, 0, sizeof words);
        int at = 0;
        for (char *rest = line, *word; (word = strsep(&rest, " ")) && at < WORDS;) words[at++] = word;
        perform();
    }
}

/* `actor FOLDER` reads calls; `actor FOLDER executed` answers to an exec and then reads calls, `actor FOLDER born` only reads
 * them; with another call it does that one. */
int main(int count, char **arguments) {
    program = arguments[0];
    folder = arguments[1];
    signal(SIGBUS, on_fault);
    signal(SIGSEGV, on_fault);
    signal(SIGPIPE, SIG_IGN);
    if (count > 2 && strcmp(arguments[2], "born")) {
        for (int at = 2; at < count && at - 2 < WORDS; at++) words[at - 2] = arguments[at];
        perform();
        if (strcmp(arguments[2], "executed")) return 0;
    } else if (count == 2) {
        umask(022);
        say("%d", chdir(folder));
        send_answer();
    }
    serve();
    return 0;
}
