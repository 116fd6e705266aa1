// What the tests of the log share: small logs, objects made of a number, and calls that wait.
#pragma once

#include <doctest/doctest.h>

#include <chrono>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "base/crc32c.hpp"
#include "fake_disk.hpp"
#include "ssd/log.hpp"

namespace moonpool::ssd::testing {

inline constexpr uint64_t kSegment = 128 << 10;

inline LogOptions small_log(const std::shared_ptr<FakeDisk>& disk, uint32_t segments = 12) {
    LogOptions options;
    options.directory = "/disk";
    options.segment_bytes = kSegment;
    options.bytes = 65536 + segments * kSegment;
    options.depth = 4;
    options.io_bytes = 16 << 10;
    options.io = "threads";
    options.sync_ms = 1u << 30;  // only when a test asks for it
    options.open = disk->opener();
    return options;
}

inline std::unique_ptr<Log> must_open(LogOptions options) {
    Result<std::unique_ptr<Log>> log = Log::open(std::move(options));
    if (!log) FAIL(log.error().text);
    return std::move(*log);
}

inline std::vector<std::byte> content(uint64_t number, uint64_t size) {
    std::vector<std::byte> bytes(size);
    std::mt19937_64 engine(number);
    for (uint64_t i = 0; i + 8 <= size; i += 8) {
        uint64_t word = engine();
        std::memcpy(bytes.data() + i, &word, 8);
    }
    for (uint64_t i = size / 8 * 8; i < size; ++i) bytes[i] = static_cast<std::byte>(engine());
    return bytes;
}

inline const std::string kSpace = std::string("default") + '\0' + "chat" + '\0' + "fp";

inline Key key_of(Log& log, const std::string& name) {
    std::string whole = kSpace + name;
    return Key{log.space(kSpace), xxh3_128(whole.data(), whole.size()), name};
}

class Call {
   public:
    Done done() {
        return [promise = promise_](Outcome outcome) { promise->set_value(outcome); };
    }
    bool ready() const { return future_.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }
    Outcome wait() {
        REQUIRE(future_.wait_for(std::chrono::seconds(20)) == std::future_status::ready);
        return future_.get();
    }

   private:
    std::shared_ptr<std::promise<Outcome>> promise_ = std::make_shared<std::promise<Outcome>>();
    std::future<Outcome> future_ = promise_->get_future();
};

template <class F>
bool eventually(F f) {
    auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!f()) {
        if (std::chrono::steady_clock::now() > deadline) return false;
        std::this_thread::yield();
    }
    return true;
}

inline Outcome put(Log& log, const std::string& name, const std::vector<std::byte>& bytes,
                   const std::string& parent = "") {
    Call call;
    if (!log.write(key_of(log, name), parent, {bytes}, crc32c(0, bytes.data(), bytes.size()), call.done())) {
        return Outcome::kRefused;
    }
    return call.wait();
}

inline Outcome get(Log& log, const std::string& name, std::vector<std::byte>& bytes) {
    std::optional<Found> found = log.find(key_of(log, name));
    if (!found) return Outcome::kMiss;
    bytes.assign(found->size, std::byte{0xEE});
    Call call;
    if (!log.read(key_of(log, name), bytes, call.done())) return Outcome::kRefused;
    return call.wait();
}

inline Outcome sync(Log& log) {
    Call call;
    log.sync(call.done());
    return call.wait();
}

inline uint64_t counter(const Log& log, const std::string& name) {
    for (auto& [known, value] : log.counters()) {
        if (known == name) return value;
    }
    FAIL("no counter " << name);
    return 0;
}

}  // namespace moonpool::ssd::testing
