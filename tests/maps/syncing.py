"""Threads that map a file shared each, write to it and sync it without end: syncing.py TREE. Says when all have begun."""

import mmap
import os
import sys
import threading

THREADS = 4
begun = threading.Barrier(THREADS + 1)


def work(number):
    fd = os.open(f"{sys.argv[1]}/synced-{number}", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 1 << 20)
    map = mmap.mmap(fd, 1 << 20)
    round = 0
    while True:
        map[round * 4096 % len(map)] = round % 256
        os.pwrite(fd, b"x" * 4096, round * 8192 % len(map))
        os.fdatasync(fd)
        round += 1
        if round == 10:
            begun.wait()


for number in range(THREADS):
    threading.Thread(target=work, args=(number,), daemon=True).start()
begun.wait()
print("begun", flush=True)
threading.Event().wait()
