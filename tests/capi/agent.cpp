// Plays TensorRT-LLM's transfer agent over the C library, call by call: it registers memory, learns its
// address, opens peers, submits requests with and without a message, and asks for the status of each request
// in a loop, as that agent does. Reads commands from stdin and answers each with one line;
// test_transfer_engine.py drives two.
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "transfer_engine_c.h"

namespace {

// As the agent's: true when nothing is pending any more. That one logs a failure and tells its caller
// nothing; here it is kept, for the tests to see.
struct Status {
    transfer_engine_t engine;
    batch_id_t batch;
    size_t count;
    bool failed = false;
    uint64_t bytes = 0;

    bool is_completed() {
        failed = false;
        bytes = 0;
        for (size_t i = 0; i < count; ++i) {
            transfer_status_t status;
            int rc = getTransferStatus(engine, batch, i, &status);
            if (rc != 0 || status.status == STATUS_FAILED) {
                failed = true;
            } else if (status.status == STATUS_PENDING || status.status == STATUS_WAITING) {
                return false;
            } else {
                bytes += status.transferred_bytes;
            }
        }
        if (!failed) freeBatchID(engine, batch);
        return true;
    }
};

transfer_engine_t engine = nullptr;
std::string me;
std::vector<unsigned char> memory;
std::map<std::string, segment_id_t> peers;

uint64_t checksum(size_t from, size_t length) {
    uint64_t sum = 1469598103934665603u;
    for (size_t i = from; i < from + length; ++i) sum = (sum ^ memory[i]) * 1099511628211u;
    return sum;
}

// op: read or write; `count` pieces of `length` bytes that lie side by side on both sides
std::string transfer(const std::string& op, const std::string& peer, size_t local, uint64_t remote,
                     size_t length, size_t count, const std::string& message) {
    batch_id_t batch = allocateBatchID(engine, 1024);
    if (batch == INVALID_BATCH) return "no batch";
    std::vector<transfer_request_t> requests(count);
    for (size_t i = 0; i < count; ++i) {
        requests[i].opcode = op == "read" ? OPCODE_READ : OPCODE_WRITE;
        requests[i].source = memory.data() + local + i * length;
        requests[i].target_offset = remote + i * length;
        requests[i].length = length;
        requests[i].target_id = peers.at(peer);
    }
    int rc = 0;
    if (message.empty()) {
        rc = submitTransfer(engine, batch, requests.data(), count);
    } else {
        notify_msg_t notify{me.data(), const_cast<char*>(message.c_str())};
        rc = submitTransferWithNotify(engine, batch, requests.data(), count, notify);
    }
    if (rc != 0) return "submit " + std::to_string(rc);
    Status status{engine, batch, count};
    while (!status.is_completed()) {
    }
    if (status.failed) return "failed, freed " + std::to_string(freeBatchID(engine, batch));
    return "done " + std::to_string(status.bytes);
}

std::string answer(std::istringstream& in) {
    std::string verb, text, peer;
    size_t from = 0, length = 0, count = 0;
    uint64_t remote = 0;
    in >> verb;
    if (verb == "create") {
        in >> me >> text;
        engine = createTransferEngine("P2PHANDSHAKE", text.c_str(), "", 0, 1);
        char address[64];
        if (engine == nullptr) return "null";
        return getLocalIpAndPort(engine, address, sizeof(address)) == 0 ? address : "no address";
    }
    if (verb == "memory") {
        in >> length >> count;  // bytes, seed
        memory.resize(length);
        for (size_t i = 0; i < length; ++i)
            memory[i] = static_cast<unsigned char>((i * 31 + i / 251 + count) * count);
        int rc = registerLocalMemory(engine, memory.data(), length, "*", 1);
        return rc == 0 ? std::to_string(reinterpret_cast<uint64_t>(memory.data()))
                       : "error " + std::to_string(rc);
    }
    if (verb == "unregister") return std::to_string(unregisterLocalMemory(engine, memory.data()));
    if (verb == "connect") {
        in >> peer >> text;
        segment_id_t segment = openSegment(engine, text.c_str());
        if (segment >= 0) peers[peer] = segment;
        return std::to_string(segment);
    }
    if (verb == "read" || verb == "write") {
        in >> peer >> from >> remote >> length >> count;
        std::getline(in >> std::ws, text);
        return transfer(verb, peer, from, remote, length, count, text);
    }
    if (verb == "sum") {
        in >> from >> length;
        return std::to_string(checksum(from, length));
    }
    if (verb == "notify") {
        in >> peer;
        std::getline(in >> std::ws, text);
        return std::to_string(genNotifyInEngine(engine, peers.at(peer), {me.data(), text.data()}));
    }
    if (verb == "messages") {
        int size = 0;
        notify_msg_t* messages = getNotifsFromEngine(engine, &size);
        std::string all = std::to_string(size);
        for (int i = 0; i < size; ++i) all += std::string(" ") + messages[i].name + ":" + messages[i].msg;
        freeNotifsMsgBuf(messages, size);
        return all;
    }
    if (verb == "close") {
        in >> peer;
        return std::to_string(closeSegment(engine, peers.at(peer)));
    }
    if (verb == "misuse") {  // each must be a code, and no crash
        transfer_status_t status;
        char address[4];
        int size = 0;
        std::vector<long> codes;
        codes.push_back(createTransferEngine("http://meta", "127.0.0.1", "", 0, 1) == nullptr);
        codes.push_back(createTransferEngine("P2PHANDSHAKE", "no such host.", "", 0, 1) == nullptr);
        codes.push_back(createTransferEngine("P2PHANDSHAKE", "127.0.0.1", "", 70000, 1) == nullptr);
        codes.push_back(createTransferEngine(nullptr, nullptr, nullptr, 0, 0) == nullptr);
        codes.push_back(getLocalIpAndPort(engine, address, sizeof(address)));
        codes.push_back(getLocalIpAndPort(nullptr, address, sizeof(address)));
        codes.push_back(registerLocalMemory(engine, nullptr, 4096, "*", 1));
        // Below vm.mmap_min_addr: where no layout of the process puts anything
        codes.push_back(registerLocalMemory(engine, reinterpret_cast<void*>(4096), 4096, "*", 1));
        codes.push_back(registerLocalMemory(engine, const_cast<char*>("read-only text"), 4, "*", 1));
        codes.push_back(registerLocalMemory(engine, memory.data(), 0, "*", 1));
        codes.push_back(registerLocalMemory(engine, memory.data() + 16, 16, "*", 1));  // overlaps
        codes.push_back(registerLocalMemory(engine, memory.data() + 16, SIZE_MAX, "*", 1));
        codes.push_back(unregisterLocalMemory(engine, memory.data() + 16));
        codes.push_back(openSegment(engine, "127.0.0.1:1"));
        codes.push_back(openSegment(engine, "nonsense"));
        codes.push_back(openSegment(engine, nullptr));
        codes.push_back(closeSegment(engine, 4711));
        codes.push_back(allocateBatchID(engine, 0) == INVALID_BATCH);
        codes.push_back(allocateBatchID(nullptr, 1) == INVALID_BATCH);
        codes.push_back(freeBatchID(engine, 4711));
        batch_id_t batch = allocateBatchID(engine, 1);
        transfer_request_t requests[2] = {{OPCODE_READ, memory.data(), 4711, 0, 16},
                                          {7, memory.data(), 0, 0, 16}};
        codes.push_back(submitTransfer(engine, batch, requests, 1));  // no such segment
        codes.push_back(submitTransfer(engine, batch, requests, 2));  // no such opcode
        codes.push_back(submitTransfer(engine, batch, nullptr, 1));
        codes.push_back(submitTransfer(engine, 4711, requests, 1));
        requests[1] = requests[0];
        codes.push_back(submitTransfer(engine, batch, requests, 2));    // more than the batch takes
        codes.push_back(getTransferStatus(engine, batch, 0, &status));  // nothing was submitted
        codes.push_back(getTransferStatus(engine, 4711, 0, &status));
        codes.push_back(getTransferStatus(engine, batch, 0, nullptr));
        codes.push_back(genNotifyInEngine(engine, 4711, {me.data(), me.data()}));
        codes.push_back(getNotifsFromEngine(nullptr, &size) == nullptr ? size : 0);
        codes.push_back(freeBatchID(engine, batch) == 0);
        freeNotifsMsgBuf(nullptr, 0);
        destroyTransferEngine(nullptr);
        for (size_t i = 0; i < codes.size(); ++i) {
            if (codes[i] == 0) return "call " + std::to_string(i) + " was taken";
        }
        return "all refused";
    }
    if (verb == "empty") {  // requests of no bytes, and none at all, with a message
        in >> peer;
        batch_id_t batch = allocateBatchID(engine, 4);
        transfer_request_t none{OPCODE_WRITE, memory.data(), peers.at(peer), 0, 0};
        int rc = submitTransferWithNotify(engine, batch, &none, 1, {me.data(), const_cast<char*>("nothing")});
        rc |= submitTransfer(engine, batch, nullptr, 0);
        transfer_status_t status;
        rc |= getTransferStatus(engine, batch, 0, &status);
        return std::to_string(rc) + " " + std::to_string(status.status) + " " +
               std::to_string(freeBatchID(engine, batch));
    }
    if (verb == "destroy") {
        destroyTransferEngine(engine);
        engine = nullptr;
        return "gone";
    }
    return "what?";
}

}  // namespace

int main() {
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream in(line);
        std::cout << answer(in) << std::endl;
    }
}
