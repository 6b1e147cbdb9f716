"""A process in another root, and one whose mount is taken away: elsewhere.py TREE UMOUNT..., the command that does it."""

import errno
import mmap
import os
import subprocess
import sys
import tempfile

tree = sys.argv[1]
fd = os.open(f"{tree}/file", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
os.write(fd, b"before the root")
root = tempfile.mkdtemp()
child = os.fork()
if child == 0:
    # It is a client of its own from here on: from another root it would not find the daemon.
    os.fstat(fd)
    os.chroot(root)
    map = mmap.mmap(fd, 15)
    map[0:6] = b"behind"
    os._exit(0 if os.pread(fd, 15, 0) == b"behind the root" else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), os.pread(fd, 15, 0).decode())
os.rmdir(root)

map = mmap.mmap(fd, 15)
map[0:6] = b"within"
map.flush()
subprocess.run(sys.argv[2:], check=True, stdout=subprocess.DEVNULL)
# By the library again, all that was written back.
print(os.pread(fd, 15, 0).decode(), os.pwrite(fd, b"without", 0), os.fstat(fd).st_size)
try:
    mmap.mmap(fd, 15)
except OSError as why:
    print(errno.errorcode[why.errno])
sys.stdout.flush()
os._exit(0)
