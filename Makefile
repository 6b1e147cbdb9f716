# What one does with the tree. `make test` is what CI runs; `make prove` takes as long as it takes.

# Minutes for each fuzz target.
FUZZ_MINUTES ?= 10

# Where `make install` puts things; DESTDIR is put in front, for packages.
PREFIX ?= /usr/local

.PHONY: build demo test help install prove prove-cluster prove-copies prove-crash prove-damage prove-doors prove-fuzz \
	prove-kill prove-planted prove-sim prove-properties prove-suites prove-transport prove-verbs

build:
	@scripts/setup libfabric-dev
	cargo build --release --locked -p hearth -p interpose

# The main job, shown: sqlite3 and RocksDB on two nodes, the first killed in the middle, carried on at the second, and nothing
# acknowledged lost; then latencies.
demo:
	@scripts/room 1536 3072 2048
	@scripts/setup libfabric-dev sqlite3 db_bench pkill python3
	@$(MAKE) --no-print-directory build
	@scripts/demo

test:
	@scripts/room 1536 16384 2048
	@scripts/setup libfabric-dev sqlite3 db_bench pkill cc make git rsync cpio patch python3 setfattr ip fusermount3
	@scripts/setup python3-lmdb || echo "setup: the test of LMDB is skipped"
	@( scripts/check format cargo fmt --all --check; \
	   scripts/check clippy cargo clippy --workspace --all-targets --locked -- -D warnings; \
	   scripts/check library cargo build --locked -p interpose; \
	   scripts/check compile cargo test --workspace --no-run --locked; \
	   PROPTEST_RNG_SEED=$${PROPTEST_RNG_SEED:-1} scripts/check tests \
	     cargo test --workspace --no-fail-fast --locked -- --show-output; \
	   scripts/check build cargo build --release --locked -p hearth -p interpose; \
	   scripts/check demo scripts/demo small \
	 ) 2>&1 | scripts/sum-tests

help:
	@scripts/help

# The program, its library in lib/hearth/, man pages and completions of bash, zsh and fish.
install: build
	@scripts/install "$(DESTDIR)$(PREFIX)"

prove: prove-crash prove-damage prove-kill prove-copies prove-doors prove-sim prove-properties prove-fuzz prove-transport \
	prove-cluster \
	prove-planted

# Every crash state of every structure, with the full counts; a run that was stopped goes on where it was.
prove-crash:
	@scripts/prove-crash $(if $(FRESH),--fresh)

# Damaged pools and trees, random batches beside the model, hostile calls and records.
prove-damage:
	@HEARTH_PROVE=1 scripts/check tests cargo test --release --locked -p area -p sharedfs --no-fail-fast \
	 --test damage --test model --test suite -- --skip crash --nocapture 2>&1 | scripts/sum-tests

# 300 kills of programs, 300 of daemons under programs that go on, 100 of both; 100 more of daemons under each of what has
# things open and locked; processes at the same files at once; nodes that several commands start, end and kill at once.
prove-kill: build
	@scripts/setup sqlite3
	@HEARTH_KILLS=300 HEARTH_RESTARTS_EACH=100 HEARTH_TOGETHER=10 HEARTH_STARTS=100 scripts/check tests \
	 cargo test --release --locked -p hearth --test kill --test restart --test inherited --test together --test start --no-fail-fast \
	 -- --nocapture --test-threads=2 \
	 2>&1 | scripts/sum-tests

# Programs at the library and at the mount at the same files: ten times the schedules of `make test`, and programs that share
# a hundred files for ten minutes each while nothing, the daemon, what serves the mount, or one after the other is killed;
# random calls of three processes beside the kernel's file system for ten minutes, and of four on a full pool.
prove-doors: build
	@scripts/setup sqlite3
	@( HEARTH_DOORS=10 scripts/check tests cargo test --release --locked -p hearth --test doors --no-fail-fast \
	    -- --nocapture --test-threads=2 --skip stress::; \
	   HEARTH_STRESS=600 scripts/check tests cargo test --release --locked -p hearth --test doors --no-fail-fast \
	    -- --nocapture --test-threads=1 stress:: ; \
	   HEARTH_PROVE=1 scripts/check tests cargo test --release --locked -p hearth --test lockstep --test out_of_space \
	    --no-fail-fast -- --nocapture \
	 ) 2>&1 | scripts/sum-tests

# Nodes of clusters killed at any instant: the one that leads, also under databases, copies, daemons alone, two nodes at once,
# all in any order, and either in the middle of a move; nodes with other pools, a manager that is away, and copies whose disk is
# full, whose medium fails, or which are slow; and damaged logs of programs at the node that leads.
prove-copies: build
	@scripts/setup sqlite3 db_bench python3 cc
	@HEARTH_COPIES_TOLD=1 HEARTH_COPIES_HEADS=100 HEARTH_COPIES_DATABASES=100 \
	 HEARTH_COPIES_REPLICAS=100 HEARTH_COPIES_DAEMONS=100 \
	 HEARTH_COPIES_DOUBLES=20 HEARTH_COPIES_ORDERS=36 \
	 HEARTH_TROUBLE_MOVES=64 HEARTH_TROUBLE_POOLS=6 HEARTH_TROUBLE_LEASES=3 \
	 HEARTH_TROUBLE_DISKS=24 HEARTH_TROUBLE_MEDIA=24 HEARTH_TROUBLE_SLOW=24 HEARTH_COPIES_LOGS=40 scripts/check tests \
	 cargo test --release --locked -p hearth --test copies --test trouble --test copy_faults --test head_logs --no-fail-fast \
	 -- --nocapture --test-threads=1 \
	 2>&1 | scripts/sum-tests

# The real LibFS and SharedFS under the stepped host: a thousand histories that end with the machine, every instant of
# an operation at which another can come between, a thousand schedules, 3,000 worlds of two and three nodes.
prove-sim:
	@HEARTH_PROVE=1 HEARTH_SEEDS=50 HEARTH_WORLD_SEEDS=3000 scripts/check tests cargo test --release --locked -p sim --no-fail-fast \
	 --test assise_machine_death --test assise_preempted --test assise_schedules --test assise_read_once \
	 --test assise_restart --test world -- --nocapture \
	 2>&1 | scripts/sum-tests

# What must hold for any input, for other inputs each time: the model beside the kernel, LibFS beside the model, and all
# that is stated as a property. `make test` does the same with the inputs of one seed.
prove-properties:
	@PROPTEST_CASES=2000 VFS_DIFFERENTIAL_CASES=2000 ASSISE_CASES=1000 HEARTH_HISTORIES=10000 \
	 HEARTH_WORLDS=all scripts/check tests \
	 cargo test --release --locked -p vfs -p format -p pmem -p ipc -p area -p ccnvm -p libfs -p sharedfs -p sim --no-fail-fast \
	 -- --skip crash 2>&1 | scripts/sum-tests

# Each bug of tests/planted in a copy of the tree, and whether a test finds it.
prove-planted:
	@scripts/setup git
	@scripts/planted

# Every decoder against inputs that a fuzzer makes up, a daemon against hostile logs, memory, greetings and cut files;
# a run that was stopped goes on where it was.
prove-fuzz:
	@scripts/fuzz $(FUZZ_MINUTES)

# Suites that others wrote, of the folder SUITES; see docs/compatibility.md.
prove-suites:
	@test -n "$(SUITES)" || { echo "usage: make prove-suites SUITES=DIR" >&2; exit 2; }
	@scripts/suites "$(SUITES)"

# The cluster manager: 10,000 seeds of the fence, every crash state of its log, 500 kills, 200 expulsions, ten minutes
# under load; on ZooKeeper too, if Debian's libzookeeper-java and a Java are there; then its programs.
prove-cluster:
	@( HEARTH_PROVE=1 scripts/check tests cargo test --release -p cluster --features zookeeper --no-fail-fast --locked -- --nocapture; \
	   HEARTH_PROVE=1 scripts/check programs cargo test --release -p hearth --features zookeeper --test manager --no-fail-fast --locked \
	    -- --nocapture \
	 ) 2>&1 | scripts/sum-tests

# Connections on every bed, a thousand fences, strangers at a listener.
prove-transport:
	@( HEARTH_PROVE=1 scripts/check tests cargo test --release -p transport --no-fail-fast --locked -- --nocapture; \
	   HEARTH_PROVE=1 scripts/check verbs scripts/verbs \
	 ) 2>&1 | scripts/sum-tests

# The part of it that runs on verbs: soft-RoCE under Debian's kernel in QEMU.
prove-verbs:
	@HEARTH_PROVE=1 scripts/check verbs scripts/verbs 2>&1 | scripts/sum-tests
