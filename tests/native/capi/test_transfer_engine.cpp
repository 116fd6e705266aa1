// The C API within one process, for the sanitizers; tests/capi drives it from two.
#include <doctest/doctest.h>

#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "capi/message.hpp"
#include "capi/surroundings.hpp"
#include "transfer_engine_c.h"

namespace {

struct Engine {
    transfer_engine_t self = nullptr;
    std::string address;

    Engine() {
        ::setenv("MOONPOOL_CLUSTER_TOKEN", "of this test", 1);
        self = createTransferEngine("P2PHANDSHAKE", "127.0.0.1", "", 0, 1);
        ::unsetenv("MOONPOOL_CLUSTER_TOKEN");
        REQUIRE(self != nullptr);
        char text[64];
        REQUIRE(getLocalIpAndPort(self, text, sizeof(text)) == 0);
        address = text;
    }
    ~Engine() { destroyTransferEngine(self); }
    Engine(const Engine&) = delete;
};

int wait_for(Engine& engine, batch_id_t batch, size_t number) {
    transfer_status_t status{STATUS_PENDING, 0};
    while (status.status == STATUS_PENDING) {
        REQUIRE(getTransferStatus(engine.self, batch, number, &status) == 0);
        std::this_thread::yield();
    }
    return status.status;
}

}  // namespace

TEST_CASE("capi: several submits of one batch, threads that look at once, and a batch freed while it runs") {
    Engine here, there;
    std::vector<unsigned char> from(1 << 20, 7), to(1 << 20);
    REQUIRE(registerLocalMemory(here.self, from.data(), from.size(), "*", 1) == 0);
    REQUIRE(registerLocalMemory(there.self, to.data(), to.size(), "*", 1) == 0);
    segment_id_t peer = openSegment(here.self, there.address.c_str());
    REQUIRE(peer >= 0);
    batch_id_t batch = allocateBatchID(here.self, 8);
    for (size_t i = 0; i < 8; ++i) {
        transfer_request_t request{OPCODE_WRITE, from.data() + (i << 17), peer,
                                   reinterpret_cast<uint64_t>(to.data()) + (i << 17), 1u << 17};
        std::string text(i * 40, 'x');
        REQUIRE(submitTransferWithNotify(here.self, batch, &request, 1, {text.data(), text.data()}) == 0);
    }
    std::vector<std::thread> lookers;
    std::vector<int> ends(8);
    for (size_t i = 0; i < 8; ++i) lookers.emplace_back([&, i] { ends[i] = wait_for(here, batch, i); });
    for (std::thread& one : lookers) one.join();
    CHECK(ends == std::vector<int>(8, STATUS_COMPLETED));
    CHECK(from == to);
    CHECK(freeBatchID(here.self, batch) == 0);

    int heard = 0;
    while (heard < 8) {
        int size = 0;
        notify_msg_t* messages = getNotifsFromEngine(there.self, &size);
        for (int i = 0; i < size; ++i) CHECK(std::string(messages[i].name) == messages[i].msg);
        freeNotifsMsgBuf(messages, size);
        heard += size;
        std::this_thread::yield();
    }

    batch = allocateBatchID(here.self, 1);
    transfer_request_t whole{OPCODE_READ, from.data(), peer, reinterpret_cast<uint64_t>(to.data()),
                             to.size()};
    REQUIRE(submitTransfer(here.self, batch, &whole, 1) == 0);
    CHECK(freeBatchID(here.self, batch) == 0);
    CHECK(unregisterLocalMemory(here.self, from.data()) == 0);
}

TEST_CASE("capi: a batch is looked at before the requests are, and a message alone takes its place in it") {
    Engine here, there;
    segment_id_t peer = openSegment(here.self, there.address.c_str());
    batch_id_t batch = allocateBatchID(here.self, 2);
    transfer_request_t nothing{OPCODE_WRITE, nullptr, peer, 0, 0};
    char text[] = "text";
    CHECK(submitTransfer(here.self, batch, &nothing, SIZE_MAX / sizeof(nothing)) < 0);  // there is but one
    CHECK(submitTransfer(here.self, batch + 1, &nothing, SIZE_MAX / sizeof(nothing)) < 0);
    CHECK(submitTransferWithNotify(here.self, batch, &nothing, 1, {text, text}) == 0);
    CHECK(wait_for(here, batch, 0) == STATUS_COMPLETED);
    nothing.target_id = 4711;
    CHECK(submitTransferWithNotify(here.self, batch, &nothing, 1, {text, text}) < 0);
    transfer_status_t status;
    CHECK(getTransferStatus(here.self, batch, 1, &status) < 0);
    nothing.target_id = peer;
    CHECK(submitTransferWithNotify(here.self, batch, &nothing, 1, {text, text}) == 0);
    CHECK(submitTransferWithNotify(here.self, batch, &nothing, 1, {text, text}) < 0);  // it is full
    int heard = 0;
    while (heard < 2) {
        int size = 0;
        notify_msg_t* messages = getNotifsFromEngine(there.self, &size);
        freeNotifsMsgBuf(messages, size);
        heard += size;
        std::this_thread::yield();
    }
    CHECK(heard == 2);
    CHECK(freeBatchID(here.self, batch) == 0);
}

TEST_CASE("capi: batches of what failed are forgotten, and no others") {
    Engine here, there;
    std::vector<unsigned char> memory(4096);
    REQUIRE(registerLocalMemory(here.self, memory.data(), memory.size(), "*", 1) == 0);
    segment_id_t peer = openSegment(here.self, there.address.c_str());
    batch_id_t unused = allocateBatchID(here.self, 1);
    transfer_request_t request{OPCODE_READ, memory.data(), peer, 0, memory.size()};  // what nobody registered
    transfer_status_t status;
    batch_id_t unheard = allocateBatchID(here.self, 1);
    REQUIRE(submitTransfer(here.self, unheard, &request, 1) == 0);
    batch_id_t heard = allocateBatchID(here.self, 1);
    REQUIRE(submitTransfer(here.self, heard, &request, 1) == 0);
    CHECK(wait_for(here, heard, 0) == STATUS_FAILED);
    transfer_request_t refused = request;
    refused.target_id = 4711;
    batch_id_t last = 0;
    for (int i = 0; i < 70000; ++i) {  // more than there may be at a time; TensorRT-LLM frees none of them
        last = allocateBatchID(here.self, 1);
        REQUIRE(last != INVALID_BATCH);
        REQUIRE(submitTransfer(here.self, last, &refused, 1) != 0);
    }
    CHECK(getTransferStatus(here.self, heard, 0, &status) != 0);
    CHECK(wait_for(here, unheard, 0) == STATUS_FAILED);
    CHECK(submitTransfer(here.self, unused, &request, 1) == 0);
    CHECK(wait_for(here, unused, 0) == STATUS_FAILED);
    CHECK(freeBatchID(here.self, last) == 0);
}

TEST_CASE("capi: a location that peers could not read is refused") {
    Engine here, there;
    std::vector<unsigned char> memory(4096);
    CHECK(registerLocalMemory(here.self, memory.data(), memory.size(), "\xff\xfe", 1) == -600);
    CHECK(unregisterLocalMemory(here.self, memory.data()) == -3);  // nothing was registered
    CHECK(registerLocalMemory(here.self, memory.data(), memory.size(), "cpu:0", 1) == 0);
    CHECK(openSegment(there.self, here.address.c_str()) >= 0);
}

TEST_CASE("capi: which hosts are this one") {
    using moonpool::capi::is_loopback;
    for (const char* host : {"127.0.0.1", "127.9.9.9", "localhost", "::1"}) CHECK(is_loopback(host));
    for (const char* host : {"127.example.org", "128.0.0.1", "127.1", "", "::2"})
        CHECK_FALSE(is_loopback(host));
}

TEST_CASE("capi: messages keep every length, and strangers' bytes are text of the peer") {
    using namespace moonpool::capi;
    for (size_t length : {0, 1, 31, 32, 255, 256, 65535, 65536}) {
        std::string text(length, 'y');
        CHECK(unpack_message("peer", pack_message(text, "t")) ==
              std::pair<std::string, std::string>(text, "t"));
    }
    for (std::string stranger :
         {std::string(), std::string("plain"), std::string("\x92\xa1"), std::string("\x93\xa1x\xa1y")}) {
        CHECK(unpack_message("peer", stranger) == std::pair<std::string, std::string>("peer", stranger));
    }
}
