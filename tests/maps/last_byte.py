"""The last byte of a file that a map has changed stays as it is when others open and map the file: last_byte.py FOLDER."""

import mmap
import os
import sys

BYTES = 8192


def elsewhere(act):
    """Does something in another process, which has opened nothing before."""
    child = os.fork()
    if child == 0:
        act()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def map_it(path, size):
    fd = os.open(path, os.O_RDWR)
    mmap.mmap(fd, size)[0]
    os.pread(fd, 10, size)
    os.close(fd)


def extend(path, size):
    fd = os.open(path, os.O_RDWR)
    os.pwrite(fd, b"." * (size - BYTES), BYTES)
    os.close(fd)


def make_written(path):
    elsewhere(lambda: open(path, "wb").write(b"." * BYTES))


def make_truncated(path):
    open(path, "wb").truncate(BYTES)


def check(path, make, size):
    make(path)
    fd = os.open(path, os.O_RDWR)
    first = mmap.mmap(fd, BYTES)
    first[0] = 1
    if size > BYTES:
        elsewhere(lambda: extend(path, size))
    assert os.fstat(fd).st_size == size
    os.pread(fd, 10, size - 5)
    area = mmap.mmap(fd, size)
    for round in range(1, 30):
        area[size - 1] = round
        elsewhere(lambda: map_it(path, size))
        assert (area[size - 1], os.pread(fd, 1, size - 1)[0]) == (round, round), (path, round)
    area.close()
    first.close()
    os.close(fd)


for number, make in enumerate([make_written, make_truncated]):
    for size in [BYTES, BYTES + 1, BYTES + 4096]:
        check(f"{sys.argv[1]}/last-{number}-{size}", make, size)
print("kept")
