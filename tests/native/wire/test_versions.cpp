// Versions of the wire format: a listener and callers that speak more than one of them, as a later release
// will.
#include <doctest/doctest.h>
#include <poll.h>

#include <mutex>
#include <optional>
#include <vector>

#include "wire/dial.hpp"
#include "wire/listener.hpp"
#include "wire/version_range.hpp"

using namespace moonpool;

namespace {

constexpr VersionRange kFirst{1, 1}, kBoth{1, 2}, kSecond{2, 2}, kLater{2, 3}, kThird{3, 3};

struct Pair {
    VersionRange listener, caller;
    std::optional<uint16_t> version;  // that both take
};
const Pair kPairs[] = {
    {kFirst, kFirst, 1},  {kFirst, kBoth, 1},   {kBoth, kFirst, 1},    {kBoth, kBoth, 2},
    {kBoth, kSecond, 2},  {kSecond, kBoth, 2},  {kBoth, kLater, 2},    {kLater, kBoth, 2},
    {kLater, kLater, 3},  {kThird, kLater, 3},  {kFirst, kSecond, {}}, {kSecond, kFirst, {}},
    {kFirst, kLater, {}}, {kLater, kFirst, {}}, {kBoth, kThird, {}},   {kThird, kBoth, {}},
};

// A port that serves "store", and what became of its callers.
struct Port {
    std::shared_ptr<Journal> journal = std::make_shared<Journal>();
    std::mutex mutex;
    std::vector<AuthenticatedConnection> callers;
    std::unique_ptr<Listener> listener;

    explicit Port(VersionRange versions) {
        ListenerOptions options;
        options.journal = journal;
        options.addresses = {"127.0.0.1:0"};
        options.token = "secret";
        options.versions = versions;
        listener = std::move(*Listener::create(std::move(options)));
        listener->offer("store", Service{[](std::string_view) -> Result<std::vector<std::byte>> {
                                             return std::vector<std::byte>{};
                                         },
                                         [this](AuthenticatedConnection caller) {
                                             std::lock_guard lock(mutex);
                                             callers.push_back(std::move(caller));
                                         }});
        REQUIRE(listener->start().ok());
    }
    ~Port() { listener->stop(); }

    Result<Dialed> call(VersionRange versions) const {
        DialOptions options;
        options.address = listener->addresses().front();
        options.token = "secret";
        options.service = "store";
        options.timeout_ms = 20000;
        options.versions = versions;
        return dial(options);
    }
    // Waits for what the operator reads.
    std::string refusal() {
        pollfd noted{journal->fd(), POLLIN, 0};
        REQUIRE(::poll(&noted, 1, 20000) == 1);
        std::vector<Note> notes = journal->take();
        REQUIRE(notes.size() == 1);
        CHECK(notes.front().kind == "protocol_refused");
        return notes.front().text;
    }
};

}  // namespace

TEST_CASE("versions: the highest in common, or none") {
    for (const Pair& pair : kPairs) {
        CHECK(highest_in_common(pair.listener, pair.caller) == pair.version);
        CHECK(highest_in_common(pair.caller, pair.listener) == pair.version);
    }
    CHECK_FALSE(VersionRange{2, 1}.valid());
    CHECK(agree({"here", kFirst}, {"there", {7, 3}}, "a format").error().text ==
          "there says a range of versions of a format that is none");
    CHECK(agree({"here", kFirst}, {"there", kLater}, "a format").error().text ==
          "here speaks version 1 of a format, there versions 2 to 3, none in common; upgrade here, since "
          "only adjacent releases work together");
}

TEST_CASE(
    "versions: a caller and a port of any two releases take the highest in common, or both say why not") {
    for (const Pair& pair : kPairs) {
        CAPTURE(pair.listener.text());
        CAPTURE(pair.caller.text());
        Port port(pair.listener);
        Result<Dialed> dialed = port.call(pair.caller);
        if (pair.version) {
            REQUIRE_MESSAGE(dialed.ok(), (dialed.ok() ? "" : dialed.error().text));
            CHECK(dialed->version == *pair.version);
            // The caller may know before the port's thread has handed its socket on.
            port.listener->stop();
            REQUIRE(port.callers.size() == 1);
            CHECK(port.callers.front().version == *pair.version);
            continue;
        }
        REQUIRE_FALSE(dialed.ok());
        CHECK(dialed.error().code == Code::kProtocol);
        const std::string noted = port.refusal();
        for (const std::string& text : {dialed.error().text, noted}) {
            CHECK(text.find(pair.listener.text()) != std::string::npos);
            CHECK(text.find(pair.caller.text()) != std::string::npos);
        }
        const bool port_is_older = pair.listener.highest < pair.caller.highest;
        CHECK(noted.find(port_is_older ? "upgrade this process" : "upgrade the caller") != std::string::npos);
        const std::string older = port_is_older ? port.listener->addresses().front() : "this process";
        CHECK(dialed.error().text.find("upgrade " + older) != std::string::npos);
    }
}
