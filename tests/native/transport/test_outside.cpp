// Transports that are built outside of the tree: how a library is loaded, and that one that breaks the
// contract costs an engine its sentence, and a transfer nothing that another path can carry. The conformance
// suite runs over the example (bed.hpp).
#include <dlfcn.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "bed.hpp"
#include "transport/frames.hpp"

using namespace moonpool;
using namespace moonpool::testing;

namespace {

constexpr size_t kMiB = 1u << 20;

// The library of outside/liar.cpp, while one lives: honest at its end.
class Liar {
   public:
    explicit Liar(const char* lie) {
        library_ = ::dlopen(path().c_str(), RTLD_NOW | RTLD_LOCAL);
        REQUIRE(library_ != nullptr);
        script(lie);
    }
    ~Liar() { script("nothing"); }
    Liar(const Liar&) = delete;

    static std::string path() { return beside_program("libliar.so"); }
    void script(const char* lie) {
        reinterpret_cast<void (*)(const char*)>(::dlsym(library_, "liar_script"))(lie);
    }
    bool taken_late() { return reinterpret_cast<int (*)()>(::dlsym(library_, "liar_taken_late"))() != 0; }

   private:
    void* library_;
};

EngineOptions with_liar(const std::string& name, std::optional<std::vector<std::string>> transports = {}) {
    EngineOptions options = engine_options(name, "");
    options.outside_transports = {Liar::path()};
    options.transports = std::move(transports);
    return options;
}

struct LiarPair : Pair {
    explicit LiarPair(std::vector<std::string> transports = {"liar", "tcp"})
        : Pair(with_liar("here", std::move(transports)), with_liar("there")) {}
};

std::string why_not(const EngineOptions& options) {
    Result<std::shared_ptr<Engine>> made = Engine::create(options);
    REQUIRE_FALSE(made.ok());
    CHECK(made.error().code == Code::kInvalidArgument);
    return made.error().text;
}

std::string unavailable(Engine& engine, const std::string& name) {
    for (auto& [row, why] : engine.transports()) {
        if (row == name) return why;
    }
    FAIL("no transport " << name);
    return "";
}

SegmentPath path_of(Engine& engine, uint32_t segment, const std::string& transport) {
    std::vector<SegmentPath> paths = *engine.paths(segment);
    auto row = std::ranges::find(paths, transport, &SegmentPath::transport);
    REQUIRE(row != paths.end());
    return *row;
}

bool says(const std::string& text, const char* what) {
    CAPTURE(text);
    CHECK(text.find(what) != std::string::npos);
    return text.find(what) != std::string::npos;
}

}  // namespace

TEST_CASE("outside: what is no such library is refused with one sentence") {
    struct Case {
        const char* lie;
        const char* says;
    };
    for (const Case& c : {Case{"no table", "moonpool_transport_v1 returned no table"},
                          Case{"short table", "its table has 40 bytes, and needs"},
                          Case{"empty table", "its table has 0 bytes"},
                          Case{"other version", "its table is of version 2, this engine's of 1"},
                          Case{"no name", "its name is not one of 1 to 32 bytes"},
                          Case{"empty name", "its name is not one of 1 to 32 bytes"},
                          Case{"odd name", "its name is not one of 1 to 32 bytes of a to z, 0 to 9 and _"},
                          Case{"long name", "its name is not one of 1 to 32 bytes"},
                          Case{"built-in name", "its name \"tcp\" is that of a transport of Moonpool's"},
                          Case{"no run", "its function run is null"}}) {
        CAPTURE(c.lie);
        Liar liar(c.lie);
        std::string why = why_not(with_liar("here"));
        says(why, c.says);
        says(why, "libliar.so is not used: ");
    }
    EngineOptions options = engine_options("here", "");
    options.outside_transports = {"libliar.so"};
    says(why_not(options), "named by the absolute path of its library");
    options.outside_transports = {"/dev/no/such.so"};
    says(why_not(options), "/dev/no/such.so is not used: ");
    options.outside_transports = {soft_verbs_library()};
    says(why_not(options), "it does not export moonpool_transport_v1");
    options.outside_transports = {Liar::path(), Liar::path()};
    says(why_not(options), "its name \"liar\" is that of another one of this engine");
    options.outside_transports = std::vector<std::string>(17, Liar::path());
    CHECK(Engine::create(options).error().code == Code::kTooLarge);
    options.outside_transports = {Liar::path()};
    options.transports = {"lair"};
    says(why_not(options), "there is no transport \"lair\"; there are loopback, ");
    says(why_not(options), " and liar");
}

TEST_CASE("outside: a table of a later release is read as far as this one knows it") {
    Liar liar("later table");
    LiarPair pair;
    Memory mine(*pair.here, 4096, MemoryKind::kHost), theirs(*pair.there, 4096, MemoryKind::kHost);
    REQUIRE(pair.transfer({{mine.address(), theirs.address(), 4096, Direction::kWrite}}).ok());
    CHECK(metric(*pair.here, "liar_write_bytes_total") == 4096);
}

TEST_CASE(
    "outside: it stands before the transport that reaches every peer, and is used only where it is allowed") {
    Liar liar("nothing");
    auto engine = make_engine(with_liar("here"));
    std::vector<std::string> names;
    for (auto& [name, why] : engine->transports()) names.push_back(name);
    auto at = std::ranges::find(names, "liar");
    REQUIRE(at != names.end());
    REQUIRE(at + 1 != names.end());
    CHECK(*(at + 1) == "tcp");
    CHECK(names.front() == "loopback");
    auto other = make_engine(with_liar("other", std::vector<std::string>{"tcp"}));
    says(unavailable(*other, "liar"), "not among the transports that this engine was given");
    // A peer without the library does not hear of it, and one that does not allow it offers nothing.
    uint32_t segment = *engine->open(other->addresses().front());
    says(path_of(*engine, segment, "liar").why, "the peer does not offer liar");
}

TEST_CASE("outside: a library that does not start, or offers too much, says so and costs nothing else") {
    struct Case {
        const char* lie;
        const char* says;
    };
    for (const Case& c :
         {Case{"not viable", "this host has no liars"},
          Case{"no transport", "the outside transport \"liar\" was not started: it gives no reason"},
          Case{"no text", "was not started: ????"},
          Case{"long offer", "broke its contract: its offer has 4097 bytes, the limit is 4096"}}) {
        CAPTURE(c.lie);
        Liar liar(c.lie);
        LiarPair pair;
        says(unavailable(*pair.here, "liar"), c.says);
        Memory mine(*pair.here, 4096, MemoryKind::kHost), theirs(*pair.there, 4096, MemoryKind::kHost);
        REQUIRE(pair.transfer({{mine.address(), theirs.address(), 4096, Direction::kWrite}}).ok());
        CHECK(metric(*pair.here, "tcp_write_bytes_total") == 4096);
    }
    for (const char* lie : {"no link", "no offer"}) {
        CAPTURE(lie);
        Liar liar(lie);
        LiarPair pair;
        SegmentPath path = path_of(*pair.here, pair.segment, "liar");
        CHECK(path.path.empty());
        says(path.why, std::strcmp(lie, "no link") == 0 ? "it gives no reason" : "does not offer liar");
    }
    Liar liar("no region");
    auto engine = make_engine(with_liar("here"));
    std::vector<std::byte> memory(4096);
    Status added = engine->register_region(reinterpret_cast<uint64_t>(memory.data()), 4096, "");
    REQUIRE_FALSE(added.ok());
    says(added.error().text, "\"liar\" refuses the region: it is full");
    CHECK(metric(*engine, "regions") == 0);
}

TEST_CASE("outside: a lie about slices costs the link, and another path carries what had no verdict") {
    struct Case {
        const char* lie;
        const char* says;
        bool moved;  // its verdicts before the lie stand
    };
    for (const Case& c :
         {Case{"silent", "it returned success from a batch of 3, and left 3 slices without a verdict", false},
          Case{"unknown slice", "it gave a verdict of slices 3 + 1 of a batch of 3", false},
          Case{"unknown slices", "it gave a verdict of slices 0 + 4 of a batch of 3", false},
          Case{"wraps", "it gave a verdict of slices 1 + 18446744073709551615 of a batch of 3", false},
          Case{"nonsense", "it gave the verdict 7, which there is not", false},
          Case{"twice", "it gave a second verdict of slice 0", true},
          Case{"contradicts", "it gave a second verdict of slice 2", true}}) {
        for (bool alone : {false, true}) {
            CAPTURE(c.lie);
            CAPTURE(alone);
            Random random(900);
            Liar liar(c.lie);
            LiarPair pair(alone ? std::vector<std::string>{"liar"} : std::vector<std::string>{"liar", "tcp"});
            Memory mine(*pair.here, 3 * 4096, MemoryKind::kHost),
                theirs(*pair.there, 3 * 4096, MemoryKind::kHost);
            mine.fill(random);
            std::vector<Slice> slices;
            for (uint64_t i = 0; i < 3; ++i) {
                slices.push_back(
                    {mine.address() + i * 4096, theirs.address() + i * 4096, 4096, Direction::kWrite});
            }
            Result<uint64_t> moved = pair.transfer(slices);
            if (!alone) {
                REQUIRE_MESSAGE(moved.ok(), (moved.ok() ? "" : moved.error().text));
                CHECK(theirs.bytes() == mine.bytes());
                CHECK(metric(*pair.here, "tcp_write_bytes_total") == (c.moved ? 0 : 3 * 4096));
            } else if (!c.moved) {
                REQUIRE_FALSE(moved.ok());
                CHECK(moved.error().code == Code::kProtocol);
                says(moved.error().text, "the outside transport \"liar\" broke its contract: ");
                says(moved.error().text, c.says);
            }
            // The link is not asked again, though it would be honest now.
            liar.script("nothing");
            if (!alone) {
                REQUIRE(pair.transfer(slices).ok());
                CHECK(metric(*pair.here, "liar_write_slices_total") == (c.moved ? 3 : 0));
            } else {
                Result<uint64_t> again = pair.transfer(slices);
                REQUIRE_FALSE(again.ok());
                says(again.error().text, c.says);
            }
            CHECK(metric(*pair.here, "protocol_errors_total") == 1);
        }
    }
}

TEST_CASE("outside: a verdict of a batch that has ended is not taken") {
    Liar liar("late");
    LiarPair pair({"liar"});
    Memory mine(*pair.here, 4096, MemoryKind::kHost), theirs(*pair.there, 4096, MemoryKind::kHost);
    for (int i = 0; i < 3; ++i) {
        REQUIRE(*pair.transfer({{mine.address(), theirs.address(), 4096, Direction::kWrite}}) == 4096);
    }
    CHECK_FALSE(liar.taken_late());
    CHECK(metric(*pair.here, "liar_write_slices_total") == 3);
}

TEST_CASE("outside: verdicts of several threads at once are counted once each") {
    Liar liar("threads");
    LiarPair pair({"liar"});
    Memory mine(*pair.here, kMiB, MemoryKind::kHost), theirs(*pair.there, kMiB, MemoryKind::kHost);
    std::vector<Slice> slices;
    for (uint64_t i = 0; i < 1000; ++i) {
        slices.push_back({mine.address() + i * 1000, theirs.address() + i * 1000, 1000, Direction::kWrite});
    }
    CHECK(*pair.transfer(slices) == 1000 * 1000);
    CHECK(metric(*pair.here, "liar_write_slices_total") == 1000);
}

TEST_CASE("outside: a refusal is asked of the next path, which knows the memory of cards, too") {
    Liar liar("refuses");
    LiarPair pair;
    Memory mine(*pair.here, 4096, MemoryKind::kHost), theirs(*pair.there, 4096, MemoryKind::kHost);
    REQUIRE(pair.transfer({{mine.address(), theirs.address(), 4096, Direction::kWrite}}).ok());
    CHECK(metric(*pair.here, "tcp_write_bytes_total") == 4096);
    LiarPair alone({"liar"});
    Memory other(*alone.here, 4096, MemoryKind::kHost);
    Result<uint64_t> moved = alone.transfer({{other.address(), theirs.address(), 4096, Direction::kWrite}});
    REQUIRE_FALSE(moved.ok());
    CHECK(moved.error().code == Code::kInvalidArgument);
    says(moved.error().text, "the peer refused it without a reason");
}

TEST_CASE("outside: what it leaves goes another way, but no write whose bytes may still arrive") {
    Liar liar("gone");
    LiarPair pair;
    Memory mine(*pair.here, 4096, MemoryKind::kHost), theirs(*pair.there, 4096, MemoryKind::kHost);
    std::vector<Slice> write = {{mine.address(), theirs.address(), 4096, Direction::kWrite}};
    std::vector<Slice> read = {{mine.address(), theirs.address(), 4096, Direction::kRead}};
    REQUIRE(pair.transfer(write).ok());
    liar.script("no reason");
    REQUIRE(pair.transfer(write).ok());
    CHECK(metric(*pair.here, "tcp_write_slices_total") == 2);
    liar.script("unsettled");
    REQUIRE(pair.transfer(read).ok());
    TicketStatus status;
    Result<uint64_t> moved = pair.here->transfer(pair.request(write), &status);
    REQUIRE_FALSE(moved.ok());
    says(moved.error().text, "the way is blocked; bytes of it may still arrive");
    CHECK_FALSE(status.failure.settled);
    CHECK(metric(*pair.here, "tcp_write_slices_total") == 2);
    // Nor does the link carry anything until it is settled.
    REQUIRE(pair.transfer(write).ok());
    CHECK(metric(*pair.here, "tcp_write_slices_total") == 3);
    liar.script("nothing");
    REQUIRE(pair.transfer(write).ok());
    CHECK(metric(*pair.here, "liar_write_slices_total") == 1);
}

TEST_CASE("outside: a batch sees its deadline, its cancellation and the end of its peer") {
    Liar liar("waits");
    LiarPair pair({"liar"});
    Memory mine(*pair.here, 4096, MemoryKind::kHost), theirs(*pair.there, 4096, MemoryKind::kHost);
    std::vector<Slice> slices = {{mine.address(), theirs.address(), 4096, Direction::kRead}};
    TransferRequest request = pair.request(slices);
    request.timeout_ms = 50;
    Result<uint64_t> moved = pair.here->transfer(request);
    REQUIRE_FALSE(moved.ok());
    CHECK(moved.error().code == Code::kTimeout);
    request.timeout_ms = 60000;
    uint64_t ticket = *pair.here->submit(request);
    REQUIRE(pair.here->cancel(ticket).ok());
    REQUIRE(*pair.here->wait(ticket, 60000));
    CHECK(pair.here->status(ticket)->state == TicketState::kCancelled);
    ticket = *pair.here->submit(request);
    REQUIRE(pair.here->close_segment(pair.segment).ok());
    REQUIRE(*pair.here->wait(ticket, 60000));
    CHECK(pair.here->status(ticket)->state == TicketState::kFailed);
}

TEST_CASE("outside: memory that a library does not let go of is not called free") {
    Liar liar("never drained");
    EngineOptions options = with_liar("here");
    options.timeout_ms = 100;
    auto engine = make_engine(options);
    std::vector<std::byte> memory(4096);
    auto address = reinterpret_cast<uint64_t>(memory.data());
    REQUIRE(engine->register_region(address, 4096, "").ok());
    CHECK(engine->deregister_region(address).error().code == Code::kTimeout);
    liar.script("never out");
    CHECK(engine->deregister_region(address).ok());
    CHECK(engine->shut_out(random_incarnation()).error().code == Code::kTimeout);
}

TEST_CASE("outside: what a library writes into its texts is one line of UTF-8") {
    Liar liar("long path");
    LiarPair pair;
    CHECK(path_of(*pair.here, pair.segment, "liar").path == "liar " + std::string(256, 'x'));
}

TEST_CASE("outside: the example's server takes nothing of a process that does not know its cookie") {
    OutsideBed outside;
    Pair pair(kOutside);
    std::string name = path_of(*pair.here, pair.segment, kOutside).path;
    REQUIRE(name.starts_with("unix_socket @"));
    name = name.substr(name.find('@') + 1);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name.data(), name.size());
    auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    Random random(920);
    // Of a hello's size with a magic that is right, and a cookie that is not; of odd sizes; silent ones.
    for (int round = 0; round < 30; ++round) {
        int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        REQUIRE(::connect(fd, reinterpret_cast<sockaddr*>(&address), size) == 0);
        std::vector<uint64_t> words(16);
        for (uint64_t& word : words) word = random.next();
        words[0] = 0x31786f7378696e75;
        size_t bytes = round % 3 == 0 ? 64 : random.below(128);
        if (bytes != 0) REQUIRE(::send(fd, words.data(), bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes));
        uint64_t status = 0;
        if (bytes >= 64) {
            REQUIRE(::recv(fd, &status, sizeof(status), MSG_WAITALL) == sizeof(status));
            CHECK(status == 2);
        }
        ::close(fd);
    }
    Memory mine(*pair.here, 4096, MemoryKind::kHost), theirs(*pair.there, 4096, MemoryKind::kHost);
    REQUIRE(pair.transfer({{mine.address(), theirs.address(), 4096, Direction::kWrite}}).ok());
}
