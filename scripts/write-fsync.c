// Times a write and its fsync, or the least that the same must take between two processes.
//
//   write-fsync file PATH BYTES COUNT   each write goes to the file's next place, and is synced; prints the median in us
//   write-fsync floor BYTES COUNT       each goes to another process over TCP, which copies it and answers; prints the same
//   write-fsync once PATH               one write and its fsync; prints the wall clock after it, in ns

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void die(const char *what) {
    fprintf(stderr, "write-fsync: %s: %s\n", what, strerror(errno));
    exit(1);
}

static long long now(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static int compare(const void *a, const void *b) {
    long long x = *(const long long *)a, y = *(const long long *)b;
    return (x > y) - (x < y);
}

static void print_median(long long *times, int count) {
    qsort(times, count, sizeof *times, compare);
    printf("%.1f\n", times[count / 2] / 1000.0);
}

static int open_file(const char *path) {
    int file = open(path, O_CREAT | O_TRUNC | O_WRONLY, 0644);
    if (file < 0) die(path);
    return file;
}

static void write_and_sync(int file, const char *bytes, size_t size) {
    if (write(file, bytes, size) != (ssize_t)size) die("write");
    if (fsync(file) != 0) die("fsync");
}

// All of so many bytes; 0 if the other side is gone. Asked for again and again, as a daemon with work does.
static int take(int socket, char *bytes, size_t size) {
    for (size_t got = 0; got < size;) {
        ssize_t part = recv(socket, bytes + got, size - got, MSG_DONTWAIT);
        if (part == 0) return 0;
        if (part > 0) got += part;
        else if (errno != EAGAIN && errno != EINTR) die("recv");
    }
    return 1;
}

static void give(int socket, const char *bytes, size_t size) {
    for (size_t given = 0; given < size;) {
        ssize_t part = send(socket, bytes + given, size - given, 0);
        if (part < 0) die("send");
        given += part;
    }
}

// A pair of sockets over TCP on the loopback.
static void connect_pair(int pair[2]) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    if (bind(listener, (struct sockaddr *)&address, size) != 0 || listen(listener, 1) != 0) die("listen");
    getsockname(listener, (struct sockaddr *)&address, &size);
    pair[0] = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(pair[0], (struct sockaddr *)&address, size) != 0) die("connect");
    pair[1] = accept(listener, NULL, NULL);
    for (int side = 0; side < 2; side++) setsockopt(pair[side], IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    close(listener);
}

static void time_floor(size_t size, int count, long long *times) {
    int pair[2];
    char *bytes = calloc(1, size), *copy = calloc(1, size);
    connect_pair(pair);
    pid_t other = fork();
    if (other == 0) {
        close(pair[0]);
        while (take(pair[1], bytes, size)) {
            memcpy(copy, bytes, size);
            give(pair[1], copy, 1);
        }
        _exit(0);
    }
    close(pair[1]);
    for (int round = 0; round < count; round++) {
        long long begin = now(CLOCK_MONOTONIC);
        memcpy(copy, bytes, size);
        give(pair[0], copy, size);
        take(pair[0], bytes, 1);
        times[round] = now(CLOCK_MONOTONIC) - begin;
    }
    close(pair[0]);
    waitpid(other, NULL, 0);
}

static void time_file(const char *path, size_t size, int count, long long *times) {
    char *bytes = calloc(1, size);
    int file = open_file(path);
    for (int round = 0; round < count; round++) {
        long long begin = now(CLOCK_MONOTONIC);
        write_and_sync(file, bytes, size);
        times[round] = now(CLOCK_MONOTONIC) - begin;
    }
    close(file);
    unlink(path);
}

int main(int argc, char **argv) {
    signal(SIGPIPE, SIG_IGN);
    if (argc == 3 && strcmp(argv[1], "once") == 0) {
        write_and_sync(open_file(argv[2]), "first", 5);
        printf("%lld\n", now(CLOCK_REALTIME));
        return 0;
    }
    int is_file = argc == 5 && strcmp(argv[1], "file") == 0, is_floor = argc == 4 && strcmp(argv[1], "floor") == 0;
    size_t size = is_file || is_floor ? strtoul(argv[argc - 2], NULL, 10) : 0;
    int count = size > 0 ? atoi(argv[argc - 1]) : 0;
    if (count <= 0) {
        fprintf(stderr, "usage: write-fsync file PATH BYTES COUNT | floor BYTES COUNT | once PATH\n");
        return 2;
    }
    long long *times = calloc(count, sizeof *times);
    if (is_file) time_file(argv[2], size, count, times);
    else time_floor(size, count, times);
    print_median(times, count);
    return 0;
}
