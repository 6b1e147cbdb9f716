/* The C part of the libfabric bindings: its calls are inline functions over tables of functions.
 *
 * The file makes no decisions. Each function is one step, and returns 0 or a positive errno of libfabric; the rules for
 * threads and lifetimes are those of `src/fabric/sys.rs`. The library is loaded with the first domain, because loading
 * takes 200 ms and most programs never use it. */

#include <arpa/inet.h>
#include <dlfcn.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#define API FI_VERSION(1, 11)

struct library {
    void *handle;
    int (*getinfo)(uint32_t, const char *, const char *, uint64_t, const struct fi_info *, struct fi_info **);
    void (*freeinfo)(struct fi_info *);
    struct fi_info *(*dupinfo)(const struct fi_info *);
    int (*fabric)(struct fi_fabric_attr *, struct fid_fabric **, void *);
    uint32_t (*version)(void);
};

struct hf_domain {
    struct library library;
    struct fi_info *info;
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    struct fid_eq *eq;
};

struct hf_facts {
    uint64_t immediate_bytes;
    uint64_t inline_bytes;
    uint32_t virtual_addresses;
    uint32_t immediate_uses_receive;
};

struct hf_event {
    uint32_t kind; /* 1 connection request, 2 connected, 3 closed, 4 failed or refused */
    int32_t error;
    void *endpoint;
    struct fi_info *info;
    uint64_t data_bytes;
    unsigned char data[256];
};

struct hf_completion {
    uint64_t context;
    uint64_t bytes;
    uint64_t immediate;
    uint32_t kind; /* 1 done, 2 frame, 3 immediate */
    int32_t error;
};

struct hf_endpoint {
    struct fid_ep *ep;
    struct fid_cq *cq;
    uint32_t has_list; /* several descriptors report events of its queue, not a single one */
};

static int from_library(ssize_t result)
{
    return result < 0 ? (int) -result : 0;
}

/* Held while the library is loaded, because loading changes state of the process that is restored afterwards. */
static pthread_mutex_t beginning = PTHREAD_MUTEX_INITIALIZER;

static int load(struct library *library)
{
    const char *cache = getenv("FI_MR_CACHE_MAX_COUNT");

    /*
     * libfabric's cache of registrations (verbs) grants all rights to each region, and leaves the region reachable after
     * its registration was closed. The library reads this setting only from the environment, when it is loaded. The
     * variable is written at most once, because a concurrent getenv of another thread may read moving memory.
     */
    if ((!cache || strcmp(cache, "0") != 0) && setenv("FI_MR_CACHE_MAX_COUNT", "0", 1) != 0)
        return FI_ENOMEM;
    library->handle = dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library->handle)
        return FI_ENOSYS;
    *(void **) &library->getinfo = dlsym(library->handle, "fi_getinfo");
    *(void **) &library->freeinfo = dlsym(library->handle, "fi_freeinfo");
    *(void **) &library->dupinfo = dlsym(library->handle, "fi_dupinfo");
    *(void **) &library->fabric = dlsym(library->handle, "fi_fabric");
    *(void **) &library->version = dlsym(library->handle, "fi_version");
    if (!library->getinfo || !library->freeinfo || !library->dupinfo || !library->fabric || !library->version)
        return FI_ENOSYS;
    return 0;
}

struct handlers {
    struct sigaction of[NSIG];
    unsigned char known[NSIG];
};

static void remember(struct handlers *handlers)
{
    for (int number = 1; number < NSIG; number++)
        handlers->known[number] = sigaction(number, NULL, &handlers->of[number]) == 0;
}

static void bring_back(const struct handlers *handlers)
{
    struct sigaction now;

    for (int number = 1; number < NSIG; number++)
        if (handlers->known[number] && sigaction(number, NULL, &now) == 0 &&
            now.sa_handler != handlers->of[number].sa_handler)
            sigaction(number, &handlers->of[number], NULL);
}

void hf_domain_close(struct hf_domain *domain)
{
    if (domain->domain)
        fi_close(&domain->domain->fid);
    if (domain->eq)
        fi_close(&domain->eq->fid);
    if (domain->fabric)
        fi_close(&domain->fabric->fid);
    if (domain->info)
        domain->library.freeinfo(domain->info);
    free(domain);
}

static int find(struct hf_domain *domain, const char *provider, const char *ip, uint64_t sends, uint64_t receives)
{
    struct fi_info *hints = domain->library.dupinfo(NULL);
    int result;

    if (!hints)
        return FI_ENOMEM;
    hints->ep_attr->type = FI_EP_MSG;
    hints->caps = FI_MSG | FI_RMA;
    /* Without this flag verbs reports no provider. */
    hints->mode = FI_RX_CQ_DATA;
    hints->addr_format = strchr(ip, ':') ? FI_SOCKADDR_IN6 : FI_SOCKADDR_IN;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    hints->domain_attr->threading = FI_THREAD_SAFE;
    hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
    hints->tx_attr->size = sends;
    hints->rx_attr->size = receives;
    hints->fabric_attr->prov_name = strdup(provider);
    result = domain->library.getinfo(API, ip, NULL, FI_SOURCE | FI_NUMERICHOST, hints, &domain->info);
    domain->library.freeinfo(hints);
    return from_library(result);
}

int hf_domain_open(const char *provider, const char *ip, uint64_t sends, uint64_t receives, struct hf_domain **out)
{
    struct hf_domain *domain = calloc(1, sizeof(*domain));
    struct fi_eq_attr eq = { .size = 1024, .wait_obj = FI_WAIT_FD };
    struct handlers handlers;
    int result;

    if (!domain)
        return FI_ENOMEM;
    /* Libraries below libfabric (libinfinipath, libpsm2) install handlers of SIGTERM and other signals that exit. */
    pthread_mutex_lock(&beginning);
    remember(&handlers);
    result = load(&domain->library);
    if (!result)
        result = find(domain, provider, ip, sends, receives);
    bring_back(&handlers);
    pthread_mutex_unlock(&beginning);
    if (!result)
        result = from_library(domain->library.fabric(domain->info->fabric_attr, &domain->fabric, NULL));
    if (!result)
        result = from_library(fi_eq_open(domain->fabric, &eq, &domain->eq, NULL));
    if (!result)
        result = from_library(fi_domain(domain->fabric, domain->info, &domain->domain, NULL));
    if (result) {
        hf_domain_close(domain);
        return result;
    }
    *out = domain;
    return 0;
}

void hf_facts(struct hf_domain *domain, struct hf_facts *facts)
{
    facts->immediate_bytes = domain->info->domain_attr->cq_data_size;
    facts->inline_bytes = domain->info->tx_attr->inject_size;
    facts->virtual_addresses = !!(domain->info->domain_attr->mr_mode & FI_MR_VIRT_ADDR);
    facts->immediate_uses_receive = !!((domain->info->mode | domain->info->rx_attr->mode) & FI_RX_CQ_DATA);
}

int hf_eq_descriptor(struct hf_domain *domain)
{
    int descriptor = -1;

    fi_control(&domain->eq->fid, FI_GETWAIT, &descriptor);
    return descriptor;
}

/* 0 if there is no event, so that the caller may sleep. */
int hf_eq_may_sleep(struct hf_domain *domain)
{
    struct fid *fid = &domain->eq->fid;

    return fi_trywait(domain->fabric, &fid, 1) == 0;
}

static int failure(struct hf_domain *domain, struct hf_event *event)
{
    struct fi_eq_err_entry entry = { .err_data = event->data, .err_data_size = sizeof(event->data) };

    if (fi_eq_readerr(domain->eq, &entry, 0) < 0)
        return 0;
    event->kind = 4;
    event->error = entry.err;
    event->endpoint = entry.fid;
    event->data_bytes = entry.err_data_size < sizeof(event->data) ? entry.err_data_size : sizeof(event->data);
    if (entry.err_data && entry.err_data != event->data)
        memcpy(event->data, entry.err_data, event->data_bytes);
    if (!entry.err_data)
        event->data_bytes = 0;
    return 1;
}

/* 1 if there was an event. */
int hf_eq_read(struct hf_domain *domain, struct hf_event *event)
{
    union {
        struct fi_eq_cm_entry entry;
        unsigned char bytes[sizeof(struct fi_eq_cm_entry) + 256];
    } read;
    uint32_t kind;
    ssize_t bytes;

    memset(event, 0, sizeof(*event));
    bytes = fi_eq_read(domain->eq, &kind, &read, sizeof(read), 0);
    if (bytes == -FI_EAVAIL)
        return failure(domain, event);
    if (bytes < (ssize_t) sizeof(read.entry))
        return 0;
    event->endpoint = read.entry.fid;
    event->data_bytes = (uint64_t) bytes - sizeof(read.entry);
    memcpy(event->data, read.bytes + sizeof(read.entry), event->data_bytes);
    switch (kind) {
    case FI_CONNREQ:
        event->kind = 1;
        event->info = read.entry.info;
        break;
    case FI_CONNECTED:
        event->kind = 2;
        break;
    case FI_SHUTDOWN:
        event->kind = 3;
        break;
    default:
        break;
    }
    return 1;
}

static int fill_address(const char *ip, uint16_t port, void **address, size_t *bytes)
{
    struct sockaddr_in four_address = { .sin_family = AF_INET, .sin_port = htons(port) };
    struct sockaddr_in6 six_address = { .sin6_family = AF_INET6, .sin6_port = htons(port) };
    int four = inet_pton(AF_INET, ip, &four_address.sin_addr) == 1;

    if (!four && inet_pton(AF_INET6, ip, &six_address.sin6_addr) != 1)
        return FI_EINVAL;
    free(*address);
    *bytes = four ? sizeof(four_address) : sizeof(six_address);
    *address = malloc(*bytes);
    if (!*address)
        return FI_ENOMEM;
    memcpy(*address, four ? (void *) &four_address : (void *) &six_address, *bytes);
    return 0;
}

/* A passive endpoint with an address of its own, that does not listen. */
int hf_pep_open(struct hf_domain *domain, const char *ip, uint16_t port, struct fid_pep **out)
{
    struct fi_info *info = domain->library.dupinfo(domain->info);
    int result;

    if (!info)
        return FI_ENOMEM;
    result = fill_address(ip, port, &info->src_addr, &info->src_addrlen);
    if (!result)
        result = from_library(fi_passive_ep(domain->fabric, info, out, NULL));
    domain->library.freeinfo(info);
    return result;
}

int hf_pep_listen(struct hf_domain *domain, struct fid_pep *pep)
{
    int result = from_library(fi_pep_bind(pep, &domain->eq->fid, 0));

    return result ? result : from_library(fi_listen(pep));
}

int hf_pep_port(struct fid_pep *pep, uint16_t *port)
{
    struct sockaddr_storage name;
    size_t bytes = sizeof(name);
    int result = from_library(fi_getname(&pep->fid, &name, &bytes));

    if (result)
        return result;
    *port = ntohs(name.ss_family == AF_INET6 ? ((struct sockaddr_in6 *) &name)->sin6_port
                         : ((struct sockaddr_in *) &name)->sin_port);
    return 0;
}

void hf_pep_close(struct fid_pep *pep)
{
    fi_close(&pep->fid);
}

void hf_reject(struct hf_domain *domain, struct fid_pep *pep, struct fi_info *info, const void *data, uint64_t bytes)
{
    fi_reject(pep, info->handle, data, bytes);
    domain->library.freeinfo(info);
}

void hf_info_free(struct hf_domain *domain, struct fi_info *info)
{
    domain->library.freeinfo(info);
}

void hf_endpoint_close(struct hf_endpoint *endpoint)
{
    if (endpoint->ep)
        fi_close(&endpoint->ep->fid);
    endpoint->ep = NULL;
    if (endpoint->cq)
        fi_close(&endpoint->cq->fid);
    endpoint->cq = NULL;
}

/*
 * A list of descriptors is polled by poll(2), one descriptor that stands for them by epoll, which costs half a
 * microsecond more at each arrival. A queue of tcp has either; one of verbs has one descriptor whatever is asked. From
 * libfabric 1.18 on the list of tcp leaves out the connections, whose descriptors the domain has.
 */
static int open_queue(struct hf_domain *domain, uint64_t completions, struct hf_endpoint *out)
{
    struct fi_cq_attr attr = { .size = completions, .format = FI_CQ_FORMAT_DATA, .wait_obj = FI_WAIT_POLLFD };

    out->has_list = strcmp(domain->info->fabric_attr->prov_name, "tcp") == 0 &&
        FI_VERSION_LT(domain->library.version(), FI_VERSION(1, 18)) &&
        fi_cq_open(domain->domain, &attr, &out->cq, NULL) == 0;
    if (out->has_list)
        return 0;
    attr.wait_obj = FI_WAIT_FD;
    return from_library(fi_cq_open(domain->domain, &attr, &out->cq, NULL));
}

static int make(struct hf_domain *domain, struct fi_info *info, uint64_t completions, struct hf_endpoint *out)
{
    int result = open_queue(domain, completions, out);

    if (!result)
        result = from_library(fi_endpoint(domain->domain, info, &out->ep, NULL));
    if (!result)
        result = from_library(fi_ep_bind(out->ep, &domain->eq->fid, 0));
    if (!result)
        result = from_library(fi_ep_bind(out->ep, &out->cq->fid, FI_TRANSMIT | FI_RECV));
    if (!result)
        result = from_library(fi_enable(out->ep));
    if (result)
        hf_endpoint_close(out);
    return result;
}

/* For a connection request; `info` is used up. */
int hf_endpoint_accepting(struct hf_domain *domain, struct fi_info *info, uint64_t completions, struct hf_endpoint *out)
{
    int result = make(domain, info, completions, out);

    domain->library.freeinfo(info);
    return result;
}

/* With `pep` the endpoint takes over its address; `pep` can only be closed afterwards. */
int hf_endpoint_connecting(struct hf_domain *domain, struct fid_pep *pep, const char *ip, uint16_t port,
               uint64_t completions, struct hf_endpoint *out)
{
    struct fi_info *info = domain->library.dupinfo(domain->info);
    int result;

    if (!info)
        return FI_ENOMEM;
    if (pep)
        info->handle = &pep->fid;
    result = fill_address(ip, port, &info->dest_addr, &info->dest_addrlen);
    if (!result)
        result = make(domain, info, completions, out);
    info->handle = NULL;
    domain->library.freeinfo(info);
    return result;
}

int hf_accept(struct hf_endpoint *endpoint)
{
    return from_library(fi_accept(endpoint->ep, NULL, 0));
}

int hf_connect(struct hf_endpoint *endpoint, const char *ip, uint16_t port, const void *data, uint64_t bytes)
{
    void *address = NULL;
    size_t address_bytes = 0;
    int result = fill_address(ip, port, &address, &address_bytes);

    if (!result)
        result = from_library(fi_connect(endpoint->ep, address, data, bytes));
    free(address);
    return result;
}

/* Stores the descriptors that report events of the queue now, and returns their number; 0 if there are too many. */
int hf_cq_descriptors(struct hf_endpoint *endpoint, struct pollfd *out, uint64_t most)
{
    struct fi_wait_pollfd list = { .nfds = most, .fd = out };

    if (most == 0)
        return 0;
    if (!endpoint->has_list) {
        out->events = POLLIN;
        return fi_control(&endpoint->cq->fid, FI_GETWAIT, &out->fd) == 0;
    }
    if (fi_control(&endpoint->cq->fid, FI_GETWAIT, &list) != 0 || list.nfds == 0)
        return 0;
    /* The first one reports that the list has changed, until a wait within the library, which never happens here. */
    memmove(out, out + 1, (list.nfds - 1) * sizeof(*out));
    return (int) list.nfds - 1;
}

int hf_cq_may_sleep(struct hf_domain *domain, struct hf_endpoint *endpoint)
{
    struct fid *fid = &endpoint->cq->fid;

    return fi_trywait(domain->fabric, &fid, 1) == 0;
}

static uint32_t kind_of(uint64_t flags)
{
    if (flags & FI_REMOTE_CQ_DATA)
        return 3;
    return flags & FI_RECV ? 2 : 1;
}

/* Reads the failed operation, if there is one. */
static int read_failed(struct hf_endpoint *endpoint, struct hf_completion *out)
{
    struct fi_cq_err_entry failed = { 0 };

    if (fi_cq_readerr(endpoint->cq, &failed, 0) <= 0)
        return 0;
    memset(out, 0, sizeof(*out));
    out->context = (uint64_t) (uintptr_t) failed.op_context;
    out->kind = kind_of(failed.flags);
    out->error = failed.err ? failed.err : FI_EIO;
    return 1;
}

/* Returns the number of completions read. */
int hf_cq_read(struct hf_endpoint *endpoint, struct hf_completion *out, uint64_t most)
{
    struct fi_cq_data_entry entries[16];
    ssize_t count = fi_cq_read(endpoint->cq, entries, most < 16 ? most : 16);

    if (count == -FI_EAVAIL)
        return read_failed(endpoint, out);
    for (ssize_t at = 0; at < count; at++) {
        out[at].context = (uint64_t) (uintptr_t) entries[at].op_context;
        out[at].bytes = entries[at].len;
        out[at].immediate = entries[at].data;
        out[at].kind = kind_of(entries[at].flags);
        out[at].error = 0;
    }
    return count < 0 ? 0 : (int) count;
}

int hf_register(struct hf_domain *domain, void *start, uint64_t bytes, uint32_t remote_write, uint32_t remote_read,
        uint64_t wanted_key, struct fid_mr **out, void **descriptor, uint64_t *key)
{
    uint64_t access = FI_SEND | FI_RECV | FI_READ | FI_WRITE;
    int result;

    if (remote_write)
        access = FI_REMOTE_WRITE;
    if (remote_read)
        access = (remote_write ? access : 0) | FI_REMOTE_READ;
    result = from_library(fi_mr_reg(domain->domain, start, bytes, access, 0, wanted_key, 0, out, NULL));
    if (result)
        return result;
    *descriptor = fi_mr_desc(*out);
    *key = fi_mr_key(*out);
    return 0;
}

void hf_unregister(struct fid_mr *region)
{
    fi_close(&region->fid);
}

int hf_receive(struct hf_endpoint *endpoint, void *to, uint64_t bytes, void *descriptor, uint64_t context)
{
    return from_library(fi_recv(endpoint->ep, to, bytes, descriptor, 0, (void *) (uintptr_t) context));
}

/* Memory without a descriptor is copied by the call; verbs would follow a null descriptor in a list. */
static void **list_of(void **descriptor)
{
    return *descriptor ? descriptor : NULL;
}

int hf_send(struct hf_endpoint *endpoint, const void *from, uint64_t bytes, void *descriptor, uint64_t context,
        uint32_t copied)
{
    struct iovec iov = { .iov_base = (void *) from, .iov_len = bytes };
    struct fi_msg message = {
        .msg_iov = &iov, .desc = list_of(&descriptor), .iov_count = 1, .context = (void *) (uintptr_t) context,
    };

    return from_library(fi_sendmsg(endpoint->ep, &message, FI_COMPLETION | (copied ? FI_INJECT : 0)));
}

static struct fi_msg_rma one_sided(struct iovec *iov, void **descriptor, struct fi_rma_iov *remote, uint64_t context)
{
    struct fi_msg_rma message = {
        .msg_iov = iov, .desc = list_of(descriptor), .iov_count = 1, .rma_iov = remote, .rma_iov_count = 1,
        .context = (void *) (uintptr_t) context,
    };

    return message;
}

int hf_write(struct hf_endpoint *endpoint, const void *from, uint64_t bytes, void *descriptor, uint64_t address,
         uint64_t key, uint64_t context, uint32_t copied, uint32_t has_immediate, uint64_t immediate)
{
    struct iovec iov = { .iov_base = (void *) from, .iov_len = bytes };
    struct fi_rma_iov remote = { .addr = address, .len = bytes, .key = key };
    struct fi_msg_rma message = one_sided(&iov, &descriptor, &remote, context);
    uint64_t flags = FI_COMPLETION | (copied ? FI_INJECT : 0) | (has_immediate ? FI_REMOTE_CQ_DATA : 0);

    message.data = immediate;
    return from_library(fi_writemsg(endpoint->ep, &message, flags));
}

int hf_read(struct hf_endpoint *endpoint, void *to, uint64_t bytes, void *descriptor, uint64_t address, uint64_t key,
        uint64_t context)
{
    struct iovec iov = { .iov_base = to, .iov_len = bytes };
    struct fi_rma_iov remote = { .addr = address, .len = bytes, .key = key };
    struct fi_msg_rma message = one_sided(&iov, &descriptor, &remote, context);

    return from_library(fi_readmsg(endpoint->ep, &message, FI_COMPLETION));
}
