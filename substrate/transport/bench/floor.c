/* The floor that transport is compared with: the same exchanges with nothing but libfabric, or nothing but TCP.
 *
 * floor rounds BYTES COUNT: writes with an immediate, answered by an 8-byte write with an immediate, both sides polling;
 * prints the median of a round in nanoseconds. floor stream BYTES COUNT: that many writes to a TCP socket; prints bytes
 * per second. Two processes on the loopback. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_rma.h>

#define CHECK(call)                                                                            \
    do {                                                                                       \
        long result_ = (long) (call);                                                          \
        if (result_ < 0) {                                                                     \
            fprintf(stderr, "floor: %s: %ld\n", #call, result_);                               \
            exit(1);                                                                           \
        }                                                                                      \
    } while (0)

struct remote {
    uint64_t address, key;
};

static struct fid_fabric *fabric;
static struct fid_domain *domain;
static struct fid_eq *eq;
static struct fid_cq *cq;
static struct fid_ep *ep;
static struct fid_mr *mr;
static char *memory;
static struct remote theirs;

static uint64_t now_ns(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t) time.tv_sec * 1000000000 + (uint64_t) time.tv_nsec;
}

/* Two polling threads on one processor would wait for the scheduler, not for each other. */
static void pin(unsigned processor)
{
    cpu_set_t set;

    CPU_ZERO(&set);
    CPU_SET(processor, &set);
    CHECK(sched_setaffinity(0, sizeof(set), &set));
}

static struct fi_info *find(const char *port, uint64_t flags)
{
    struct fi_info *hints = fi_allocinfo(), *info;

    hints->ep_attr->type = FI_EP_MSG;
    hints->caps = FI_MSG | FI_RMA;
    hints->mode = FI_RX_CQ_DATA;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    hints->fabric_attr->prov_name = strdup("tcp");
    CHECK(fi_getinfo(FI_VERSION(1, 11), "127.0.0.1", port, flags, hints, &info));
    return info;
}

static void open_domain(struct fi_info *info, size_t bytes)
{
    struct fi_eq_attr eq_attr = { .wait_obj = FI_WAIT_UNSPEC };
    struct fi_cq_attr cq_attr = { .format = FI_CQ_FORMAT_DATA, .size = 256 };

    CHECK(fi_fabric(info->fabric_attr, &fabric, NULL));
    CHECK(fi_eq_open(fabric, &eq_attr, &eq, NULL));
    CHECK(fi_domain(fabric, info, &domain, NULL));
    CHECK(fi_cq_open(domain, &cq_attr, &cq, NULL));
    memory = mmap(NULL, 2 * bytes + 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    memset(memory, 0, 2 * bytes + 4096);
    CHECK(fi_mr_reg(domain, memory, 2 * bytes + 4096, FI_REMOTE_WRITE | FI_WRITE | FI_SEND | FI_RECV, 0,
                    (uint64_t) getpid(), 0, &mr, NULL));
}

static void open_endpoint(struct fi_info *info)
{
    CHECK(fi_endpoint(domain, info, &ep, NULL));
    CHECK(fi_ep_bind(ep, &eq->fid, 0));
    CHECK(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV));
    CHECK(fi_enable(ep));
}

static void await_event(uint32_t wanted, struct fi_eq_cm_entry *entry)
{
    uint32_t event;

    CHECK(fi_eq_sread(eq, &event, entry, sizeof(*entry), 10000, 0));
    if (event != wanted)
        exit(1);
}

/* Waits for one immediate, as both sides do all the time. */
static void take(void)
{
    struct fi_cq_data_entry entries[8];

    for (;;) {
        ssize_t count = fi_cq_read(cq, entries, 8);

        for (ssize_t at = 0; at < count; at++)
            if (entries[at].flags & FI_REMOTE_CQ_DATA)
                return;
        if (count < 0 && count != -FI_EAGAIN)
            exit(1);
    }
}

static void put(size_t bytes)
{
    ssize_t result;

    do
        result = fi_writedata(ep, memory, bytes, fi_mr_desc(mr), 7, 0, theirs.address, theirs.key, NULL);
    while (result == -FI_EAGAIN);
    CHECK(result);
}

static int compare(const void *one, const void *other)
{
    uint64_t a = *(const uint64_t *) one, b = *(const uint64_t *) other;

    return (a > b) - (a < b);
}

static void swap_keys(int out, int in, struct fi_info *info)
{
    int virtual_addresses = !!(info->domain_attr->mr_mode & FI_MR_VIRT_ADDR);
    struct remote ours = { virtual_addresses ? (uint64_t) (uintptr_t) memory : 0, fi_mr_key(mr) };

    CHECK(write(out, &ours, sizeof(ours)));
    CHECK(read(in, &theirs, sizeof(theirs)));
}

static void answer(size_t bytes, size_t count, int out, int in)
{
    struct fi_info *info = find("0", FI_SOURCE);
    struct fid_pep *pep;
    struct fi_eq_cm_entry entry;
    struct sockaddr_in name;
    size_t name_bytes = sizeof(name);

    open_domain(info, bytes);
    CHECK(fi_passive_ep(fabric, info, &pep, NULL));
    CHECK(fi_pep_bind(pep, &eq->fid, 0));
    CHECK(fi_listen(pep));
    CHECK(fi_getname(&pep->fid, &name, &name_bytes));
    CHECK(write(out, &name.sin_port, sizeof(name.sin_port)));
    await_event(FI_CONNREQ, &entry);
    open_endpoint(entry.info);
    CHECK(fi_accept(ep, NULL, 0));
    await_event(FI_CONNECTED, &entry);
    swap_keys(out, in, info);
    pin(1);
    for (size_t round = 0; round < count; round++) {
        take();
        put(8);
    }
    CHECK(read(in, &name.sin_port, 1));
    _exit(0);
}

static void ask(size_t bytes, size_t count, int out, int in)
{
    uint64_t *times = calloc(count, sizeof(*times));
    char service[8];
    uint16_t port;
    struct fi_info *info;
    struct fi_eq_cm_entry entry;

    CHECK(read(in, &port, sizeof(port)));
    snprintf(service, sizeof(service), "%u", ntohs(port));
    info = find(service, 0);
    open_domain(info, bytes);
    open_endpoint(info);
    CHECK(fi_connect(ep, info->dest_addr, NULL, 0));
    await_event(FI_CONNECTED, &entry);
    swap_keys(out, in, info);
    pin(0);
    for (size_t round = 0; round < count; round++) {
        uint64_t start = now_ns();

        put(bytes);
        take();
        times[round] = now_ns() - start;
    }
    CHECK(write(out, "x", 1));
    qsort(times, count, sizeof(*times), compare);
    printf("%lu\n", (unsigned long) times[count / 2]);
}

static void stream(size_t bytes, size_t count)
{
    struct sockaddr_in name = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t name_bytes = sizeof(name);
    int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1, data;
    char *buffer = calloc(1, bytes);
    uint64_t total = (uint64_t) bytes * count, start;

    CHECK(bind(listener, (struct sockaddr *) &name, sizeof(name)));
    CHECK(listen(listener, 1));
    CHECK(getsockname(listener, (struct sockaddr *) &name, &name_bytes));
    if (fork() == 0) {
        data = accept(listener, NULL, NULL);
        pin(1);
        while (total > 0) {
            ssize_t got = read(data, buffer, bytes);

            if (got <= 0)
                _exit(1);
            total -= (uint64_t) got;
        }
        CHECK(write(data, "x", 1));
        _exit(0);
    }
    data = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(connect(data, (struct sockaddr *) &name, sizeof(name)));
    CHECK(setsockopt(data, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)));
    pin(0);
    start = now_ns();
    for (size_t at = 0; at < count; at++)
        for (size_t done = 0; done < bytes;) {
            ssize_t put_bytes = write(data, buffer + done, bytes - done);

            CHECK(put_bytes);
            done += (size_t) put_bytes;
        }
    CHECK(read(data, buffer, 1));
    printf("%.0f\n", (double) total * 1e9 / (double) (now_ns() - start));
    wait(NULL);
}

int main(int count, char **arguments)
{
    int up[2], down[2];
    size_t bytes, rounds;

    if (count != 4)
        return 2;
    bytes = strtoul(arguments[2], NULL, 10);
    rounds = strtoul(arguments[3], NULL, 10);
    alarm(60);
    if (strcmp(arguments[1], "stream") == 0) {
        stream(bytes, rounds);
        return 0;
    }
    CHECK(pipe(up));
    CHECK(pipe(down));
    if (fork() == 0)
        answer(bytes, rounds, up[1], down[0]);
    ask(bytes, rounds, down[1], up[0]);
    wait(NULL);
    return 0;
}
