/* A library that a program loads after the preloaded one: a thread that has set the flag ends in its next open. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>

__thread int ends_in_open;

int open(const char *path, int flags, ...) {
    int (*next)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
    va_list more;
    va_start(more, flags);
    int mode = va_arg(more, int);
    va_end(more);
    if (ends_in_open) pthread_exit(PTHREAD_CANCELED);
    return next(path, flags, mode);
}
