/* A transport of Moonpool's transfer engine, built outside of Moonpool: it moves bytes between processes of
 * one host over a Unix socket. It shows what such a library has to do, and does not try to be fast.
 *
 * The serving half listens on a socket of the kernel's abstract namespace and offers its name, with a random
 * cookie, in the handshake that only engines with the cluster token can read. A thread for each connection
 * reads requests, looks their ranges up among the regions, and copies by way of a buffer of its own: it holds
 * the lock of the regions while it copies, so once revoke_region has the lock, nothing reaches that memory
 * any more.
 *
 * The other half cuts slices into pieces, one request each, and has a connection for each batch that runs. A
 * connection that it gives up in the middle of a write may have bytes of it inside the kernel: is_settled
 * says so, and settle asks the peer, over another connection, to take nothing more from that one.
 *
 *   client  hello: magic, number of the connection, cookie, id of the engine     server: status
 *   client  request: operation, slice, piece [bytes of a write]                  server: status [bytes of a
 * read]
 */
#define _GNU_SOURCE
#include <errno.h>
#include <moonpool_transport.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum {
    COOKIE = 32,
    NAME = 32,
    PIECE = 256 << 10,
    CONNECTIONS = 64,
    GIVEN_UP = 64,
    LOOK_MS = 20,
    LET_END_MS = 300
};

struct hello {
    uint64_t magic, number;
    uint8_t cookie[COOKIE];
    uint8_t segment[16];
};
#define MAGIC 0x31786f7378696e75ull

enum { READ_PIECE = MOONPOOL_READ, WRITE_PIECE = MOONPOOL_WRITE, FORGET = 2 };
struct request {
    uint64_t operation;
    uint64_t address, bytes; /* of the whole slice: one region has to hold all of it */
    uint64_t at, count;      /* the piece; of FORGET: at is the number of a connection */
};

enum { GRANTED = 0, NO_REGION = 1, REFUSED_HELLO = 2, SHUT_OUT = 3, BROKEN = 4 };

struct offer {
    char name[NAME]; /* behind the zero of an abstract address; ends with a zero */
    uint8_t cookie[COOKIE];
};

/* ---- serving ---- */

struct region {
    uint64_t id, address, bytes;
    struct region* next;
};

struct served { /* a connection of a peer */
    struct moonpool_transport* owner;
    pthread_t thread;
    int fd;
    uint64_t number;
    uint8_t segment[16];
    bool used, dead, ended;
};

struct moonpool_transport {
    const moonpool_host* host;
    const moonpool_engine* engine;
    char boot_id[257];
    uint8_t segment[16];
    struct offer offer;
    int listener;
    pthread_t accepting;

    pthread_rwlock_t lock; /* of all below; held for reading while memory of a region is copied */
    struct region* regions;
    struct served served[CONNECTIONS];
    bool closed;
};

static bool whole(int fd, void* bytes, size_t n, bool sending) {
    for (char* at = bytes; n != 0;) {
        ssize_t moved = sending ? send(fd, at, n, MSG_NOSIGNAL) : recv(fd, at, n, 0);
        if (moved < 0 && errno == EINTR) continue;
        if (moved <= 0) return false;
        at += moved;
        n -= (size_t)moved;
    }
    return true;
}

/* Of the region that holds all of the slice; null: none does. The lock is held. */
static char* find(const struct moonpool_transport* t, const struct request* r) {
    for (const struct region* g = t->regions; g != NULL; g = g->next) {
        if (r->address >= g->address && r->bytes <= g->bytes &&
            r->address - g->address <= g->bytes - r->bytes)
            return (char*)(uintptr_t)(r->address + r->at);
    }
    return NULL;
}

static uint64_t copy_piece(struct served* s, const struct request* r, char* buffer) {
    struct moonpool_transport* t = s->owner;
    pthread_rwlock_rdlock(&t->lock);
    char* memory = s->dead ? NULL : find(t, r);
    if (memory != NULL && r->operation == READ_PIECE) memcpy(buffer, memory, r->count);
    if (memory != NULL && r->operation == WRITE_PIECE) memcpy(memory, buffer, r->count);
    uint64_t status = s->dead ? SHUT_OUT : memory == NULL ? NO_REGION : GRANTED;
    pthread_rwlock_unlock(&t->lock);
    return status;
}

/* Nothing that has come by such connections is copied any more. Null: of any engine; 0: of any number. */
static void end_served(struct moonpool_transport* t, const uint8_t* segment, uint64_t number) {
    pthread_rwlock_wrlock(&t->lock);
    for (struct served* s = t->served; s != t->served + CONNECTIONS; ++s) {
        if (!s->used || s->dead || (segment != NULL && memcmp(s->segment, segment, 16) != 0)) continue;
        if (number != 0 && s->number != number) continue;
        s->dead = true;
        shutdown(s->fd, SHUT_RDWR);
    }
    pthread_rwlock_unlock(&t->lock);
}

static uint64_t greet(struct served* s) {
    struct moonpool_transport* t = s->owner;
    struct hello hello;
    if (!whole(s->fd, &hello, sizeof(hello), false)) return BROKEN;
    if (hello.magic != MAGIC || memcmp(hello.cookie, t->offer.cookie, COOKIE) != 0) return REFUSED_HELLO;
    pthread_rwlock_wrlock(&t->lock);
    s->number = hello.number;
    memcpy(s->segment, hello.segment, 16);
    pthread_rwlock_unlock(&t->lock);
    /* First the connection is known, then this is asked: shut_out does it the other way round. */
    return t->host->is_shut_out(t->engine, s->segment) ? SHUT_OUT : GRANTED;
}

static void* serve(void* of) {
    struct served* s = of;
    char* buffer = malloc(PIECE);
    uint64_t status = buffer == NULL ? (uint64_t)BROKEN : greet(s);
    if (status != BROKEN && !whole(s->fd, &status, sizeof(status), true)) status = BROKEN;
    struct request r;
    while (status == GRANTED && whole(s->fd, &r, sizeof(r), false)) {
        uint64_t answer = GRANTED;
        if (r.operation == FORGET) {
            end_served(s->owner, s->segment, r.at);
        } else {
            if (r.operation > WRITE_PIECE || r.count > PIECE || r.at > r.bytes || r.count > r.bytes - r.at)
                break;
            if (r.operation == WRITE_PIECE && !whole(s->fd, buffer, r.count, false)) break;
            answer = copy_piece(s, &r, buffer);
        }
        if (!whole(s->fd, &answer, sizeof(answer), true)) break;
        if (r.operation == READ_PIECE && answer == GRANTED && !whole(s->fd, buffer, r.count, true)) break;
    }
    free(buffer);
    pthread_rwlock_wrlock(&s->owner->lock);
    close(s->fd);
    s->dead = s->ended = true;
    pthread_rwlock_unlock(&s->owner->lock);
    return NULL;
}

static void begin_serving(struct moonpool_transport* t, int fd) {
    pthread_rwlock_wrlock(&t->lock);
    for (struct served* s = t->served; s != t->served + CONNECTIONS && fd >= 0 && !t->closed; ++s) {
        if (s->used && s->ended) {
            pthread_join(s->thread, NULL);
            s->used = false;
        }
        if (s->used) continue;
        *s = (struct served){.owner = t, .fd = fd};
        s->used = pthread_create(&s->thread, NULL, serve, s) == 0;
        if (s->used) fd = -1;
        break;
    }
    pthread_rwlock_unlock(&t->lock);
    if (fd >= 0) close(fd); /* too many: the peer goes another way */
}

static void* accept_peers(void* of) {
    struct moonpool_transport* t = of;
    for (;;) {
        int fd = accept4(t->listener, NULL, NULL, SOCK_CLOEXEC);
        if (fd >= 0) {
            begin_serving(t, fd);
            continue;
        }
        if (errno == EINVAL || errno == EBADF) return NULL; /* close has shut it down */
        poll(NULL, 0, LOOK_MS);                             /* as when no descriptor is left */
    }
}

static socklen_t abstract_address(struct sockaddr_un* address, const char* name) {
    memset(address, 0, sizeof(*address));
    address->sun_family = AF_UNIX;
    memcpy(address->sun_path + 1, name, strlen(name));
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(name));
}

static moonpool_transport* create(const moonpool_host* host, const moonpool_engine_info* engine, char* why) {
    struct moonpool_transport* t = calloc(1, sizeof(*t));
    if (t == NULL) return NULL;
    t->host = host;
    t->engine = engine->engine;
    snprintf(t->boot_id, sizeof(t->boot_id), "%s", engine->boot_id);
    memcpy(t->segment, engine->segment, 16);
    pthread_rwlock_init(&t->lock, NULL);
    uint64_t random[2];
    bool got = getrandom(t->offer.cookie, COOKIE, 0) == COOKIE &&
               getrandom(random, sizeof(random), 0) == sizeof(random);
    snprintf(t->offer.name, NAME, "%08x%016llx", (unsigned)random[0], (unsigned long long)random[1]);
    struct sockaddr_un address;
    socklen_t size = abstract_address(&address, t->offer.name);
    t->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (got && t->listener >= 0 && bind(t->listener, (struct sockaddr*)&address, size) == 0 &&
        listen(t->listener, CONNECTIONS) == 0 && pthread_create(&t->accepting, NULL, accept_peers, t) == 0)
        return t;
    snprintf(why, MOONPOOL_WHY_BYTES, "it cannot listen on a Unix socket (%s)", strerror(errno));
    if (t->listener >= 0) close(t->listener);
    pthread_rwlock_destroy(&t->lock);
    free(t);
    return NULL;
}

static int64_t offer(moonpool_transport* t, uint8_t* bytes, uint64_t room) {
    if (room < sizeof(t->offer)) return -1;
    memcpy(bytes, &t->offer, sizeof(t->offer));
    return sizeof(t->offer);
}

static int32_t add_region(moonpool_transport* t, const moonpool_region* told, char* why) {
    struct region* region = malloc(sizeof(*region));
    if (region == NULL) {
        snprintf(why, MOONPOOL_WHY_BYTES, "no memory is left");
        return MOONPOOL_UNAVAILABLE;
    }
    region->id = told->id;
    region->address = (uint64_t)(uintptr_t)told->address;
    region->bytes = told->bytes;
    pthread_rwlock_wrlock(&t->lock);
    region->next = t->regions;
    t->regions = region;
    pthread_rwlock_unlock(&t->lock);
    return MOONPOOL_OK;
}

static void revoke_region(moonpool_transport* t, uint64_t id) {
    pthread_rwlock_wrlock(&t->lock);
    for (struct region** at = &t->regions; *at != NULL; at = &(*at)->next) {
        if ((*at)->id != id) continue;
        struct region* gone = *at;
        *at = gone->next;
        free(gone);
        break;
    }
    pthread_rwlock_unlock(&t->lock);
}

/* No copy outlives the lock that revoke_region and end_served have had. */
static int32_t is_drained(moonpool_transport* t, uint64_t id) {
    (void)t, (void)id;
    return 1;
}

static void shut_out(moonpool_transport* t, const uint8_t segment[16]) { end_served(t, segment, 0); }

static int32_t is_out(moonpool_transport* t, const uint8_t segment[16]) {
    (void)t, (void)segment;
    return 1;
}

static void close_transport(moonpool_transport* t) {
    pthread_rwlock_wrlock(&t->lock);
    bool again = t->closed;
    t->closed = true;
    pthread_rwlock_unlock(&t->lock);
    if (again) return;
    shutdown(t->listener, SHUT_RDWR);
    pthread_join(t->accepting, NULL);
    end_served(t, NULL, 0);
    for (struct served* s = t->served; s != t->served + CONNECTIONS; ++s) {
        if (s->used) pthread_join(s->thread, NULL);
    }
}

static void destroy(moonpool_transport* t) {
    close_transport(t);
    close(t->listener);
    while (t->regions != NULL) revoke_region(t, t->regions->id);
    pthread_rwlock_destroy(&t->lock);
    free(t);
}

/* ---- links ---- */

struct moonpool_link {
    const moonpool_host* host;
    struct offer peer;
    uint8_t segment[16];  /* of this engine */
    pthread_mutex_t lock; /* of all below */
    int idle[CONNECTIONS];
    uint64_t idle_numbers[CONNECTIONS];
    size_t idle_count;
    uint64_t given_up[GIVEN_UP]; /* connections with bytes of a write in them */
    size_t given_up_count;
    uint64_t next_number;
    bool closed;
};

/* What ends a wait: the batch, or a time of our own. */
struct patience {
    struct moonpool_link* link;
    uint64_t batch;
    int64_t until_ms; /* 0: none of our own */
    int32_t over;     /* MOONPOOL_GO_ON, or why it ended */
};

static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static bool is_closed(struct moonpool_link* link) {
    pthread_mutex_lock(&link->lock);
    bool closed = link->closed;
    pthread_mutex_unlock(&link->lock);
    return closed;
}

static bool goes_on(struct patience* p) {
    if (p->until_ms != 0) {
        if (now_ms() < p->until_ms) return true;
        if (p->over == MOONPOOL_GO_ON) p->over = MOONPOOL_OVERDUE;
        return false;
    }
    p->over = is_closed(p->link) ? MOONPOOL_STOPPED : p->link->host->is_over(p->batch);
    if (p->over == MOONPOOL_GO_ON) return true;
    /* An answer that is on its way spares the connection. */
    p->until_ms = now_ms() + LET_END_MS;
    return true;
}

/* All of it, or false: the connection ended (p->over is MOONPOOL_GO_ON), or patience did. */
static bool move(int fd, void* bytes, size_t n, bool sending, struct patience* p) {
    for (char* at = bytes; n != 0;) {
        ssize_t moved =
            sending ? send(fd, at, n, MSG_NOSIGNAL | MSG_DONTWAIT) : recv(fd, at, n, MSG_DONTWAIT);
        if (moved > 0) {
            at += moved;
            n -= (size_t)moved;
            continue;
        }
        if (moved == 0) return p->over = MOONPOOL_GO_ON, false;
        if (errno == EINTR) continue;
        if (errno != EAGAIN) return p->over = MOONPOOL_GO_ON, false;
        struct pollfd ready = {.fd = fd, .events = sending ? POLLOUT : POLLIN};
        if (poll(&ready, 1, LOOK_MS) == 0 && !goes_on(p)) return false;
    }
    return true;
}

struct connection {
    int fd;
    uint64_t number;
};

static bool take_idle(struct moonpool_link* link, struct connection* c) {
    pthread_mutex_lock(&link->lock);
    bool found = link->idle_count != 0;
    if (found) {
        --link->idle_count;
        *c = (struct connection){link->idle[link->idle_count], link->idle_numbers[link->idle_count]};
    } else {
        c->number = link->next_number++;
    }
    pthread_mutex_unlock(&link->lock);
    return found;
}

/* One that the peer has closed meanwhile is of no use: nothing may be sent over it. */
static bool is_alive(int fd) {
    struct pollfd p = {.fd = fd, .events = POLLIN};
    return poll(&p, 1, 0) == 0;
}

static int32_t connect_to_peer(struct moonpool_link* link, struct connection* c, struct patience* p,
                               char* why) {
    while (take_idle(link, c)) {
        if (is_alive(c->fd)) return MOONPOOL_OK;
        close(c->fd);
    }
    struct sockaddr_un address;
    socklen_t size = abstract_address(&address, link->peer.name);
    /* Non-blocking: a connect waits for room in the backlog of a peer that stands still. */
    c->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    struct hello hello = {.magic = MAGIC, .number = c->number};
    memcpy(hello.cookie, link->peer.cookie, COOKIE);
    memcpy(hello.segment, link->segment, 16);
    uint64_t status = GRANTED;
    if (c->fd >= 0 && connect(c->fd, (struct sockaddr*)&address, size) == 0 &&
        move(c->fd, &hello, sizeof(hello), true, p) && move(c->fd, &status, sizeof(status), false, p) &&
        status == GRANTED)
        return MOONPOOL_OK;
    snprintf(why, MOONPOOL_WHY_BYTES, "%s",
             status == SHUT_OUT            ? "the peer has shut out this engine"
             : status == REFUSED_HELLO     ? "the peer does not know the cookie that it offered"
             : p->over == MOONPOOL_OVERDUE ? "the peer does not answer"
                                           : "the peer's socket is gone");
    if (c->fd >= 0) close(c->fd);
    return p->over == MOONPOOL_OVERDUE ? MOONPOOL_TIMEOUT : MOONPOOL_UNAVAILABLE;
}

static void keep_idle(struct moonpool_link* link, struct connection c) {
    pthread_mutex_lock(&link->lock);
    bool keep = !link->closed && link->idle_count < CONNECTIONS;
    if (keep) {
        link->idle[link->idle_count] = c.fd;
        link->idle_numbers[link->idle_count++] = c.number;
    }
    pthread_mutex_unlock(&link->lock);
    if (!keep) close(c.fd);
}

/* The peer may still take what lies in the kernel. */
static void give_up(struct moonpool_link* link, struct connection c, bool wrote) {
    pthread_mutex_lock(&link->lock);
    if (wrote && link->given_up_count < GIVEN_UP) link->given_up[link->given_up_count] = c.number;
    if (wrote) ++link->given_up_count;
    pthread_mutex_unlock(&link->lock);
    close(c.fd);
}

static int32_t run_slice(const moonpool_batch* batch, uint64_t i, struct connection* c, struct patience* p,
                         char* why) {
    const moonpool_host* host = p->link->host;
    const moonpool_slice* slice = &batch->slices[i];
    bool writes = slice->direction == MOONPOOL_WRITE;
    for (uint64_t at = 0; at < slice->bytes;) {
        uint64_t n = slice->bytes - at < PIECE ? slice->bytes - at : PIECE;
        struct request r = {slice->direction, slice->remote, slice->bytes, at, n};
        char* local = (char*)slice->local + at;
        uint64_t status = BROKEN;
        bool sent = move(c->fd, &r, sizeof(r), true, p) && (!writes || move(c->fd, local, n, true, p));
        bool answered = sent && move(c->fd, &status, sizeof(status), false, p);
        if (answered && status == GRANTED && !writes) answered = move(c->fd, local, n, false, p);
        if (!answered) {
            /* A connection that has ended is one that the peer reads no more. */
            bool ended = p->over == MOONPOOL_GO_ON;
            give_up(p->link, *c, writes && !ended);
            c->fd = -1;
            snprintf(why, MOONPOOL_WHY_BYTES, "%s",
                     ended ? "the peer closed the connection" : "the peer does not answer");
            return p->over == MOONPOOL_OVERDUE ? MOONPOOL_TIMEOUT : MOONPOOL_UNAVAILABLE;
        }
        if (status == NO_REGION) {
            snprintf(why, MOONPOOL_WHY_BYTES,
                     "the range 0x%llx + %llu lies in no registered region of the peer",
                     (unsigned long long)slice->remote, (unsigned long long)slice->bytes);
            host->verdict(batch->id, i, 1, MOONPOOL_REFUSED, why);
            return MOONPOOL_OK;
        }
        if (status != GRANTED) {
            give_up(p->link, *c, false);
            c->fd = -1;
            snprintf(why, MOONPOOL_WHY_BYTES, "the peer has shut out this engine");
            return MOONPOOL_UNAVAILABLE;
        }
        host->progress(batch->id);
        p->until_ms = 0;
        p->over = MOONPOOL_GO_ON;
        at += n;
        /* Between two pieces it can stop without leaving anything behind. */
        if (at < slice->bytes && host->is_over(batch->id) == MOONPOOL_STOPPED) {
            snprintf(why, MOONPOOL_WHY_BYTES, "it was stopped");
            return MOONPOOL_UNAVAILABLE;
        }
    }
    host->verdict(batch->id, i, 1, MOONPOOL_DONE, NULL);
    return MOONPOOL_OK;
}

static int32_t run(moonpool_link* link, const moonpool_batch* batch, char* why) {
    struct patience p = {.link = link, .batch = batch->id};
    struct connection c = {.fd = -1};
    if (is_closed(link)) {
        snprintf(why, MOONPOOL_WHY_BYTES, "the peer was closed");
        return MOONPOOL_UNAVAILABLE;
    }
    int32_t code = connect_to_peer(link, &c, &p, why);
    if (code != MOONPOOL_OK) return code;
    for (uint64_t i = 0; i < batch->count && code == MOONPOOL_OK; ++i) {
        if (is_closed(link) || link->host->is_over(batch->id) == MOONPOOL_STOPPED) {
            snprintf(why, MOONPOOL_WHY_BYTES, "it was stopped");
            code = MOONPOOL_UNAVAILABLE;
        } else {
            code = run_slice(batch, i, &c, &p, why);
        }
    }
    if (c.fd >= 0) keep_idle(link, c);
    return code;
}

static moonpool_link* connect_link(moonpool_transport* t, const moonpool_peer* peer, int32_t timeout_ms,
                                   char* why) {
    (void)timeout_ms; /* the first batch connects */
    struct offer told;
    if (peer->offer_bytes != sizeof(told)) {
        snprintf(why, MOONPOOL_WHY_BYTES, "the peer's offer is unreadable");
        return NULL;
    }
    memcpy(&told, peer->offer, sizeof(told));
    if (memchr(told.name, 0, NAME) == NULL || told.name[0] == 0) {
        snprintf(why, MOONPOOL_WHY_BYTES, "the peer's offer is unreadable");
        return NULL;
    }
    if (t->boot_id[0] == 0 || strcmp(t->boot_id, peer->boot_id) != 0) {
        snprintf(why, MOONPOOL_WHY_BYTES, "the peer runs on another host");
        return NULL;
    }
    struct moonpool_link* link = calloc(1, sizeof(*link));
    if (link == NULL) return NULL;
    link->host = t->host;
    link->peer = told;
    /* Random, since a peer tells connections of several links of one engine apart by their numbers alone. */
    if (getrandom(&link->next_number, sizeof(link->next_number), 0) < 0) link->next_number = (uintptr_t)link;
    memcpy(link->segment, t->segment, 16);
    pthread_mutex_init(&link->lock, NULL);
    return link;
}

static void path(moonpool_link* link, char* text, uint64_t room) {
    snprintf(text, room, "@%s", link->peer.name);
}

static int32_t is_settled(moonpool_link* link) {
    pthread_mutex_lock(&link->lock);
    bool settled = link->given_up_count == 0;
    pthread_mutex_unlock(&link->lock);
    return settled;
}

static int32_t settle(moonpool_link* link, int32_t timeout_ms) {
    char why[MOONPOOL_WHY_BYTES];
    pthread_mutex_lock(&link->lock);
    uint64_t numbers[GIVEN_UP];
    size_t n = link->given_up_count;
    memcpy(numbers, link->given_up, sizeof(numbers));
    pthread_mutex_unlock(&link->lock);
    if (n > GIVEN_UP) return 0; /* more than it remembers: only the end of the peer settles it */
    struct patience p = {.link = link, .until_ms = now_ms() + timeout_ms};
    struct connection c;
    if (n != 0 && connect_to_peer(link, &c, &p, why) != MOONPOOL_OK) return 0;
    for (size_t i = 0; i < n; ++i) {
        struct request r = {.operation = FORGET, .at = numbers[i]};
        uint64_t status = BROKEN;
        if (!move(c.fd, &r, sizeof(r), true, &p) || !move(c.fd, &status, sizeof(status), false, &p)) {
            close(c.fd);
            return 0;
        }
    }
    if (n != 0) keep_idle(link, c);
    pthread_mutex_lock(&link->lock);
    /* Others may have been given up meanwhile; they stand behind these. */
    link->given_up_count -= n;
    if (link->given_up_count <= GIVEN_UP - n)
        memmove(link->given_up, link->given_up + n, link->given_up_count * sizeof(link->given_up[0]));
    pthread_mutex_unlock(&link->lock);
    return is_settled(link);
}

static void close_link(moonpool_link* link) {
    pthread_mutex_lock(&link->lock);
    link->closed = true;
    while (link->idle_count != 0) close(link->idle[--link->idle_count]);
    pthread_mutex_unlock(&link->lock);
}

static void destroy_link(moonpool_link* link) {
    close_link(link);
    pthread_mutex_destroy(&link->lock);
    free(link);
}

const moonpool_transport_table* moonpool_transport_v1(void) {
    static const moonpool_transport_table table = {
        .struct_bytes = sizeof(table),
        .version = MOONPOOL_TRANSPORT_VERSION,
        .name = "unix_socket",
        .create = create,
        .offer = offer,
        .add_region = add_region,
        .revoke_region = revoke_region,
        .is_drained = is_drained,
        .shut_out = shut_out,
        .is_out = is_out,
        .close = close_transport,
        .destroy = destroy,
        .connect = connect_link,
        .path = path,
        .run = run,
        .is_settled = is_settled,
        .settle = settle,
        .close_link = close_link,
        .destroy_link = destroy_link,
    };
    return &table;
}
