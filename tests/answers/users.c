/* Calls by users of all kinds on files and directories of one of them: `users CASE DIR [exec]`. Prints each call, its answer and
 * what it changed. CASE is files, directories or few_directories. With `exec`, each user is a program of its own. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>
#include <utime.h>

#define NEED(what) \
    do { \
        if (!(what)) { \
            printf("%s:%d: %s: %s\n", __func__, __LINE__, #what, strerrorname_np(errno)); \
            exit(1); \
        } \
    } while (0)
#define COUNT(array) (sizeof array / sizeof *array)

/* The files belong to user 1000 and group 1000. */
static const struct user {
    const char *name;
    uid_t real, effective;
    gid_t group, supplementary;
} users[] = {
    {"root", 0, 0, 0, 0}, {"owner", 1000, 1000, 1000, 1000}, {"in-group", 2000, 2000, 1000, 2000},
    {"in-groups", 3000, 3000, 3000, 1000}, {"stranger", 4000, 4000, 4000, 4000},
    {"owner-not-in-group", 1000, 1000, 5000, 5000}, {"set-user-id", 4000, 0, 4000, 4000},
    {"root-for-a-while-another", 0, 4000, 4000, 4000},
};

static const char *name;

/* The path of a name below the object, or beside it if it does not begin with a slash. */
static char *of(const char *rest) {
    static char paths[8][256];
    static int next;
    char *path = paths[next++ % 8];
    snprintf(path, sizeof paths[0], "%s%s", name, rest);
    return path;
}

static void become(const struct user *as) {
    NEED(setgroups(1, &as->supplementary) == 0 && setresgid(as->group, as->group, as->group) == 0);
    NEED(setresuid(as->real, as->effective, as->real == as->effective ? as->real : 0) == 0);
}

static void make(const char *path, uid_t owner, int mode) {
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL, 0600);
    NEED(fd >= 0 && write(fd, "text", 4) == 4);
    NEED(fsetxattr(fd, "user.had", "1", 1, 0) == 0 && fsetxattr(fd, "trusted.had", "1", 1, 0) == 0);
    NEED(fchown(fd, owner, owner) == 0 && fchmod(fd, mode) == 0);
    close(fd);
}

static void make_directory(const char *path, uid_t owner, gid_t group, int mode) {
    NEED(mkdir(path, 0700) == 0 && chown(path, owner, group) == 0 && chmod(path, mode) == 0);
}

/* Closes what the call opened. */
static long opened(int fd) {
    if (fd >= 0) close(fd);
    return fd < 0 ? -1 : 0;
}

static long with(int flags, long (*call)(int fd)) {
    int fd = open(name, flags, 0644);
    if (fd < 0) return -2;
    long answer = call(fd);
    int error = errno;
    close(fd);
    errno = error;
    return answer;
}

static long writes(int fd) { return write(fd, "new", 3); }
static long writes_nothing(int fd) { return write(fd, "", 0); }
static long writes_at_end(int fd) { return pwrite(fd, "x", 1, 10); }
static long truncates(int fd) { return ftruncate(fd, 2); }
static long truncates_to_same(int fd) { return ftruncate(fd, 4); }
static long allocates(int fd) { return fallocate(fd, 0, 0, 100); }
static long punches(int fd) { return fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 2); }
static long changes_mode(int fd) { return fchmod(fd, 06755); }
static long changes_group(int fd) { return fchown(fd, -1, getegid()); }
static long changes_times(int fd) { return futimens(fd, NULL); }
static long sets_noatime(int fd) { return fcntl(fd, F_SETFL, O_NOATIME); }
static long sets_attribute(int fd) { return fsetxattr(fd, "user.new", "1", 1, 0); }
static long maps(int fd) {
    char *map = mmap(NULL, 4, PROT_READ, MAP_PRIVATE, fd, 0);
    return map == MAP_FAILED ? -1 : map[0];
}
static long reads_attribute(int fd) { char got[8]; return fgetxattr(fd, "user.had", got, 8); }
static long takes_lock(int fd) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    return fcntl(fd, F_SETLK, &lock);
}
static long copies(int fd) {
    int from = open(".source", O_RDONLY);
    return copy_file_range(from, NULL, fd, NULL, 2, 0) + 0 * close(from);
}

static long set_times(const char *path, long access, long change, int flags) {
    struct timespec times[2] = {{5, access}, {6, change}};
    return utimensat(AT_FDCWD, path, times, flags);
}

static long lists(const char *path) {
    DIR *dir = opendir(path);
    long count = 0;
    if (dir == NULL) return -1;
    while (readdir(dir) != NULL) count++;
    closedir(dir);
    return count;
}

static long goes(const char *path) {
    int here = open(".", O_PATH);
    NEED(here >= 0);
    long answer = chdir(path);
    int error = errno;
    NEED(fchdir(here) == 0);
    close(here);
    errno = error;
    return answer;
}

static long executes(const char *path) {
    fflush(stdout);
    pid_t child = fork();
    int status;
    if (child == 0) {
        execl(path, path, NULL);
        _exit(errno);
    }
    NEED(waitpid(child, &status, 0) == child);
    errno = WEXITSTATUS(status);
    return -1;
}

static long unnamed(const char *path, int mode) { return opened(open(path, O_TMPFILE | O_RDWR, mode)); }

static const char *text;
static long answer;
/* Runs the call whose turn it is. Each call has a file or a directory of its own. */
#define OP(call) if (index++ == wanted) text = #call, errno = 0, answer = (long)(call);

static struct stat status;
static char got[64];

static int on_files(int wanted) {
    int index = 0;
    OP(opened(open(name, O_RDONLY)))
    OP(opened(open(name, O_WRONLY)))
    OP(opened(open(name, O_RDWR)))
    OP(opened(open(name, O_RDONLY | O_TRUNC)))
    OP(opened(open(name, O_WRONLY | O_TRUNC)))
    OP(opened(open(name, O_RDWR | O_CREAT, 0600)))
    OP(opened(open(name, O_RDONLY | O_CREAT | O_EXCL, 0600)))
    OP(opened(open(name, O_ACCMODE)))
    OP(opened(open(name, O_RDONLY | O_NOATIME)))
    OP(opened(open(name, O_WRONLY | O_NOATIME)))
    OP(opened(open(name, O_PATH)))
    OP(opened(open(name, O_RDONLY | O_DIRECTORY)))
    OP(with(O_WRONLY, writes))
    OP(with(O_WRONLY | O_APPEND, writes))
    OP(with(O_WRONLY, writes_nothing))
    OP(with(O_WRONLY, writes_at_end))
    OP(with(O_WRONLY, truncates))
    OP(with(O_WRONLY, truncates_to_same))
    OP(with(O_WRONLY, allocates))
    OP(with(O_WRONLY, punches))
    OP(with(O_WRONLY, copies))
    OP(with(O_RDONLY, changes_mode))
    OP(with(O_RDONLY, changes_group))
    OP(with(O_RDONLY, changes_times))
    OP(with(O_RDONLY, sets_noatime))
    OP(with(O_RDONLY, sets_attribute))
    OP(with(O_WRONLY, sets_attribute))
    OP(with(O_WRONLY, reads_attribute))
    OP(with(O_RDONLY, maps))
    OP(with(O_WRONLY, takes_lock))
    OP(truncate(name, 2))
    OP(truncate(name, 4))
    OP(chmod(name, 0640))
    OP(chmod(name, 02755))
    OP(chmod(name, 06777))
    OP(chmod(name, 02644))
    OP(chmod(name, 01644))
    OP(chown(name, -1, -1))
    OP(chown(name, 1000, -1))
    OP(chown(name, -1, 1000))
    OP(chown(name, 1000, 1000))
    OP(chown(name, geteuid(), -1))
    OP(chown(name, -1, getegid()))
    OP(chown(name, -1, 2000))
    OP(chown(name, -1, 3000))
    OP(chown(name, 4000, 4000))
    OP(utime(name, NULL))
    OP(set_times(name, 0, 0, 0))
    OP(set_times(name, UTIME_NOW, UTIME_NOW, 0))
    OP(set_times(name, UTIME_NOW, UTIME_OMIT, 0))
    OP(set_times(name, UTIME_OMIT, UTIME_NOW, 0))
    OP(set_times(name, UTIME_OMIT, UTIME_OMIT, 0))
    OP(set_times(name, UTIME_OMIT, 0, 0))
    OP(access(name, F_OK))
    OP(access(name, R_OK))
    OP(access(name, W_OK))
    OP(access(name, X_OK))
    OP(access(name, R_OK | W_OK | X_OK))
    OP(faccessat(AT_FDCWD, name, R_OK, AT_EACCESS))
    OP(faccessat(AT_FDCWD, name, W_OK, AT_EACCESS))
    OP(faccessat(AT_FDCWD, name, X_OK, AT_EACCESS))
    OP(getxattr(name, "user.had", got, sizeof got))
    OP(getxattr(name, "user.none", got, sizeof got))
    OP(getxattr(name, "trusted.had", got, sizeof got))
    OP(getxattr(name, "security.none", got, sizeof got))
    OP(listxattr(name, got, sizeof got))
    OP(setxattr(name, "user.had", "2", 1, 0))
    OP(setxattr(name, "user.had", "2", 1, XATTR_CREATE))
    OP(setxattr(name, "user.new", "2", 1, XATTR_REPLACE))
    OP(setxattr(name, "trusted.had", "2", 1, 0))
    OP(setxattr(name, "security.own", "2", 1, 0))
    OP(removexattr(name, "user.had"))
    OP(removexattr(name, "user.none"))
    OP(removexattr(name, "trusted.had"))
    OP(executes(name))
    OP(link(name, of("x")))
    OP(rename(name, of("x")))
    OP(unlink(name))
    OP(opened(open(of("/x"), O_RDONLY)))
    OP(stat(of("/"), &status))
    return index;
}

static int in_directories(int wanted) {
    int index = 0;
    OP(lists(name))
    OP(goes(name))
    OP(opened(open(name, O_PATH)))
    OP(opened(open(name, O_RDONLY)))
    OP(opened(open(name, O_RDWR)))
    OP(stat(of("/theirs"), &status))
    OP(stat(of("/none"), &status))
    OP(stat(of("/."), &status))
    OP(stat(of("/.."), &status))
    OP(faccessat(AT_FDCWD, of("/theirs"), F_OK, AT_EACCESS))
    OP(access(name, W_OK | X_OK))
    OP(opened(open(of("/theirs"), O_RDONLY)))
    OP(opened(open(of("/theirs"), O_RDWR | O_CREAT, 0600)))
    OP(opened(open(of("/theirs"), O_RDWR | O_CREAT | O_EXCL, 0600)))
    OP(opened(open(of("/theirs"), O_RDWR | O_TRUNC)))
    OP(opened(open(of("/new"), O_RDWR | O_CREAT, 0666)))
    OP(opened(open(of("/new"), O_RDONLY | O_CREAT, 02777)))
    OP(opened(open(of("/new"), O_RDWR | O_CREAT, 02767)))
    OP(opened(open(of("/new"), O_RDWR | O_CREAT, 06755)))
    OP(opened(open(of("/new"), O_RDWR | O_CREAT, 0)))
    OP(opened(open(of("/new"), O_RDWR | O_CREAT | O_NOATIME, 0600)))
    OP(opened(open(of("/new/"), O_RDWR | O_CREAT, 0600)))
    OP(mkdir(of("/new"), 0777))
    OP(mkdir(of("/new"), 07777))
    OP(mkdir(of("/theirs"), 0777))
    OP(mkdir(of("/theirs-empty"), 0777))
    OP(mkdir(of("/new/"), 0700))
    OP(mknod(of("/new"), S_IFREG | 06777, 0))
    OP(mknod(of("/new"), S_IFIFO | 02777, 0))
    OP(mknod(of("/new"), S_IFSOCK | 0777, 0))
    OP(mknod(of("/new"), S_IFCHR | 0666, 0x103))
    OP(mknod(of("/new"), S_IFCHR | 0666, 0))
    OP(mknod(of("/theirs"), S_IFCHR | 0666, 0x103))
    OP(symlink("theirs", of("/new")))
    OP(symlink("theirs", of("/theirs")))
    OP(link(of("/theirs"), of("/new")))
    OP(link(of("/mine"), of("/new")))
    OP(link(of("/shared"), of("/new")))
    OP(link(of("/mine"), of("/theirs")))
    OP(link(of("/theirs-empty"), of("/new")))
    OP(unnamed(name, 02777))
    OP(unlink(of("/theirs")))
    OP(unlink(of("/mine")))
    OP(unlink(of("/roots")))
    OP(unlink(of("/theirs-link")))
    OP(unlink(of("/theirs-empty")))
    OP(unlink(of("/none")))
    OP(rmdir(of("/theirs-empty")))
    OP(rmdir(of("/theirs-full")))
    OP(rmdir(of("/my-empty")))
    OP(rmdir(of("/my-full")))
    OP(rmdir(of("/theirs")))
    OP(rmdir(of("/none")))
    OP(rmdir(of("/.")))
    OP(rmdir(name))
    OP(rename(of("/mine"), of("/new")))
    OP(rename(of("/theirs"), of("/new")))
    OP(rename(of("/mine"), of("/theirs")))
    OP(rename(of("/theirs"), of("/mine")))
    OP(rename(of("/mine"), of("/mine")))
    OP(rename(of("/theirs"), of("/theirs")))
    OP(rename(of("/mine"), of("/theirs-empty")))
    OP(rename(of("/theirs-empty"), of("/mine")))
    OP(rename(of("/my-empty"), of("/theirs-empty")))
    OP(rename(of("/my-empty"), of("/theirs-full")))
    OP(rename(of("/theirs-empty"), of("/my-empty")))
    OP(rename(of("/theirs-empty"), of("/new")))
    OP(rename(of("/none"), of("/theirs")))
    OP(rename(of("/mine"), of("/none/x")))
    OP(rename(of("/mine"), of(".mine/in")))
    OP(rename(of("/theirs"), of(".mine/in")))
    OP(rename(of("/my-empty"), of(".mine/in")))
    OP(rename(of("/theirs-empty"), of(".mine/in")))
    OP(rename(of("/theirs-full"), of(".mine/in")))
    OP(rename(of("/theirs-closed"), of(".mine/in")))
    OP(rename(of("/my-closed"), of(".mine/in")))
    OP(rename(of("/my-closed"), of("/new")))
    OP(rename(of(".mine/file"), of("/new")))
    OP(rename(of(".mine/file"), of("/theirs")))
    OP(rename(of(".mine/file"), of("/mine")))
    OP(rename(of(".mine/dir"), of("/theirs-empty")))
    OP(rename(of(".mine/dir"), of("/new")))
    OP(rename(name, of(".mine/in")))
    OP(rename(name, of("-moved")))
    OP(renameat2(AT_FDCWD, of("/mine"), AT_FDCWD, of("/theirs"), RENAME_EXCHANGE))
    OP(renameat2(AT_FDCWD, of("/theirs"), AT_FDCWD, of(".mine/file"), RENAME_EXCHANGE))
    OP(renameat2(AT_FDCWD, of("/theirs-empty"), AT_FDCWD, of(".mine/dir"), RENAME_EXCHANGE))
    OP(renameat2(AT_FDCWD, of("/my-closed"), AT_FDCWD, of(".mine/file"), RENAME_EXCHANGE))
    OP(renameat2(AT_FDCWD, of(".mine/file"), AT_FDCWD, of("/my-closed"), RENAME_EXCHANGE))
    OP(renameat2(AT_FDCWD, of("/mine"), AT_FDCWD, of("/theirs"), RENAME_NOREPLACE))
    OP(renameat2(AT_FDCWD, of("/mine"), AT_FDCWD, of("/new"), RENAME_NOREPLACE))
    OP(renameat2(AT_FDCWD, of("/theirs"), AT_FDCWD, of("/new"), RENAME_WHITEOUT))
    OP(renameat2(AT_FDCWD, of("/mine"), AT_FDCWD, of("/new"), RENAME_WHITEOUT))
    OP(chmod(name, 0750))
    OP(chmod(name, 02777))
    OP(chmod(name, 03770))
    OP(chown(name, -1, -1))
    OP(chown(name, -1, getegid()))
    OP(chown(name, -1, 1000))
    OP(chown(name, geteuid(), -1))
    OP(chown(of("/mine"), -1, 1000))
    OP(chown(of("/mine"), -1, 2000))
    OP(lchown(of("/theirs-link"), -1, getegid()))
    OP(lchown(of("/my-link"), -1, 1000))
    OP(chmod(of("/my-link"), 0600))
    OP(utime(name, NULL))
    OP(set_times(name, 0, 0, 0))
    OP(set_times(of("/theirs-link"), 0, 0, AT_SYMLINK_NOFOLLOW))
    OP(set_times(of("/theirs-link"), UTIME_NOW, UTIME_NOW, AT_SYMLINK_NOFOLLOW))
    OP(set_times(of("/my-link"), 0, 0, AT_SYMLINK_NOFOLLOW))
    OP(readlink(of("/theirs-link"), got, sizeof got))
    OP(setxattr(name, "user.a", "1", 1, 0))
    OP(setxattr(name, "trusted.a", "1", 1, 0))
    OP(getxattr(name, "user.had", got, sizeof got))
    OP(removexattr(name, "user.had"))
    OP(listxattr(name, got, sizeof got))
    OP(lsetxattr(of("/my-link"), "user.a", "1", 1, 0))
    OP(lsetxattr(of("/my-link"), "trusted.a", "1", 1, 0))
    OP(lsetxattr(of("/my-link"), "security.a", "1", 1, 0))
    OP(lgetxattr(of("/my-link"), "user.a", got, sizeof got))
    OP(setxattr(of("/pipe"), "user.a", "1", 1, 0))
    OP(getxattr(of("/pipe"), "user.a", got, sizeof got))
    OP(setxattr(of("/pipe"), "trusted.a", "1", 1, 0))
    OP(chmod(of("/pipe"), 0600))
    return index;
}

static const int file_modes[] = {0, 0400, 0200, 0070, 0060, 0040, 0020, 0007, 0006, 0004, 0002, 0644, 0664, 0666,
                                 0755, 0500, 04755, 04777, 02777, 02767, 06777, 06755, 01777, 06000};
/* Directories by mode and owner; -1 is the user who calls. */
static const struct { int mode, owner; } directories[] = {
    {01777, 1000}, {0755, 1000}, {02777, 1000}, {02750, 1000}, {0733, 1000}, {01775, 1000}, {0777, 1000}, {01777, -1}, {01777, 0},
    {03777, 1000}, {02775, 1000}, {0711, 1000}, {0744, 1000}, {0766, 1000}, {01733, 0}, {0700, -1}, {02755, -1}, {0500, -1},
    {0, -1}, {0, 1000}};

/* How many of the directories a case has. */
static int directories_count = COUNT(directories);

static int kinds_of(int files) { return files ? COUNT(file_modes) : directories_count; }
static int (*table_of(int files))(int) { return files ? on_files : in_directories; }

static void object(char *path, size_t room, const struct user *as, int kind, int op) {
    snprintf(path, room, "%s/%d/%d", as->name, kind, op);
}

static void set_old(const char *path) {
    struct timespec old[2] = {{1000000}, {1000000}};
    NEED(utimensat(AT_FDCWD, path, old, AT_SYMLINK_NOFOLLOW) == 0);
}

static void fill(const struct user *as, uid_t owner, int mode) {
    uid_t mine = as->effective, theirs = mine == 1000 ? 6000 : 1000;
    make_directory(name, 0, 0, 0700);
    NEED(setxattr(name, "user.had", "1", 1, 0) == 0);
    make(of("/theirs"), theirs, 0644);
    make(of("/shared"), theirs, 0666);
    make(of("/mine"), mine, 0644);
    make(of("/roots"), 0, 0644);
    make_directory(of("/theirs-empty"), theirs, theirs, 0755);
    make_directory(of("/theirs-full"), theirs, theirs, 0777);
    make(of("/theirs-full/in"), theirs, 0644);
    make_directory(of("/theirs-closed"), theirs, theirs, 0700);
    make_directory(of("/my-empty"), mine, mine, 0755);
    make_directory(of("/my-full"), mine, mine, 0755);
    make(of("/my-full/in"), theirs, 0644);
    make_directory(of("/my-closed"), mine, mine, 0555);
    NEED(symlink("theirs", of("/theirs-link")) == 0 && lchown(of("/theirs-link"), theirs, theirs) == 0);
    NEED(symlink("theirs", of("/my-link")) == 0 && lchown(of("/my-link"), mine, mine) == 0);
    NEED(mknod(of("/pipe"), S_IFIFO | 0666, 0) == 0 && chown(of("/pipe"), mine, mine) == 0);
    make_directory(of(".mine"), mine, mine, 0755);
    make(of(".mine/file"), mine, 0644);
    make_directory(of(".mine/dir"), mine, mine, 0755);
    NEED(chown(name, owner, 1000) == 0 && chmod(name, mode) == 0);
}

static void prepare(const struct user *as, int files) {
    char path[256];
    make_directory(as->name, 0, 0, 0777);
    for (int kind = 0; kind < kinds_of(files); kind++) {
        snprintf(path, sizeof path, "%s/%d", as->name, kind);
        make_directory(path, 0, 0, 0777);
        for (int op = 0; op < table_of(files)(-1); op++) {
            object(path, sizeof path, as, kind, op);
            name = path;
            if (files)
                make(path, 1000, file_modes[kind]);
            else
                fill(as, directories[kind].owner == -1 ? as->effective : directories[kind].owner, directories[kind].mode);
            set_old(path);
        }
    }
}

/* Prints the differences to the object as it was prepared. */
static void show(const char *path, const struct timespec *ctime, int sets_times) {
    if (lstat(path, &status) < 0) {
        printf(" gone");
        return;
    }
    printf(" %o %d:%d", status.st_mode, status.st_uid, status.st_gid);
    if (!S_ISDIR(status.st_mode)) printf(" %ld", (long)status.st_size);
    if (!S_ISDIR(status.st_mode) && status.st_nlink != 1) printf(" %ld links", (long)status.st_nlink);
    if (sets_times) printf("%s", status.st_atim.tv_sec == 1000000 ? "" : status.st_atim.tv_sec < 1000 ? " atime-set" : " atime");
    printf("%s", status.st_mtim.tv_sec == 1000000 ? "" : status.st_mtim.tv_sec < 1000 ? " mtime-set" : " mtime");
    if (ctime != NULL && memcmp(ctime, &status.st_ctim, sizeof *ctime) != 0) printf(" ctime");
}

static int by_name(const struct dirent **one, const struct dirent **other) { return strcmp((*one)->d_name, (*other)->d_name); }

static void show_names(const char *path) {
    struct dirent **names;
    int count = scandir(path, &names, NULL, by_name);
    for (int i = 0; i < count; i++) {
        if (names[i]->d_name[0] == '.') continue;
        char below[512];
        snprintf(below, sizeof below, "%s/%s", path, names[i]->d_name);
        lstat(below, &status);
        printf(" %s:%o:%d:%d", names[i]->d_name, status.st_mode, status.st_uid, status.st_gid);
        if (!S_ISDIR(status.st_mode) && status.st_nlink != 1) printf(":%ld", (long)status.st_nlink);
    }
}

struct result { char text[72]; long answer; int error; };

static int number(const struct user *as, int files, int kind, int op) {
    return ((as - users) * kinds_of(files) + kind) * table_of(files)(-1) + op;
}

/* All calls of one user. The results are in a file of the kernel's. */
static void act(const struct user *as, int files, int results) {
    char path[256];
    umask(as - users == 2 ? 002 : 027);
    for (int kind = 0; kind < kinds_of(files); kind++)
        for (int op = 0; op < table_of(files)(-1); op++) {
            struct result result = {};
            object(path, sizeof path, as, kind, op);
            name = path;
            table_of(files)(op);
            result.error = answer < 0 ? errno : 0;
            result.answer = answer;
            strncpy(result.text, text, sizeof result.text - 1);
            NEED(pwrite(results, &result, sizeof result, number(as, files, kind, op) * sizeof result) == sizeof result);
        }
}

static void report(const struct user *as, int files, int results, const struct timespec *ctimes) {
    char path[256];
    for (int kind = 0; kind < kinds_of(files); kind++)
        for (int op = 0; op < table_of(files)(-1); op++) {
            struct result result;
            int at = number(as, files, kind, op);
            NEED(pread(results, &result, sizeof result, at * sizeof result) == sizeof result);
            object(path, sizeof path, as, kind, op);
            name = path;
            printf("%s, %s %o", as->name, files ? "file" : "directory", files ? file_modes[kind] : directories[kind].mode);
            if (!files) printf(" of %d", directories[kind].owner);
            printf(", %s: ", result.text);
            if (result.answer < 0)
                printf("%s%s;", result.answer == -2 ? "not open, " : "", strerrorname_np(result.error));
            else
                printf("%ld;", result.answer);
            show(path, &ctimes[at], strstr(result.text, "time") != NULL);
            if (files && lstat(of("x"), &status) == 0) printf(" x");
            if (!files && lstat(of("-moved"), &status) == 0) printf(" moved");
            if (!files) {
                printf(" |");
                show_names(path);
                printf(" |");
                show_names(of(".mine"));
            }
            printf("\n");
        }
}

int main(int count, char **given) {
    char self[4096];
    NEED(count >= 3 && realpath("/proc/self/exe", self) != NULL && chdir(given[2]) == 0);
    int files = strcmp(given[1], "files") == 0;
    if (strcmp(given[1], "few_directories") == 0) directories_count = 6;
    if (count == 5) {
        int as = atoi(given[3]);
        act(&users[as], files, atoi(given[4]));
        return 0;
    }
    int alone = count == 4;
    int results = memfd_create("results", 0);
    size_t calls = COUNT(users) * kinds_of(files) * table_of(files)(-1);
    struct timespec *ctimes = calloc(calls, sizeof *ctimes);
    NEED(results >= 0 && ctimes != NULL && chmod(".", 0777) == 0);
    make(".source", 0, 0644);
    for (const struct user *as = users; as < users + COUNT(users); as++) {
        if (alone && as->real != as->effective) continue;
        prepare(as, files);
        for (int kind = 0; kind < kinds_of(files); kind++)
            for (int op = 0; op < table_of(files)(-1); op++) {
                char path[256];
                object(path, sizeof path, as, kind, op);
                NEED(lstat(path, &status) == 0);
                ctimes[number(as, files, kind, op)] = status.st_ctim;
            }
        usleep(20000);
        fflush(stdout);
        pid_t child = fork();
        NEED(child >= 0);
        if (child == 0) {
            become(as);
            if (alone) {
                char which[16], into[16];
                snprintf(which, sizeof which, "%d", (int)(as - users));
                snprintf(into, sizeof into, "%d", results);
                execl(self, self, given[1], ".", which, into, NULL);
                NEED(!"exec");
            }
            act(as, files, results);
            fflush(stdout);
            _exit(0);
        }
        int ended;
        NEED(waitpid(child, &ended, 0) == child);
        if (ended != 0) printf("ended with %x\n", ended);
        report(as, files, results, ctimes);
    }
    return 0;
}
