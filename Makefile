# What one does with the tree. `make test` is what CI runs; `make prove` takes as long as it takes.

# Minutes for each fuzz target.
FUZZ_MINUTES ?= 10

.PHONY: build test prove prove-crash prove-fuzz prove-transport prove-cluster

build:
	cargo build --release --workspace --locked

test:
	@( scripts/check format cargo fmt --all --check; \
	   scripts/check clippy cargo clippy --workspace --all-targets --locked -- -D warnings; \
	   scripts/check tests cargo test --workspace --no-fail-fast --locked \
	 ) 2>&1 | scripts/sum-tests

prove: prove-crash prove-fuzz prove-transport prove-cluster

# Every crash state of every structure, with the full counts.
prove-crash:
	@HEARTH_PROVE=1 scripts/check tests cargo test --release -p pmem -p area --no-fail-fast --locked -- --nocapture \
	 2>&1 | scripts/sum-tests

# Every decoder against inputs that a fuzzer makes up; a run that was stopped goes on where it was.
prove-fuzz:
	@scripts/fuzz $(FUZZ_MINUTES)

# The cluster manager: 10,000 seeds of the fence, every crash state of its log, 500 kills, 200 expulsions, ten minutes
# under load; on ZooKeeper too, if Debian's libzookeeper-java and a Java are there.
prove-cluster:
	@HEARTH_PROVE=1 scripts/check tests cargo test --release -p cluster --features zookeeper --no-fail-fast --locked -- --nocapture \
	 2>&1 | scripts/sum-tests

# Connections on every bed, a thousand fences, strangers at the door, planted bugs.
prove-transport:
	@( HEARTH_PROVE=1 scripts/check tests cargo test --release -p transport --no-fail-fast --locked -- --nocapture; \
	   scripts/check planted scripts/planted-transport \
	 ) 2>&1 | scripts/sum-tests
