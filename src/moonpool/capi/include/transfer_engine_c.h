/* The C API of `libtransfer_engine`, over Moonpool's transfer engine: the functions that TensorRT-LLM's cache
 * transceiver calls (cache_transceiver_config: {backend: MOONCAKE}). Written from those calls.
 *
 * Engines find each other by address ("P2PHANDSHAKE"); nothing else runs. Functions give 0, or a negative code
 * after one sentence on stderr. Any thread may call, until destroyTransferEngine is called. docs/tensorrt_llm.md is the manual.
 */
#ifndef MOONPOOL_TRANSFER_ENGINE_C_H
#define MOONPOOL_TRANSFER_ENGINE_C_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef void* transfer_engine_t;
typedef int32_t segment_id_t;
typedef uint64_t batch_id_t;

#define INVALID_BATCH UINT64_MAX

#define OPCODE_READ 0  /* into memory of this process */
#define OPCODE_WRITE 1 /* into the target's */

#define STATUS_WAITING 0
#define STATUS_PENDING 1
#define STATUS_INVALID 2
#define STATUS_CANCELED 3
#define STATUS_COMPLETED 4
#define STATUS_TIMEOUT 5
#define STATUS_FAILED 6

typedef struct transfer_request {
    int opcode;
    void* source; /* inside memory that this engine registered */
    segment_id_t target_id;
    uint64_t target_offset; /* an address in the target's process */
    uint64_t length;
} transfer_request_t;

typedef struct transfer_status {
    int status; /* PENDING, COMPLETED or FAILED; the others are never given */
    uint64_t transferred_bytes;
} transfer_status_t;

typedef struct notify_msg {
    char* name;
    char* msg;
} notify_msg_t;

/* metadata: "P2PHANDSHAKE". local_server_name: the address that others use, with a port or without. ip and port
 * say the same where they are given; auto_discover says nothing that is needed. NULL when it cannot be. */
transfer_engine_t createTransferEngine(const char* metadata, const char* local_server_name, const char* ip,
                                       uint64_t port, int auto_discover);
void destroyTransferEngine(transfer_engine_t engine);

/* What others openSegment(): "ip:port". */
int getLocalIpAndPort(transfer_engine_t engine, char* buffer, size_t length);

/* Memory that the CPU may write, and no other: a GPU's is refused. When unregister returns 0, nobody touches
 * it any more. */
int registerLocalMemory(transfer_engine_t engine, void* address, size_t length, const char* location,
                        int remote_accessible);
int unregisterLocalMemory(transfer_engine_t engine, void* address);

/* A number that is not negative, the same for a peer that is still the same. */
segment_id_t openSegment(transfer_engine_t engine, const char* segment_name);
int closeSegment(transfer_engine_t engine, segment_id_t segment);

/* A batch takes `size` requests, however many submits bring them; a request's number is its place among them.
 * Freeing a batch cancels what of it still runs, and waits until none of its bytes moves any more: up to a
 * second, and up to 5 when the peer hangs; other calls do not wait for that. Of batches that ended, and whose end
 * was told, the last 4096 are kept when nobody frees them. */
batch_id_t allocateBatchID(transfer_engine_t engine, size_t size);
int freeBatchID(transfer_engine_t engine, batch_id_t batch);

int submitTransfer(transfer_engine_t engine, batch_id_t batch, transfer_request_t* requests, size_t count);
/* The message arrives after the bytes. */
int submitTransferWithNotify(transfer_engine_t engine, batch_id_t batch, transfer_request_t* requests,
                             size_t count, notify_msg_t message);
int getTransferStatus(transfer_engine_t engine, batch_id_t batch, size_t number, transfer_status_t* status);

int genNotifyInEngine(transfer_engine_t engine, segment_id_t target, notify_msg_t message);
/* Messages that arrived since the last call, to be given to freeNotifsMsgBuf; size: how many, below 0: a code. */
notify_msg_t* getNotifsFromEngine(transfer_engine_t engine, int* size);
void freeNotifsMsgBuf(notify_msg_t* messages, int size);

#ifdef __cplusplus
}
#endif

#endif
