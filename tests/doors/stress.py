"""Programs at the same hundred files, each with a cell of its own in them that it stamps: what was written stays, and whoever
reads after a write has returned sees it. And at one file to which all append lines.

stress.py work FOLDER TABLE NUMBER [maps] [dies]    a worker; `maps`: it maps files too; `dies`: what serves it may be
                                                    killed: calls fail, mapped pages are gone, reads are short
stress.py judge FOLDER TABLE WORKERS                compares what is there at the end

TABLE is a folder outside of the tree: `cells` has for each cell the last stamp that a write began and the last that it
completed, and `lines-N` the lines of a worker, begun and completed; workers end when `stop` is there. A cell is eight bytes, which are stored and read at once.
"""
import errno, mmap, os, random, signal, struct, sys, time, traceback

FILES, WORKERS, BYTES = 100, 8, 8192
# Cells of one file lie in two pages, those of all workers beside each other.
PLACES = (64, 4096 + 1024)
GONE = (errno.EIO, errno.ENOTCONN, errno.ECONNABORTED, errno.ENOENT, errno.ENODEV, errno.ENXIO)
CELL = struct.Struct("<Q")


def place(worker, part):
    return PLACES[part] + worker * 8


class Table:
    """Last begun and last completed stamps, shared by all processes."""

    def __init__(self, folder):
        file = os.open(folder + "/cells", os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(file, FILES * WORKERS * 2 * 16)
        self.words = memoryview(mmap.mmap(file, FILES * WORKERS * 2 * 16)).cast("Q")

    def at(self, file, worker, part):
        return ((file * WORKERS + worker) * 2 + part) * 2

    def begun(self, file, worker, part):
        return self.words[self.at(file, worker, part)]

    def completed(self, file, worker, part):
        return self.words[self.at(file, worker, part) + 1]

    def begin(self, file, worker, part):
        at = self.at(file, worker, part)
        self.words[at] += 1
        return self.words[at]

    def complete(self, file, worker, part, stamp):
        self.words[self.at(file, worker, part) + 1] = stamp


class Worker:
    def __init__(self, folder, table, number, maps, dies):
        self.folder, self.table, self.number, self.maps, self.dies = folder, Table(table), number, maps, dies
        self.lines = os.open(f"{table}/lines-{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.log, self.files, self.mapped, self.next = None, {}, {}, 0
        self.stop = table + "/stop"
        with open(f"{table}/lines-{number}") as lines:
            self.next = sum(line.startswith("b") for line in lines)
        self.counts = {"written": 0, "stored": 0, "read": 0, "loaded": 0, "appended": 0, "failed": 0}
        self.random = random.Random(number * 1000 + self.next)

    def path(self, file):
        return f"{self.folder}/file-{file:03}"

    def file(self, file):
        if file not in self.files:
            if len(self.files) > 20:
                self.close(next(iter(self.files)))
            self.files[file] = os.open(self.path(file), os.O_RDWR)
        return self.files[file]

    def map(self, file):
        if file not in self.mapped:
            self.mapped[file] = mmap.mmap(self.file(file), BYTES)
        return self.mapped[file]

    def close(self, file):
        map = self.mapped.pop(file, None)
        if map:
            map.close()
        os.close(self.files.pop(file))

    def write(self, file):
        part = self.random.randrange(2)
        stamp = self.table.begin(file, self.number, part)
        at = place(self.number, part)
        if self.maps and self.random.random() < 0.5:
            map = self.map(file)
            memoryview(map)[at:at + 8].cast("Q")[0] = stamp
            if self.dies:
                # What could not be written back is lost.
                map.flush()
            self.counts["stored"] += 1
        else:
            assert os.pwrite(self.file(file), CELL.pack(stamp), at) == 8
            self.counts["written"] += 1
        self.table.complete(file, self.number, part, stamp)

    def read(self, file):
        whole = [(worker, part) for worker in range(WORKERS) for part in range(2)]
        least = [self.table.completed(file, *cell) for cell in whole]
        if self.maps and self.random.random() < 0.5:
            words = memoryview(self.map(file)).cast("Q")
            found = [words[place(*cell) // 8] for cell in whole]
            self.counts["loaded"] += 1
        else:
            data = os.pread(self.file(file), BYTES, 0)
            if self.dies and len(data) < BYTES:
                # The second page could not be read.
                raise OSError(errno.EIO, "short read")
            assert len(data) == BYTES, f"{self.path(file)} has {len(data)} bytes"
            found = [CELL.unpack_from(data, place(*cell))[0] for cell in whole]
            self.counts["read"] += 1
        for cell, low, value in zip(whole, least, found):
            high = self.table.begun(file, *cell)
            assert low <= value <= high, f"file {file} cell {cell}: {value}, and not from {low} to {high}"

    def append(self):
        if self.log is None:
            self.log = os.open(self.folder + "/log", os.O_WRONLY | os.O_APPEND)
        line = f"{self.number} {self.next} {'x' * self.random.randrange(100)}."
        os.write(self.lines, f"b {line}\n".encode())
        self.next += 1
        assert os.write(self.log, (line + "\n").encode()) == len(line) + 1
        os.write(self.lines, f"c {line}\n".encode())
        self.counts["appended"] += 1

    def reopen(self):
        """After a mount was killed: there is another one in a moment."""
        self.counts["failed"] += 1
        for file in list(self.files):
            try:
                self.close(file)
            except OSError:
                pass
        if self.log is not None:
            try:
                os.close(self.log)
            except OSError:
                pass
        self.log, self.files, self.mapped = None, {}, {}
        until = time.time() + 60
        while True:
            try:
                return os.stat(self.folder + "/log")
            except OSError as error:
                if error.errno not in GONE or time.time() > until:
                    raise
                time.sleep(0.01)

    def work(self):
        while not os.path.exists(self.stop):
            file = self.random.randrange(FILES)
            try:
                what = self.random.random()
                if what < 0.4:
                    self.write(file)
                elif what < 0.85:
                    self.read(file)
                elif what < 0.95:
                    self.append()
                elif file in self.files:
                    if self.random.random() < 0.5:
                        os.fsync(self.files[file])
                    else:
                        self.close(file)
            except OSError as error:
                if not self.dies or error.errno not in GONE:
                    raise
                self.reopen()
        print("worked", *(f"{what} {count}" for what, count in self.counts.items()), flush=True)


def supervise(begin):
    """A worker that dies by SIGBUS or SIGKILL, when its mount is killed, is followed by another."""
    while True:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                worker = begin()
                worker.reopen()
                worker.work()
                code = 0
            except BaseException as error:
                traceback.print_exc()
            os._exit(code)
        status = os.waitpid(child, 0)[1]
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGBUS, signal.SIGKILL):
            continue
        assert status == 0, f"status {status}"
        return


def judge(folder, table, workers):
    cells = Table(table)
    for file in range(FILES):
        with open(f"{folder}/file-{file:03}", "rb") as opened:
            data = opened.read()
        assert len(data) == BYTES
        for worker in range(WORKERS):
            for part in range(2):
                value = CELL.unpack_from(data, place(worker, part))[0]
                low, high = cells.completed(file, worker, part), cells.begun(file, worker, part)
                assert low <= value <= high, f"file {file} cell {worker} {part}: {value}, not from {low} to {high}"
    begun, completed = set(), set()
    for worker in range(workers):
        with open(f"{table}/lines-{worker}") as lines:
            for line in lines:
                (begun if line[0] == "b" else completed).add(line[2:-1])
    with open(folder + "/log") as opened:
        lines = opened.read().splitlines()
    assert len(lines) == len(set(lines)), "a line is there twice"
    missing, strange = sorted(completed - set(lines)), sorted(set(lines) - begun)
    assert not missing and not strange, f"missing: {missing}, torn: {strange}, of {len(lines)}"
    last = {}
    for line in lines:
        worker, number = line.split()[:2]
        assert last.get(worker, -1) < int(number), "lines of one program are out of order"
        last[worker] = int(number)
    print("right", len(lines))


verb, folder, table, number = sys.argv[1:5]
flags = sys.argv[5:]
if verb == "judge":
    judge(folder, table, int(number))
elif "dies" in flags:
    supervise(lambda: Worker(folder, table, int(number), "maps" in flags, True))
else:
    Worker(folder, table, int(number), "maps" in flags, "dies" in flags).work()
