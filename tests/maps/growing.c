// A process extends a file and stores to the new pages by a mapping, while two others open and map it again and again:
// growing FOLDER [privately], which makes the others map it as a user whom the file's mode forbids to open it. A page
// within the size that a completed `pwrite` gave the file exists in the mapping, and what is stored there stays.
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096, PAGES = 2048, ROUNDS = 16, READERS = 2, OTHER_USER = 65534 };

static char *map_of(int file) {
    char *map = mmap(0, (size_t)PAGE * PAGES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
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

static void open_again_and_again(const char *path, int privately) {
    for (;;) {
        int file = open_of(path);
        if (privately && seteuid(OTHER_USER) != 0) {
            exit(1);
        }
        munmap(map_of(file), (size_t)PAGE * PAGES);
        if (privately && seteuid(0) != 0) {
            exit(1);
        }
        close(file);
    }
}

static int grow(const char *path) {
    static char page[PAGE];
    long lost = 0;
    int file = open_of(path);
    char *map = map_of(file);
    for (long round = 0; round < ROUNDS; round++) {
        if (ftruncate(file, 0) != 0) {
            perror("ftruncate");
            return 1;
        }
        for (long number = 0; number < PAGES; number++) {
            if (pwrite(file, page, PAGE, number * PAGE) != PAGE) {
                perror("pwrite");
                return 1;
            }
            *(volatile long *)(map + number * PAGE) = round + number + 1;
        }
        for (long number = 0; number < PAGES; number++) {
            lost += *(volatile long *)(map + number * PAGE) != round + number + 1;
        }
    }
    printf("%ld lost\n", lost);
    fflush(stdout);
    return lost != 0;
}

int main(int count, char **arguments) {
    static char path[4096];
    snprintf(path, sizeof path, "%s/growing", count > 1 ? arguments[1] : ".");
    close(open_of(path));
    pid_t readers[READERS];
    for (int number = 0; number < READERS; number++) {
        readers[number] = fork();
        if (readers[number] == 0) {
            open_again_and_again(path, count > 2);
        }
    }
    pid_t grower = fork();
    if (grower == 0) {
        _exit(grow(path));
    }
    int status = 0;
    waitpid(grower, &status, 0);
    for (int number = 0; number < READERS; number++) {
        if (waitpid(readers[number], 0, WNOHANG) != 0) {
            printf("a reader ended\n");
            status = 1;
        }
        kill(readers[number], SIGKILL);
        waitpid(readers[number], 0, 0);
    }
    if (WIFSIGNALED(status)) {
        printf("ended by signal %d\n", WTERMSIG(status));
    }
    return status != 0;
}
