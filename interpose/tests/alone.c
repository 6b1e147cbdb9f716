/* Prints whether the process counts as single-threaded: `alone FOLDER [LIBRARY | write | change]` prints it at the
 * start, and again after it has loaded a library or mapped executable memory that cannot be checked. With OWN_CALL
 * the program contains a `syscall` outside of the C library; with NO_MAIN it is such a library. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/xattr.h>

#ifdef OWN_CALL
long own_call(long number) {
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "0"(number) : "rcx", "r11", "memory");
    return result;
}
#else
long no_call(long number) {
    return number + 1;
}
#endif

#ifndef NO_MAIN
static void say(const char *folder) {
    char answer = '?';
    getxattr(folder, "user.hearth.alone", &answer, 1);
    putchar(answer);
}

int main(int count, char **arguments) {
    const int all = PROT_READ | PROT_WRITE | PROT_EXEC, kind = MAP_PRIVATE | MAP_ANONYMOUS;
    say(arguments[1]);
    if (count > 2 && strcmp(arguments[2], "write") == 0) {
        if (mmap(0, 4096, all, kind, -1, 0) == MAP_FAILED) return 1;
    } else if (count > 2 && strcmp(arguments[2], "change") == 0) {
        void *memory = mmap(0, 4096, PROT_READ, kind, -1, 0);
        if (memory == MAP_FAILED || mprotect(memory, 4096, PROT_READ | PROT_EXEC)) return 1;
    } else if (count > 2 && !dlopen(arguments[2], RTLD_NOW)) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    say(arguments[1]);
    putchar('\n');
    return 0;
}
#endif
