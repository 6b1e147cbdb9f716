// A file that one program extends while others open it and access its last page by a mapping: extended FILE COUNTER
// appends | maps, both at once. COUNTER has the number of pages of FILE. A page that exists does not fault, through
// the library and through the mount; one process of those that map writes to the file meanwhile, near the end.
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096, STEP = 16, PAGES = 8192, CHILDREN = 3, PATIENCE_SECONDS = 100 };

static char pages[PAGE * STEP];

static void *map_of(int file, size_t bytes) {
    void *map = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (map == MAP_FAILED) {
        perror("mmap");
        exit(1);
    }
    return map;
}

static int open_of(const char *path) {
    int file = open(path, O_RDWR | O_CREAT, 0600);
    if (file < 0) {
        perror("open");
        exit(1);
    }
    return file;
}

static int append(const char *path, atomic_long *count) {
    int file = open_of(path);
    for (long number = 0; number < PAGES; number += STEP) {
        if (pwrite(file, pages, sizeof pages, number * PAGE) != sizeof pages) {
            perror("pwrite");
            return 1;
        }
        atomic_store(count, number + STEP);
        usleep(200);
    }
    return 0;
}

static void write_near_the_end(const char *path, atomic_long *count) {
    int file = open_of(path);
    map_of(file, (size_t)PAGE * PAGES);
    for (;;) {
        if (pwrite(file, pages, PAGE, (atomic_load(count) - STEP / 2) * PAGE) != PAGE) {
            exit(1);
        }
    }
}

static void map_again_and_again(const char *path, atomic_long *count) {
    for (;;) {
        long last = atomic_load(count) - 1;
        int file = open_of(path);
        char *map = map_of(file, (size_t)PAGE * PAGES);
        (void)*(volatile char *)(map + last * PAGE);
        munmap(map, (size_t)PAGE * PAGES);
        close(file);
    }
}

static int map(const char *path, atomic_long *count) {
    while (atomic_load(count) == 0) {
        usleep(1000);
    }
    pid_t children[CHILDREN];
    for (int number = 0; number < CHILDREN; number++) {
        children[number] = fork();
        if (children[number] == 0 && number == 0) {
            write_near_the_end(path, count);
        } else if (children[number] == 0) {
            map_again_and_again(path, count);
        }
    }
    while (atomic_load(count) < PAGES) {
        usleep(1000);
    }
    int failed = 0;
    for (int number = 0; number < CHILDREN; number++) {
        int status = 0;
        kill(children[number], SIGKILL);
        waitpid(children[number], &status, 0);
        if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL) {
            printf("child %d ended with status %d\n", number, status);
            failed = 1;
        }
    }
    return failed;
}

int main(int argument_count, char **arguments) {
    if (argument_count != 4) {
        return 2;
    }
    alarm(PATIENCE_SECONDS);
    int counter = open_of(arguments[2]);
    if (ftruncate(counter, PAGE) != 0) {
        return 1;
    }
    atomic_long *count = map_of(counter, PAGE);
    return strcmp(arguments[3], "appends") == 0 ? append(arguments[1], count) : map(arguments[1], count);
}
