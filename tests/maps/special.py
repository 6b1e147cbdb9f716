"""Sockets and pipes in a tree that this process has through the library: special.py TREE."""

import os
import socket
import stat
import sys

tree = sys.argv[1].rstrip("/")
folder = f"{tree}/{'long' * 20}/{'er' * 30}"
os.makedirs(folder)
os.chdir(tree)
for name in ("relative", f"{tree}/absolute", f"{folder}/far"):
    if len(name) > 100:
        # Longer than an address: by the folder.
        os.chdir(folder)
        name = "far"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(name)
    listener.listen()
    assert stat.S_ISSOCK(os.stat(name).st_mode)
    caller = socket.socket(socket.AF_UNIX)
    caller.connect(name)
    accepted, _ = listener.accept()
    caller.send(b"heard")
    assert accepted.recv(10) == b"heard"
    os.unlink(name)
    try:
        socket.socket(socket.AF_UNIX).connect(name)
    except FileNotFoundError:
        pass
    else:
        raise AssertionError("it is there still")
os.chdir(tree)

os.mkfifo("pipe", 0o600)
child = os.fork()
if child == 0:
    with open(f"{tree}/pipe", "w") as pipe:
        pipe.write("through a pipe")
    os._exit(0)
with open("pipe") as pipe:
    assert pipe.read() == "through a pipe"
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("all")
