// A transport outside of the tree that breaks the contract of moonpool_transport.h in the way that a test
// asks for, and else moves bytes within one process. As C++, to show that the header is clean for both
// languages.
#include <moonpool_transport.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>

namespace {

std::string lie;              // of the test that runs
std::atomic<int> taken_late;  // 1: a verdict of a batch that has ended was taken

std::atomic<bool> wrote;  // a write was given up

bool lies(const char* what) { return lie == what; }

}  // namespace

struct moonpool_transport {
    const moonpool_host* host;
};
struct moonpool_link {
    const moonpool_host* host;
    std::atomic<uint64_t> last{0};
    std::atomic<bool> closed{false};
};

namespace {

int32_t viable(char* why) {
    if (!lies("not viable")) return MOONPOOL_OK;
    std::snprintf(why, MOONPOOL_WHY_BYTES, "this host has no liars");
    return MOONPOOL_UNAVAILABLE;
}

moonpool_transport* create(const moonpool_host* host, const moonpool_engine_info*, char* why) {
    if (lies("no transport")) return nullptr;
    if (lies("no text")) {
        std::memset(why, 0xff, MOONPOOL_WHY_BYTES);  // neither UTF-8 nor ended
        return nullptr;
    }
    return new moonpool_transport{host};
}
int64_t offer(moonpool_transport*, uint8_t*, uint64_t room) {
    if (lies("long offer")) return static_cast<int64_t>(room) + 1;
    if (lies("no offer")) return -1;
    return 0;
}
int32_t add_region(moonpool_transport*, const moonpool_region*, char* why) {
    if (!lies("no region")) return MOONPOOL_OK;
    std::snprintf(why, MOONPOOL_WHY_BYTES, "it is full");
    return MOONPOOL_UNAVAILABLE;
}
void revoke_region(moonpool_transport*, uint64_t) {}
int32_t is_drained(moonpool_transport*, uint64_t) { return lies("never drained") ? 0 : 1; }
void shut_out(moonpool_transport*, const uint8_t*) {}
int32_t is_out(moonpool_transport*, const uint8_t*) { return lies("never out") ? 0 : 1; }
void close_transport(moonpool_transport*) {}
void destroy(moonpool_transport* transport) { delete transport; }

moonpool_link* connect_link(moonpool_transport* transport, const moonpool_peer*, int32_t, char*) {
    if (lies("no link")) return nullptr;
    auto* link = new moonpool_link;
    link->host = transport->host;
    return link;
}
void path(moonpool_link*, char* text, uint64_t room) {
    std::memset(text, lies("long path") ? 'x' : 0, room);  // no zero at its end
}

void copy(const moonpool_slice& slice) {
    auto* remote = reinterpret_cast<void*>(slice.remote);
    if (slice.direction == MOONPOOL_READ) std::memcpy(slice.local, remote, slice.bytes);
    if (slice.direction == MOONPOOL_WRITE) std::memcpy(remote, slice.local, slice.bytes);
}

int32_t run(moonpool_link* link, const moonpool_batch* batch, char* why) {
    const moonpool_host* host = link->host;
    auto give = [&](uint64_t first, uint64_t count, int32_t verdict) {
        return host->verdict(batch->id, first, count, verdict, nullptr);
    };
    uint64_t before = link->last.exchange(batch->id);
    if (lies("late") && before != 0) {
        if (host->verdict(before, 0, 1, MOONPOOL_DONE, nullptr) == 0) taken_late = 1;
        if (host->is_over(before) != MOONPOOL_STOPPED) taken_late = 1;
        host->progress(before);
        host->progress(UINT64_MAX);
    }
    if (lies("silent")) return MOONPOOL_OK;
    if (lies("gone") || lies("unsettled")) {
        for (uint64_t i = 0; i < batch->count; ++i)
            wrote = wrote || batch->slices[i].direction == MOONPOOL_WRITE;
        std::snprintf(why, MOONPOOL_WHY_BYTES, "the way is blocked");
        return MOONPOOL_UNAVAILABLE;
    }
    if (lies("no reason")) return 77;
    if (lies("unknown slice")) return give(batch->count, 1, MOONPOOL_DONE), MOONPOOL_OK;
    if (lies("unknown slices")) return give(0, batch->count + 1, MOONPOOL_DONE), MOONPOOL_OK;
    if (lies("wraps")) return give(1, UINT64_MAX, MOONPOOL_DONE), MOONPOOL_OK;
    if (lies("nonsense")) return give(0, 1, 7), MOONPOOL_OK;
    if (lies("refuses")) return give(0, batch->count, MOONPOOL_REFUSED), MOONPOOL_OK;
    if (lies("waits")) {
        int32_t over = MOONPOOL_GO_ON;
        while (over == MOONPOOL_GO_ON && !link->closed) {
            over = host->is_over(batch->id);
            ::usleep(1000);
        }
        return over == MOONPOOL_OVERDUE ? MOONPOOL_TIMEOUT : MOONPOOL_UNAVAILABLE;
    }
    for (uint64_t i = 0; i < batch->count; ++i) copy(batch->slices[i]);
    if (lies("threads")) {
        std::thread even([&] {
            for (uint64_t i = 0; i < batch->count; i += 2) give(i, 1, MOONPOOL_DONE);
        });
        for (uint64_t i = 1; i < batch->count; i += 2) give(i, 1, MOONPOOL_DONE);
        even.join();
        return MOONPOOL_OK;
    }
    give(0, batch->count, MOONPOOL_DONE);
    if (lies("twice")) give(0, 1, MOONPOOL_DONE);
    if (lies("contradicts")) give(batch->count - 1, 1, MOONPOOL_REFUSED);
    return MOONPOOL_OK;
}

int32_t is_settled(moonpool_link*) { return lies("unsettled") && wrote ? 0 : 1; }
void close_link(moonpool_link* link) { link->closed = true; }
void destroy_link(moonpool_link* link) { delete link; }

// As a later release may have it.
struct LaterTable {
    moonpool_transport_table now;
    void (*unknown)();
};

}  // namespace

extern "C" {

const moonpool_transport_table* moonpool_transport_v1(void) {
    static LaterTable later;
    later = {};
    moonpool_transport_table& table = later.now;
    table.struct_bytes = sizeof(table);
    table.version = MOONPOOL_TRANSPORT_VERSION;
    table.name = "liar";
    table.viable = viable;
    table.create = create;
    table.offer = offer;
    table.add_region = add_region;
    table.revoke_region = revoke_region;
    table.is_drained = is_drained;
    table.shut_out = shut_out;
    table.is_out = is_out;
    table.close = close_transport;
    table.destroy = destroy;
    table.connect = connect_link;
    table.path = path;
    table.run = run;
    table.is_settled = is_settled;
    table.close_link = close_link;
    table.destroy_link = destroy_link;
    if (lies("no table")) return nullptr;
    if (lies("short table")) table.struct_bytes = 40;
    if (lies("empty table")) table.struct_bytes = 0;
    if (lies("later table")) table.struct_bytes = sizeof(later);
    if (lies("other version")) table.version = 2;
    if (lies("no name")) table.name = nullptr;
    if (lies("empty name")) table.name = "";
    if (lies("odd name")) table.name = "Liar!";
    if (lies("long name")) table.name = "liar_liar_liar_liar_liar_liar_liar";
    if (lies("built-in name")) table.name = "tcp";
    if (lies("no run")) table.run = nullptr;
    return &table;
}

void liar_script(const char* script) {
    lie = script;
    wrote = false;
}
int liar_taken_late() { return taken_late; }
}
