// Files as segments: what every transport has to do (test_conformance.cpp), as far as a file can, and what
// disks do.
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <thread>

#include "../ssd/fake_disk.hpp"
#include "bed.hpp"
#include "io/queue.hpp"
#include "transport/cufile/library.hpp"

using namespace moonpool;
using namespace moonpool::testing;

namespace {

constexpr size_t kFileMiB = 1u << 20;
namespace fs = std::filesystem;

// A folder that goes with its test.
class Folder {
   public:
    Folder() {
        std::string name = fs::temp_directory_path() / "moonpool-files-XXXXXX";
        REQUIRE(::mkdtemp(name.data()) != nullptr);
        path_ = name;
    }
    ~Folder() { fs::remove_all(path_); }
    std::string file(const std::string& name = "data") const { return path_ / name; }

   private:
    fs::path path_;
};

std::vector<std::byte> content(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    std::vector<std::byte> bytes(fs::file_size(path));
    in.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    return bytes;
}

std::vector<std::byte> random_bytes(Random& random, size_t n) {
    std::vector<std::byte> bytes(n + 8);
    for (size_t i = 0; i < n; i += 8) {
        uint64_t value = random.next();
        std::memcpy(&bytes[i], &value, 8);
    }
    bytes.resize(n);
    return bytes;
}

void store(const std::string& path, const std::vector<std::byte>& bytes) {
    std::ofstream out(path, std::ios::binary);
    out.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
}

// As a file of a file system without O_DIRECT.
Result<std::shared_ptr<io::OpenedFile>> open_cached(const std::string& path, const io::OpenOptions&) {
    io::OpenedFile::Parts parts;
    parts.path = path;
    Fd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    if (!fd.valid()) return os_error("opening " + path);
    parts.blocks = io::file_of(std::move(fd), false, 0);
    return std::make_shared<io::OpenedFile>(std::move(parts));
}

// A disk of the SSD tier's tests; both ways to it.
io::OpenForTransfers fake(const std::shared_ptr<ssd::testing::FakeDisk>& disk) {
    return [disk](const std::string& path, const io::OpenOptions&) {
        io::OpenedFile::Parts parts;
        parts.path = path;
        parts.blocks = std::move(*disk->opener()(path));
        parts.edges = std::move(*disk->opener()(path));
        return Result(std::make_shared<io::OpenedFile>(std::move(parts)));
    };
}

EngineOptions file_options(const std::string& by, int timeout_ms = 10000) {
    EngineOptions options = engine_options("here", "file");
    options.file_io = by;
    options.timeout_ms = timeout_ms;
    return options;
}

// An engine with one open file.
struct Filed {
    std::shared_ptr<Engine> engine;
    uint32_t segment = 0;

    Filed(const EngineOptions& options, const std::string& path, const io::OpenOptions& how = {})
        : engine(make_engine(options)) {
        Result<uint32_t> opened = engine->open_file(path, how);
        REQUIRE_MESSAGE(opened.ok(), (opened.ok() ? "" : opened.error().text));
        segment = *opened;
    }
    ~Filed() { CHECK(engine->check_integrity()); }

    TransferRequest request(const std::vector<Slice>& slices) const {
        TransferRequest request;
        request.segments = {&segment, 1};
        request.slices = slices;
        return request;
    }
    Result<uint64_t> transfer(const std::vector<Slice>& slices, TicketStatus* status = nullptr) {
        return engine->transfer(request(slices), status);
    }
};

// Past the page cache and through it, by io_uring and by threads.
void each_way(const std::function<void(const EngineOptions&)>& body) {
    for (const char* by : {"io_uring", "threads"}) {
        Result<std::unique_ptr<io::Queue>> ring = io::ring_queue(8);
        if (std::string(by) == "io_uring" && !ring) {
            MESSAGE("not tested: " << ring.error().text);
            continue;
        }
        for (bool cached : {false, true}) {
            CAPTURE(by);
            CAPTURE(cached);
            EngineOptions options = file_options(by);
            if (cached) options.open_file = open_cached;
            body(options);
        }
    }
}

void says(const Error& error, const std::string& what) {
    CHECK_MESSAGE(error.text.find(what) != std::string::npos, error.text);
}

}  // namespace

TEST_CASE("files: what is written arrives, what is read is there, at every size and alignment") {
    each_way([](const EngineOptions& options) {
        Random random(400);
        Folder folder;
        constexpr size_t kRoom = 2 * kFileMiB + 123;
        std::vector<std::byte> model = random_bytes(random, kRoom);
        store(folder.file(), model);
        Filed filed(options, folder.file());
        Memory mine(*filed.engine, kRoom + 4096, MemoryKind::kHost);
        const std::vector<std::byte> nothing(mine.size());
        const std::vector<std::byte> pattern = random_bytes(random, mine.size() + 4096);
        uint64_t written = 0;
        for (size_t size : {0ul, 1ul, 7ul, 511ul, 512ul, 4095ul, 4096ul, 4097ul, 8192ul, 65536ul, 65543ul,
                            kFileMiB - 1, kFileMiB + 65541}) {
            for (bool even : {true, false}) {  // memory and file at a block's beginning, or anywhere
                CAPTURE(size);
                CAPTURE(even);
                std::memcpy(mine.data(), &pattern[random.below(4096)], mine.size());
                size_t to =
                    even ? random.below((kRoom - size) / 4096 + 1) * 4096 : random.below(kRoom - size + 1);
                to = std::min(to, kRoom - size);
                size_t from = even ? (4096 - mine.address() % 4096) % 4096 : random.below(4096);
                std::vector<std::byte> sent = mine.bytes();
                Slice slice{mine.address() + from, to, size, Direction::kWrite};
                Result<uint64_t> moved = filed.transfer({slice});
                REQUIRE_MESSAGE(moved.ok(), (moved.ok() ? "" : moved.error().text));
                written += size;
                std::copy_n(sent.begin() + static_cast<long>(from), size,
                            model.begin() + static_cast<long>(to));
                std::memset(mine.data(), 0, mine.size());
                slice.direction = Direction::kRead;
                REQUIRE(*filed.transfer({slice}) == size);
                CHECK(std::memcmp(mine.data() + from, sent.data() + from, size) == 0);
                size_t behind = from + size;
                CHECK(std::memcmp(mine.data(), nothing.data(), from) == 0);
                CHECK(std::memcmp(mine.data() + behind, nothing.data(), mine.size() - behind) == 0);
            }
        }
        REQUIRE(content(folder.file()) == model);  // its length is the same, too
        CHECK(metric(*filed.engine, "file_write_bytes_total") == written);
        CHECK(metric(*filed.engine, "file_read_bytes_total") == written);
        CHECK(metric(*filed.engine, "retries_total") == 0);
    });
}

TEST_CASE("files: random batches of reads and writes against a model, neighbours in one block") {
    each_way([](const EngineOptions& options) {
        Random random(401);
        Folder folder;
        constexpr size_t kSize = kFileMiB + 777;
        std::vector<std::byte> model = random_bytes(random, kSize);
        store(folder.file(), model);
        Filed filed(options, folder.file());
        Memory mine(*filed.engine, kSize, MemoryKind::kHostArena);
        mine.fill(random);
        std::vector<std::byte> a = mine.bytes();
        for (int round = 0; round < 6; ++round) {
            size_t n = random.between(1, random.one_in(4) ? 1500 : 40);
            size_t width = kSize / n;
            std::vector<Slice> slices;
            uint64_t total = 0;
            for (size_t i = 0; i < n; ++i) {
                size_t size = random.below(random.one_in(3) ? width + 1 : std::min<size_t>(width, 300) + 1);
                size_t at = i * width + random.below(width - size + 1);
                size_t place = (n - 1 - i) * width + random.below(width - size + 1);
                bool write = random.one_in(2);
                slices.push_back(
                    {mine.address() + at, place, size, write ? Direction::kWrite : Direction::kRead});
                std::memcpy(write ? &model[place] : &a[at], write ? &a[at] : &model[place], size);
                total += size;
            }
            if (random.one_in(2)) {
                Result<uint64_t> moved = filed.transfer(slices);
                REQUIRE_MESSAGE(moved.ok(), (moved.ok() ? "" : moved.error().text));
                REQUIRE(*moved == total);
            } else {
                TransferRequest request = filed.request(slices);
                request.background = random.one_in(2);
                uint64_t ticket = *filed.engine->submit(request);
                REQUIRE(*filed.engine->wait(ticket, 10000));
                TicketStatus status = *filed.engine->status(ticket);
                REQUIRE_MESSAGE(status.state == TicketState::kDone, status.failure.error.text);
                CHECK(status.bytes_done == total);
                CHECK(std::ranges::count(status.slices, SliceState::kDone) == static_cast<long>(n));
                REQUIRE(filed.engine->release(ticket).ok());
            }
            REQUIRE(mine.bytes() == a);
            REQUIRE(content(folder.file()) == model);
        }
    });
}

TEST_CASE("files: what lies outside is refused, slice by slice") {
    each_way([](const EngineOptions& options) {
        Random random(402);
        Folder folder;
        constexpr size_t kSize = kFileMiB + 100;
        std::vector<std::byte> before = random_bytes(random, kSize);
        store(folder.file(), before);
        Filed filed(options, folder.file());
        Memory mine(*filed.engine, kFileMiB, MemoryKind::kHost);
        mine.fill(random);
        uint64_t a = mine.address();
        for (const Slice& slice :
             {Slice{a, kSize - 15, 16, Direction::kWrite}, Slice{a, kSize, 1, Direction::kRead},
              Slice{a, UINT64_MAX - 3, 8, Direction::kRead}, Slice{a, 4096, kFileMiB, Direction::kRead}}) {
            Result<uint64_t> moved = filed.transfer({slice});
            REQUIRE_FALSE(moved.ok());
            CHECK(moved.error().code == Code::kInvalidArgument);
            says(moved.error(), "does not lie in the file, which has 1048676 bytes");
            says(moved.error(), "the transfer with the file " + folder.file());
        }
        CHECK(content(folder.file()) == before);
        std::vector<Slice> mixed;
        for (size_t i = 0; i < 900; ++i) {
            mixed.push_back({a + i * 1000, (i % 7 == 3 ? kSize : 0) + i * 1000, 1000, Direction::kWrite});
        }
        TicketStatus status;
        REQUIRE_FALSE(filed.transfer(mixed, &status).ok());
        uint64_t done = 0;
        std::vector<std::byte> model = before;
        for (size_t i = 0; i < mixed.size(); ++i) {
            REQUIRE(status.slices[i] == (i % 7 == 3 ? SliceState::kFailed : SliceState::kDone));
            if (i % 7 == 3) continue;
            std::memcpy(&model[i * 1000], mine.data() + i * 1000, 1000);
            done += 1000;
        }
        CHECK(status.bytes_done == done);
        CHECK(content(folder.file()) == model);
        Result<uint64_t> unregistered = filed.transfer({{1 << 20, 0, 16, Direction::kRead}});
        REQUIRE_FALSE(unregistered.ok());
        CHECK(unregistered.error().code == Code::kInvalidArgument);
    });
}

TEST_CASE("files: a path that is none, a size, and what a segment says of itself") {
    Folder folder;
    std::shared_ptr<Engine> engine = make_engine(file_options("auto"));
    auto refused = [&](const Result<uint32_t>& opened, Code code, const char* why) {
        REQUIRE_FALSE(opened.ok());
        CHECK(opened.error().code == code);
        says(opened.error(), why);
    };
    refused(engine->open_file(""), Code::kInvalidArgument, "neither empty");
    refused(engine->open_file(folder.file()), Code::kInvalidArgument, "give a size to make it");
    refused(engine->open_file(folder.file("")), Code::kInvalidArgument, "neither a file nor a block device");
    refused(engine->open("file://host/path"), Code::kInvalidArgument, "file:///PATH");
    REQUIRE(::mkfifo(folder.file("fifo").c_str(), 0600) == 0);
    refused(engine->open_file(folder.file("fifo")), Code::kInvalidArgument, "neither a file nor");
    refused(engine->open_file(folder.file(), {.writable = false, .bytes = 10}), Code::kInvalidArgument,
            "size");
    refused(engine->open_file(folder.file(), {.writable = true, .bytes = UINT64_MAX}), Code::kInvalidArgument,
            "no file has");

    uint32_t segment = *engine->open_file(folder.file(), {.writable = true, .bytes = 10000});
    SegmentInfo info = *engine->segment(segment);
    CHECK(info.name == folder.file());
    CHECK(info.address == "file://" + folder.file());
    REQUIRE(info.regions.size() == 1);
    CHECK(info.regions[0].address == 0);
    CHECK(info.regions[0].length == 10000);
    CHECK(info.regions[0].kind == MemoryKind::kFile);
    CHECK(info.regions[0].transport == "file");
    CHECK(content(folder.file()) == std::vector<std::byte>(10000));
    // Shorter than it is: it stays as it is. And by its URL.
    CHECK(engine->segment(*engine->open_file(folder.file(), {.writable = true, .bytes = 5}))
              .value()
              .regions[0]
              .length == 10000);
    CHECK(engine->segment(*engine->open("file://" + folder.file())).value().regions[0].length == 10000);
    // It grew; a refresh knows.
    fs::resize_file(folder.file(), 20000);
    Memory mine(*engine, 4096, MemoryKind::kHost);
    TransferRequest request;
    request.segments = {&segment, 1};
    Slice late{mine.address(), 15000, 4096, Direction::kRead};
    request.slices = {&late, 1};
    CHECK_FALSE(engine->transfer(request).ok());
    CHECK(engine->segment(segment).value().regions[0].length == 20000);
    CHECK(engine->transfer(request).ok());
    // Nothing is moved for a message that nothing can read.
    late.direction = Direction::kWrite;
    request.notify = "there";
    refused(Result<uint32_t>(engine->transfer(request).error()), Code::kInvalidArgument, "takes no message");
    refused(Result<uint32_t>(engine->submit(request).error()), Code::kInvalidArgument, "takes no message");
    CHECK_FALSE(engine->notify(segment, "there").ok());
    CHECK(metric(*engine, "file_write_slices_total") == 0);
    REQUIRE(engine->close_segment(segment).ok());
    CHECK_FALSE(engine->transfer(request).ok());
    // Only peers.
    refused(make_engine(engine_options("other", "tcp"))->open_file(folder.file()), Code::kUnavailable,
            "not among the transports");
}

TEST_CASE("files: a file that may not be written is read, and each write says why not") {
    Folder folder;
    std::vector<std::byte> program(8192, std::byte{7});
    store(folder.file(), program);
    Filed filed(file_options("auto"), folder.file(), {.writable = false, .bytes = {}});
    Memory mine(*filed.engine, 8192, MemoryKind::kHost);
    TicketStatus status;
    uint64_t a = mine.address();
    Result<uint64_t> moved =
        filed.transfer({{a, 0, 4096, Direction::kRead}, {a + 4096, 4096, 4096, Direction::kWrite}}, &status);
    REQUIRE_FALSE(moved.ok());
    says(moved.error(), "cannot be written: it was opened for reading only");
    CHECK(status.slices == std::vector{SliceState::kDone, SliceState::kFailed});
    CHECK(mine.data()[0] == std::byte{7});
    // This program, which runs: no user may write it.
    uint32_t own = *filed.engine->open_file("/proc/self/exe");
    TransferRequest request;
    request.segments = {&own, 1};
    Slice slice{a, 0, 16, Direction::kWrite};
    request.slices = {&slice, 1};
    Result<uint64_t> written = filed.engine->transfer(request);
    REQUIRE_FALSE(written.ok());
    says(written.error(), "cannot be written: Text file busy");
    slice.direction = Direction::kRead;
    REQUIRE(filed.engine->transfer(request).ok());
    CHECK(std::memcmp(mine.data(),
                      "\x7f"
                      "ELF",
                      4) == 0);
}

TEST_CASE("files: a file that is cut short under its transfers fails the slices that need the rest") {
    each_way([](const EngineOptions& options) {
        Random random(403);
        Folder folder;
        std::vector<std::byte> bytes = random_bytes(random, 4 * kFileMiB);
        store(folder.file(), bytes);
        Filed filed(options, folder.file());
        Memory mine(*filed.engine, 4 * kFileMiB + 4096, MemoryKind::kHostArena);
        fs::resize_file(folder.file(), kFileMiB + 100);
        std::vector<Slice> slices;
        for (size_t i = 0; i < 8; ++i) {
            slices.push_back(
                {mine.address() + i * kFileMiB / 2, i * kFileMiB / 2, kFileMiB / 2, Direction::kRead});
        }
        slices.push_back(
            {mine.address() + 4 * kFileMiB, kFileMiB + 50, 50, Direction::kRead});  // up to its end
        TicketStatus status;
        Result<uint64_t> moved = filed.transfer(slices, &status);
        REQUIRE_FALSE(moved.ok());
        CHECK(moved.error().code == Code::kInvalidArgument);
        says(moved.error(), "the file was cut short, to 1048676 bytes");
        for (size_t i = 0; i < 8; ++i)
            CHECK(status.slices[i] == (i < 2 ? SliceState::kDone : SliceState::kFailed));
        CHECK(status.slices[8] == SliceState::kDone);
        CHECK(status.bytes_done == kFileMiB + 50);
        CHECK(std::memcmp(mine.data(), bytes.data(), kFileMiB) == 0);
        CHECK(std::memcmp(mine.data() + 4 * kFileMiB, bytes.data() + kFileMiB + 50, 50) == 0);
        for (int round = 0; round < 6; ++round) {  // in the middle of them
            fs::resize_file(folder.file(), 4 * kFileMiB);
            (void)*filed.engine->segment(filed.segment);
            std::thread cutter([&] { fs::resize_file(folder.file(), random.below(4 * kFileMiB)); });
            (void)filed.transfer(slices, &status);
            cutter.join();
            for (SliceState state : status.slices) CHECK(state != SliceState::kWaiting);
        }
    });
}

TEST_CASE("files: what the disk refuses fails the slices it refuses, with its reason") {
    struct Fault {
        int error;
        Code code;
        const char* text;
    };
    for (const Fault& fault :
         {Fault{ENOSPC, Code::kOs, "the disk is full"}, Fault{EIO, Code::kUnavailable, "Input/output error"},
          Fault{ENODEV, Code::kUnavailable, "No such device"}}) {
        CAPTURE(fault.text);
        auto disk = ssd::testing::fake_disk();
        disk->image.resize(kFileMiB);
        EngineOptions options = file_options("threads");
        options.open_file = fake(disk);
        Filed filed(options, "disk");
        Memory mine(*filed.engine, kFileMiB, MemoryKind::kHostArena);
        disk->fail([&](bool, uint64_t offset, size_t) { return offset >= kFileMiB / 2 ? fault.error : 0; });
        for (Direction direction : {Direction::kWrite, Direction::kRead}) {
            std::vector<Slice> slices;
            for (size_t i = 0; i < 64; ++i) {
                slices.push_back({mine.address() + i * 16384, i * 16384, 16384, direction});
            }
            TicketStatus status;
            Result<uint64_t> moved = filed.transfer(slices, &status);
            REQUIRE_FALSE(moved.ok());
            CHECK(moved.error().code == fault.code);
            says(moved.error(), fault.text);
            says(moved.error(), "16384 bytes at ");
            for (size_t i = 0; i < 64; ++i) {
                CHECK(status.slices[i] == (i < 32 ? SliceState::kDone : SliceState::kFailed));
            }
            CHECK(status.bytes_done == kFileMiB / 2);
        }
    }
}

TEST_CASE("files: a file that may not grow refuses what would make it longer") {
    each_way([](const EngineOptions& options) {
        if (options.file_io == "io_uring") return;  // the signal would be for a thread of the kernel
        Folder folder;
        store(folder.file(), std::vector<std::byte>(65536));
        Filed filed(options, folder.file());
        Memory mine(*filed.engine, 65536, MemoryKind::kHostArena);
        fs::resize_file(folder.file(), 4096);
        rlimit before{};
        REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
        auto* handler = std::signal(SIGXFSZ, SIG_IGN);
        rlimit tight{16384, before.rlim_max};
        REQUIRE(::setrlimit(RLIMIT_FSIZE, &tight) == 0);
        TicketStatus status;
        Result<uint64_t> moved = filed.transfer({{mine.address(), 0, 16384, Direction::kWrite},
                                                 {mine.address() + 32768, 32768, 16384, Direction::kWrite}},
                                                &status);
        ::setrlimit(RLIMIT_FSIZE, &before);
        std::signal(SIGXFSZ, handler);
        REQUIRE_FALSE(moved.ok());
        says(moved.error(), "may not become that long");
        CHECK(status.slices == std::vector{SliceState::kDone, SliceState::kFailed});
    });
}

TEST_CASE("files: a disk that hangs costs its transfers their deadline, other files nothing") {
    auto hung = ssd::testing::fake_disk(), well = ssd::testing::fake_disk();
    hung->image.resize(8 * kFileMiB);
    well->image.resize(kFileMiB);
    EngineOptions options = file_options("threads", 300);
    options.open_file = [&](const std::string& path, const io::OpenOptions& how) {
        return fake(path == "hung" ? hung : well)(path, how);
    };
    Filed filed(options, "hung");
    uint32_t other = *filed.engine->open_file("well");
    std::vector<std::byte> memory(8 * kFileMiB + 512);
    uint64_t a = (reinterpret_cast<uint64_t>(memory.data()) + 511) / 512 * 512;  // no buffer is needed
    REQUIRE(filed.engine->register_region(a, 8 * kFileMiB, "").ok());
    hung->hold(true);
    std::vector<Slice> slices;
    for (size_t i = 0; i < 32; ++i) slices.push_back({a + i * 131072, i * 131072, 131072, Direction::kRead});
    for (bool submitted : {false, true}) {
        TicketStatus status;
        if (submitted) {
            uint64_t ticket = *filed.engine->submit(filed.request(slices));
            REQUIRE(*filed.engine->wait(ticket, 10000));
            status = *filed.engine->status(ticket);
            REQUIRE(filed.engine->release(ticket).ok());
        } else {
            REQUIRE_FALSE(filed.transfer(slices, &status).ok());
        }
        CHECK(status.state == TicketState::kFailed);
        CHECK(status.failure.error.code == Code::kTimeout);
        says(status.failure.error, "the disk does not answer");
        for (SliceState state : status.slices) CHECK(state == SliceState::kFailed);
        TransferRequest request;
        request.segments = {&other, 1};
        Slice slice{a + 6 * kFileMiB, 0, kFileMiB, Direction::kRead};
        request.slices = {&slice, 1};
        Result<uint64_t> moved = filed.engine->transfer(request);
        CHECK_MESSAGE(moved.ok(), (moved.ok() ? "" : moved.error().text));
    }
    // The disk may still write to the memory: it is not free.
    Status freed = filed.engine->deregister_region(a);
    REQUIRE_FALSE(freed.ok());
    CHECK(freed.error().code == Code::kTimeout);
    hung->release();
    CHECK(filed.engine->deregister_region(a).ok());
    // close() returns while requests are under way, and again when they have ended.
    hung->hold(true);
    Memory mine(*filed.engine, 65536, MemoryKind::kHostArena);
    CHECK_FALSE(filed.transfer({{mine.address(), 0, 65536, Direction::kRead}}).ok());
    (void)filed.engine->close();
    hung->release();
}

TEST_CASE("files: cancelled, closed and dropped at any time") {
    each_way([](const EngineOptions& options) {
        Random random(404);
        Folder folder;
        store(folder.file(), random_bytes(random, 4 * kFileMiB));
        for (int round = 0; round < 4; ++round) {
            Filed filed(options, folder.file());
            Memory mine(*filed.engine, 4 * kFileMiB, MemoryKind::kHostArena);
            std::vector<uint64_t> tickets;
            for (size_t t = 0; t < 4; ++t) {
                std::vector<Slice> slices;
                for (size_t i = t * 256; i < (t + 1) * 256; ++i) {
                    slices.push_back({mine.address() + i * 4096, i * 4096, 4096,
                                      random.one_in(2) ? Direction::kRead : Direction::kWrite});
                }
                tickets.push_back(*filed.engine->submit(filed.request(slices)));
            }
            for (size_t i = 0; i < tickets.size(); ++i) {
                if (i % 2 == 0) REQUIRE(filed.engine->cancel(tickets[i]).ok());
            }
            if (round % 4 == 1) REQUIRE(filed.engine->close_segment(filed.segment).ok());
            if (round % 4 == 2) {
                CHECK(filed.engine->close().ok());
                continue;
            }
            for (uint64_t ticket : tickets) {
                REQUIRE(*filed.engine->wait(ticket, 10000));
                TicketStatus status = *filed.engine->status(ticket);
                CHECK(status.state != TicketState::kWaiting);
                for (SliceState state : status.slices) CHECK(state != SliceState::kWaiting);
                bool whole = std::ranges::count(status.slices, SliceState::kDone) == 256;
                CHECK(whole == (status.state == TicketState::kDone));
                REQUIRE(filed.engine->release(ticket).ok());
            }
        }
    });
}

TEST_CASE("files: many threads at once, each with its own ranges") {
    each_way([](const EngineOptions& options) {
        Folder folder;
        constexpr size_t kEach = 300001, kThreads = 4;  // borders within blocks
        store(folder.file(), std::vector<std::byte>(kEach * kThreads));
        Filed filed(options, folder.file());
        std::vector<std::thread> threads;
        std::atomic<int> wrong{0};
        for (size_t t = 0; t < kThreads; ++t) {
            threads.emplace_back([&, t] {
                Random random(405 + t);
                std::vector<std::byte> memory(2 * kEach);
                uint64_t a = reinterpret_cast<uint64_t>(memory.data());
                if (!filed.engine->register_region(a, 2 * kEach, "")) ++wrong;
                for (int round = 0; round < 8; ++round) {
                    size_t size = random.between(1, kEach), at = random.below(kEach - size + 1);
                    random.fill(memory.data(), size);
                    if (!filed.transfer({{a, t * kEach + at, size, Direction::kWrite}})) ++wrong;
                    if (!filed.transfer({{a + kEach, t * kEach + at, size, Direction::kRead}})) ++wrong;
                    if (std::memcmp(memory.data(), memory.data() + kEach, size) != 0) ++wrong;
                }
                if (!filed.engine->deregister_region(a)) ++wrong;
            });
        }
        for (std::thread& thread : threads) thread.join();
        CHECK(wrong == 0);
    });
}

TEST_CASE("files: the foreground goes before the background") {
    auto disk = ssd::testing::fake_disk();
    disk->image.resize(4 * kFileMiB);
    EngineOptions options = file_options("threads");
    options.open_file = fake(disk);
    Filed filed(options, "disk");
    Memory mine(*filed.engine, 4 * kFileMiB, MemoryKind::kHostArena);
    // A thread that has taken a request may stand still before it tells of it, and others go on meanwhile.
    constexpr int kHands = 16;
    std::atomic<int> behind{0}, foreground{0};
    disk->fail([&](bool, uint64_t offset, size_t) {
        if (offset < 2 * kFileMiB) {
            ++foreground;
        } else if (foreground < 200 - kHands) {
            ++behind;  // begun before the last foreground requests
        }
        return 0;
    });
    std::vector<Slice> back, front;
    for (size_t i = 0; i < 200; ++i) {
        back.push_back(
            {mine.address() + 2 * kFileMiB + i * 4096, 2 * kFileMiB + i * 4096, 4096, Direction::kRead});
        front.push_back({mine.address() + i * 4096, i * 4096, 4096, Direction::kRead});
    }
    disk->hold(true);
    TransferRequest request = filed.request(back);
    request.background = true;
    uint64_t first = *filed.engine->submit(request), second = *filed.engine->submit(filed.request(front));
    disk->release();
    REQUIRE(*filed.engine->wait(second, 10000));
    REQUIRE(*filed.engine->wait(first, 10000));
    CHECK(behind <= 32);  // of 200: those that were under way already, and those beside the last ones
    CHECK(filed.engine->status(first).value().state == TicketState::kDone);
    CHECK(filed.engine->status(second).value().state == TicketState::kDone);
}

TEST_CASE("files: where io_uring is forbidden, threads read and write") {
    Folder folder;
    store(folder.file(), std::vector<std::byte>(65536, std::byte{9}));
    std::thread sandbox([&] {  // the filter is of this thread and of those that it starts
        sock_filter filter[] = {
            BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
            BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        };
        sock_fprog program{4, filter};
        REQUIRE(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
        REQUIRE(::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
        {
            Filed filed(file_options("auto"), folder.file());
            Memory mine(*filed.engine, 65536, MemoryKind::kHost);
            Result<uint64_t> moved = filed.transfer({{mine.address(), 0, 65536, Direction::kRead}});
            REQUIRE(moved.ok());
            CHECK(mine.data()[65535] == std::byte{9});
        }
        Result<uint32_t> opened = make_engine(file_options("io_uring"))->open_file(folder.file());
        REQUIRE_FALSE(opened.ok());
        says(opened.error(), "forbids io_uring");
    });
    sandbox.join();
}

TEST_CASE("files: memory of a card goes through pinned memory") {
    each_way([](const EngineOptions& options) {
        Bed bed(Policy::kShuffled, 90);
        {
            Random random(406);
            Folder folder;
            constexpr size_t kSize = 5 * kFileMiB + 11;
            store(folder.file(), std::vector<std::byte>(kSize));
            Filed filed(options, folder.file());
            Memory mine(*filed.engine, kSize, MemoryKind::kDevice);
            mine.fill(random);
            std::vector<std::byte> sent = mine.bytes();
            REQUIRE(*filed.transfer({{mine.address(), 0, kSize, Direction::kWrite}}) == kSize);
            CHECK(content(folder.file()) == sent);
            std::memset(mine.data(), 0, kSize);
            REQUIRE(*filed.transfer({{mine.address() + 5, 1005, 3 * kFileMiB, Direction::kRead}}) ==
                    3 * kFileMiB);
            CHECK(std::memcmp(mine.data() + 5, sent.data() + 1005, 3 * kFileMiB) == 0);
            uint64_t ticket =
                *filed.engine->submit(filed.request({{mine.address(), 0, kSize, Direction::kRead}}));
            REQUIRE(*filed.engine->wait(ticket, 20000));
            CHECK(mine.bytes() == sent);
        }
        bed.end();
    });
}

TEST_CASE("files: memory of a card by GPUDirect Storage, and by pinned memory where that does not") {
    using transport::cufile::Library;
    auto why_not = [] {
        auto engine = make_engine(engine_options("asked", "cufile"));
        for (auto& [name, why] : engine->transports()) {
            if (name == "cufile") return why;
        }
        return std::string("no such transport");
    };
    Library::use_library_for_tests("libnowhere.so");
    CHECK(why_not().find("GPUDirect Storage is not installed") != std::string::npos);
    Library::use_library_for_tests("libc.so.6");
    CHECK(why_not().find("libc.so.6 lacks cuFile") != std::string::npos);
    Library::use_library_for_tests(soft_library());
    CHECK(why_not().empty());
    Random random(407);
    Bed bed(Policy::kShuffled, 91);
    {
        Folder folder;
        constexpr size_t kSize = 2 * kFileMiB;
        store(folder.file(), random_bytes(random, kSize));
        EngineOptions options = file_options("auto");
        options.transports = {"file", "cufile"};
        Filed filed(options, folder.file());
        if (!io::OpenedFile::open(folder.file(), {}).value()->direct()) {
            MESSAGE("not tested: no O_DIRECT in " << folder.file());
            bed.forget();
            return Library::use_library_for_tests("");
        }
        Memory mine(*filed.engine, kSize, MemoryKind::kDevice), host(*filed.engine, kSize, MemoryKind::kHost);
        mine.fill(random);
        host.fill(random);
        auto counted = [&](const char* name) { return metric(*filed.engine, name); };
        // Whole blocks straight, the edges of a write and memory of the host by the other way.
        std::vector<std::byte> model = content(folder.file());
        uint64_t a = mine.address(), h = host.address();
        std::vector<Slice> slices = {{a + 5, 0, 65536, Direction::kWrite},
                                     {a + 100000, 65536 + 100, 5000, Direction::kWrite},
                                     {h, 131072, 8192, Direction::kWrite}};
        for (size_t i = 0; i < 3; ++i) {
            const std::byte* from = i == 2 ? host.data() : mine.data() + (slices[i].local - a);
            std::memcpy(&model[slices[i].remote], from, slices[i].length);
        }
        Result<uint64_t> moved = filed.transfer(slices);
        REQUIRE_MESSAGE(moved.ok(), (moved.ok() ? "" : moved.error().text));
        CHECK(content(folder.file()) == model);
        CHECK(counted("cufile_write_bytes_total") == 65536);
        CHECK(counted("file_write_bytes_total") == 13192);
        auto reads_back = [&](uint64_t from, uint64_t bytes) {
            std::memset(mine.data(), 0, kSize);
            Result<uint64_t> read = filed.transfer({{a + 3, from, bytes, Direction::kRead}});
            REQUIRE_MESSAGE(read.ok(), (read.ok() ? "" : read.error().text));
            CHECK(std::memcmp(mine.data() + 3, &model[from], bytes) == 0);
            CHECK(mine.data()[3 + bytes] == std::byte{0});
        };
        reads_back(1234, kFileMiB);
        CHECK(counted("cufile_read_bytes_total") == kFileMiB);
        soft_device().soft_refuse("cuFileRead", 5011);
        reads_back(4321, kFileMiB);
        CHECK(counted("cufile_read_bytes_total") == kFileMiB);
        CHECK(counted("file_read_bytes_total") == kFileMiB);
        soft_device().soft_refuse("cuFileRead", 0);
        TicketStatus status;
        CHECK_FALSE(filed.transfer({{a, kSize - 4096, 8192, Direction::kRead}}, &status).ok());
        says(status.failure.error, "does not lie in the file");
        fs::resize_file(folder.file(), kFileMiB);
        CHECK_FALSE(filed.transfer({{a, kFileMiB - 4096, 8192, Direction::kRead}}, &status).ok());
        says(status.failure.error, "cut short");
    }
    {
        Folder folder;  // a file that it does not take
        store(folder.file(), std::vector<std::byte>(65536, std::byte{4}));
        soft_device().soft_refuse("cuFileHandleRegister", 5022);
        EngineOptions options = file_options("auto");
        options.transports = {"file", "cufile"};
        Filed filed(options, folder.file());
        Memory mine(*filed.engine, 65536, MemoryKind::kDevice);
        REQUIRE(filed.transfer({{mine.address(), 0, 65536, Direction::kRead}}).ok());
        CHECK(mine.data()[65535] == std::byte{4});
        CHECK(metric(*filed.engine, "file_read_bytes_total") == 65536);
        soft_device().soft_refuse("cuFileHandleRegister", 0);
    }
    bed.end();
    Library::use_library_for_tests("");
}
