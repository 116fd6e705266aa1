/* A transport of Moonpool's transfer engine that is built outside of Moonpool: a shared library that exports
 *
 *     const moonpool_transport_table *moonpool_transport_v1(void);
 *
 * and is named to an engine by its path (EngineOptions::outside_transports,
 * TransferEngine(outside_transports=[...])). docs/outside_transports.md is the guide,
 * examples/transport_outside/ a library that works.
 *
 * The engine of one process registers memory in regions. A *link* is one peer, as this transport reaches it;
 * the engine gives it batches of slices, each of which copies a range between local memory and memory of the
 * peer. The library at the peer serves: it judges each range by the regions that its own engine has told it.
 *
 * Threads: every function may be called on any thread, several at a time, also for one object. destroy and
 * destroy_link are called once, when no other call of that object runs or follows.
 *
 * Compatibility: a struct begins with its own size. The engine reads no field of the library's table behind
 * that size, and the library must read no field of the engine's structs behind theirs; later releases only
 * append. A release that has to change more has another symbol than moonpool_transport_v1.
 *
 * Texts are UTF-8 and end with a zero. `why` is a buffer of the engine's, of MOONPOOL_WHY_BYTES: one
 * sentence, without a full stop, for the operator. No function may throw, exit or call fork().
 */
#ifndef MOONPOOL_TRANSPORT_H
#define MOONPOOL_TRANSPORT_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MOONPOOL_TRANSPORT_VERSION 1u
#define MOONPOOL_WHY_BYTES 512u
#define MOONPOOL_OFFER_BYTES_MAX 4096u
#define MOONPOOL_TRANSPORT_NAME_BYTES_MAX 32u

typedef struct moonpool_transport moonpool_transport; /* the library's: one for each engine */
typedef struct moonpool_link moonpool_link;           /* the library's: one for each peer of an engine */
typedef struct moonpool_engine moonpool_engine;       /* the engine's; valid until destroy returns */

/* What is_over says of a batch. */
enum {
    MOONPOOL_GO_ON = 0,
    MOONPOOL_STOPPED = 1, /* cancelled, or the engine closes: run returns within a second */
    MOONPOOL_OVERDUE = 2  /* the batch's time without progress is over: run returns MOONPOOL_TIMEOUT */
};

/* Of slices. */
enum {
    MOONPOOL_DONE = 1, /* all of its bytes are where they belong */
    MOONPOOL_REFUSED =
        2 /* it lies in no region that the peer's library knows; another path may be asked, too */
};

/* What run, add_region and viable return. */
enum {
    MOONPOOL_OK = 0,
    MOONPOOL_UNAVAILABLE = 1, /* this path can do no more; what has no verdict goes another way */
    MOONPOOL_TIMEOUT = 2,
    MOONPOOL_PROTOCOL = 3 /* the peer sent what no library of this name sends */
};

/* What the engine offers to the library; valid until destroy returns. */
typedef struct moonpool_host {
    uint32_t struct_bytes;
    uint32_t version; /* MOONPOOL_TRANSPORT_VERSION of the engine */

    /* MOONPOOL_GO_ON, or why run has to return. Costs about as much as a look at the clock. */
    int32_t (*is_over)(uint64_t batch);
    /* Bytes of the batch have moved: its time without progress begins anew. */
    void (*progress)(uint64_t batch);
    /* MOONPOOL_DONE or MOONPOOL_REFUSED of `count` slices from `first` on, each at most once, while run of
     * that batch runs, on any thread. why: of MOONPOOL_REFUSED, else null. -1: it was not taken, since no
     * such batch runs, or it contradicts the batch; the engine then uses that link no more. */
    int32_t (*verdict)(uint64_t batch, uint64_t first, uint64_t count, int32_t verdict, const char* why);
    /* Whether the engine with that id is shut out: its library's connections are then refused. */
    int32_t (*is_shut_out)(const moonpool_engine* engine, const uint8_t segment[16]);
} moonpool_host;

/* The engine that the transport is created for. Its pointers are valid until destroy returns. */
typedef struct moonpool_engine_info {
    uint32_t struct_bytes;
    int32_t timeout_ms; /* the longest wait without progress */
    const moonpool_engine* engine;
    const char* name;    /* at most 256 bytes, as the next two */
    const char* tenant;  /* only engines of one tenant meet */
    const char* host_id; /* chosen by the operator, or empty */
    const char* boot_id; /* of the kernel; empty: it does not tell */
    uint8_t segment[16]; /* the engine's id: random, never used twice */
} moonpool_engine_info;

/* A peer whose engine has proved the cluster token; valid during connect. */
typedef struct moonpool_peer {
    uint32_t struct_bytes;
    uint32_t offer_bytes;
    const uint8_t* offer; /* what the peer's library wrote in its offer: another release's, or hostile */
    const char* name;
    const char* address; /* as the user gave it to open() */
    const char* host_id;
    const char* boot_id;
    uint8_t segment[16];
} moonpool_peer;

/* Memory of this process that peers may read and write until it is revoked. Addresses in slices of peers are
 * addresses of this process. */
typedef struct moonpool_region {
    uint32_t struct_bytes;
    uint32_t reserved;
    uint64_t id; /* never used twice in an engine */
    void* address;
    uint64_t bytes;
} moonpool_region;

enum { MOONPOOL_READ = 0, MOONPOOL_WRITE = 1 }; /* as the initiator sees it */

typedef struct moonpool_slice {
    void* local;     /* of this process; all of it may be touched until run returns, and no longer */
    uint64_t remote; /* an address of the peer; it is the peer's library that judges it */
    uint64_t bytes;  /* at least 1 */
    uint32_t direction;
    uint32_t reserved;
} moonpool_slice;

typedef struct moonpool_batch {
    uint32_t struct_bytes;
    uint32_t background; /* 1: others go first */
    uint64_t id;         /* for the functions of moonpool_host */
    uint64_t count;
    const moonpool_slice* slices;
    int32_t timeout_ms; /* without progress; is_over looks at the clock for you */
    uint32_t reserved;
} moonpool_batch;

/* All functions but those marked optional have to be there. */
typedef struct moonpool_transport_table {
    uint32_t struct_bytes; /* sizeof(moonpool_transport_table) as the library was compiled */
    uint32_t version;      /* MOONPOOL_TRANSPORT_VERSION */
    /* [a-z0-9_], at most 32 bytes, no name of a transport of Moonpool's: as operators and metrics name it.
     * Both sides of a link have libraries of one name. */
    const char* name;

    /* Optional. MOONPOOL_OK: it can work on this host; else `why` says the reason. */
    int32_t (*viable)(char* why);
    /* Serves peers from here on. Null: it does not, for the reason in `why`. */
    moonpool_transport* (*create)(const moonpool_host* host, const moonpool_engine_info* engine, char* why);
    /* What peers need to connect, into the handshake that every engine with the cluster token may read: at
     * most `room` bytes. -> how many; below 0: nothing is offered. Asked once, after create. */
    int64_t (*offer)(moonpool_transport* transport, uint8_t* bytes, uint64_t room);

    /* Peers may touch that memory. Not MOONPOOL_OK: it cannot be registered with this engine. */
    int32_t (*add_region)(moonpool_transport* transport, const moonpool_region* region, char* why);
    /* Peers begin nothing more with it. Never waits. */
    void (*revoke_region)(moonpool_transport* transport, uint64_t id);
    /* 1: nothing that peers began reaches that revoked region any more: its memory may be freed. Never waits.
     */
    int32_t (*is_drained)(moonpool_transport* transport, uint64_t id);

    /* The engine with that id begins nothing more here, and what it has open ends. Never waits. */
    void (*shut_out)(moonpool_transport* transport, const uint8_t segment[16]);
    /* 1: nothing of an engine that is shut out reaches a region any more. Never waits. */
    int32_t (*is_out)(moonpool_transport* transport, const uint8_t segment[16]);

    /* No region is left, and no batch runs: peers lose their links. */
    void (*close)(moonpool_transport* transport);
    void (*destroy)(moonpool_transport* transport);

    /* A link to that peer, without waiting longer than timeout_ms. Null: `why` says why there is none. It may
     * connect later, when the first batch comes. */
    moonpool_link* (*connect)(moonpool_transport* transport, const moonpool_peer* peer, int32_t timeout_ms,
                              char* why);
    /* Optional. How it reaches the peer, for people, at most `room` bytes with the zero. */
    void (*path)(moonpool_link* link, char* text, uint64_t room);
    /* Carries the batch on the calling thread, and says each slice's verdict (moonpool_host). It returns when
     * all slices have one, or this path can do no more: then `why` says the reason. When it returns nothing
     * touches local memory of the batch any more. It returns within a second once is_over is not
     * MOONPOOL_GO_ON. */
    int32_t (*run)(moonpool_link* link, const moonpool_batch* batch, char* why);
    /* Optional; without it: always. 1: nothing that batches of this link wrote before they ended can still
     * reach the peer's memory. Never waits. */
    int32_t (*is_settled)(moonpool_link* link);
    /* Optional. Asks the peer to let nothing more of it in, waiting timeout_ms at most; 1: it is settled.
     * While a link is not, no other path repeats writes that run left without a verdict: they fail. */
    int32_t (*settle)(moonpool_link* link, int32_t timeout_ms);
    /* The peer was closed: batches that run return soon, later ones at once. */
    void (*close_link)(moonpool_link* link);
    void (*destroy_link)(moonpool_link* link);
} moonpool_transport_table;

/* What the library exports. */
typedef const moonpool_transport_table* (*moonpool_transport_v1_function)(void);
#define MOONPOOL_TRANSPORT_SYMBOL "moonpool_transport_v1"

#ifdef __cplusplus
}
#endif

#endif
