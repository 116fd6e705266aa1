// Files that give and take less than they were asked for, as the kernel may: an operation has all of its
// bytes all the same, or tells how many there were.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include "../random.hpp"
#include "io/queue.hpp"

using namespace moonpool;
using moonpool::testing::Random;

namespace {

using Kind = io::Operation::Kind;

struct Pipe {
    std::unique_ptr<io::File> from, to;  // as files of which a ring knows the descriptor
    Fd write_end, read_end;              // the other end of each
    explicit Pipe(bool direct = false) {
        int ends[2];
        REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
        from = io::file_of(Fd(ends[0]), direct, 0);
        write_end.reset(ends[1]);
        REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
        to = io::file_of(Fd(ends[1]), direct, 0);
        read_end.reset(ends[0]);
    }
};

std::unique_ptr<io::Queue> ring() {
    Result<std::unique_ptr<io::Queue>> made = io::ring_queue(8);
    if (!made) MESSAGE("not tested: " << made.error().text);
    return made ? std::move(*made) : nullptr;
}

std::vector<std::byte> random_bytes(size_t n) {
    Random random(1700);
    std::vector<std::byte> bytes(n);
    for (std::byte& byte : bytes) byte = std::byte(random.below(256));
    return bytes;
}

// Until an operation has ended, with `meanwhile` before each look; an empty one: none did.
std::vector<io::Done> done_of(
    io::Queue& queue, const std::function<void()>& meanwhile = [] {}) {
    std::vector<io::Done> done;
    for (int looks = 0; done.empty() && looks < 400; ++looks) {
        meanwhile();
        queue.reap(done, 50);
    }
    return done;
}

}  // namespace

TEST_CASE("short reads: what the kernel gives in parts is asked for until all of it is there") {
    std::unique_ptr<io::Queue> queue = ring();
    if (queue == nullptr) return;
    const std::vector<std::byte> sent = random_bytes(20000);
    for (size_t piece : {1, 7, 512, 1000, 19999}) {
        CAPTURE(piece);
        Pipe pipe;
        std::vector<std::byte> into(sent.size() + 64, std::byte{0xEE});
        size_t at = 0;
        auto give = [&] {
            // A few pieces of one byte, and the rest in one: it would take as many looks as bytes.
            size_t n = std::min(at < 50 * piece ? piece : sent.size(), sent.size() - at);
            if (n != 0) REQUIRE(::write(pipe.write_end.get(), &sent[at], n) == static_cast<ssize_t>(n));
            at += n;
        };
        give();  // less than is asked for is there
        queue->submit({Kind::kRead, pipe.from.get(), 0, into.data(), static_cast<uint32_t>(sent.size()), 5});
        std::vector<io::Done> early;
        queue->reap(early, 0);
        queue->reap(early, 10);
        CHECK(early.empty());
        std::vector<io::Done> done = done_of(*queue, give);
        REQUIRE(done.size() == 1);
        CHECK(done[0].tag == 5);
        CHECK(done[0].error == 0);
        CHECK(done[0].bytes == sent.size());
        CHECK(std::equal(sent.begin(), sent.end(), into.begin()));
        CHECK(std::all_of(into.begin() + static_cast<long>(sent.size()), into.end(),
                          [](std::byte byte) { return byte == std::byte{0xEE}; }));
    }
}

TEST_CASE("short reads: where nothing more comes the bytes that there were are told") {
    std::unique_ptr<io::Queue> queue = ring();
    if (queue == nullptr) return;
    const std::vector<std::byte> sent = random_bytes(3000);
    for (bool direct : {false, true}) {
        CAPTURE(direct);
        Pipe pipe(direct);
        std::vector<std::byte> into(8192);
        REQUIRE(::write(pipe.write_end.get(), sent.data(), 1024) == 1024);
        queue->submit({Kind::kRead, pipe.from.get(), 0, into.data(), 8192, 6});
        bool more = true;
        std::vector<io::Done> done = done_of(*queue, [&] {
            // Past the page cache a read that stops within a sector has come to the end, with the writer
            // there.
            if (std::exchange(more, false)) {
                REQUIRE(::write(pipe.write_end.get(), &sent[1024], 1976) == 1976);
                if (!direct) pipe.write_end.reset();
            }
        });
        REQUIRE(done.size() == 1);
        CHECK(done[0].error == io::kFileEnds);
        CHECK(done[0].bytes == 3000);
        CHECK(std::equal(sent.begin(), sent.end(), into.begin()));
    }
}

TEST_CASE("short writes: what the kernel takes in parts is given until all of it has gone") {
    std::unique_ptr<io::Queue> queue = ring();
    if (queue == nullptr) return;
    Pipe pipe;
    const std::vector<std::byte> sent = random_bytes(300000);  // a pipe has room for 64 KiB
    std::vector<std::byte> got(sent.size() + 1);
    std::vector<std::byte> from = sent;
    queue->submit({Kind::kWrite, pipe.to.get(), 0, from.data(), static_cast<uint32_t>(from.size()), 7});
    REQUIRE(::fcntl(pipe.read_end.get(), F_SETFL, O_NONBLOCK) == 0);
    size_t at = 0;
    auto take = [&] {
        ssize_t n = ::read(pipe.read_end.get(), &got[at], std::min<size_t>(30000, got.size() - at));
        at += static_cast<size_t>(std::max<ssize_t>(n, 0));
    };
    std::vector<io::Done> done = done_of(*queue, take);
    REQUIRE(done.size() == 1);
    CHECK(done[0].error == 0);
    for (size_t before = SIZE_MAX; before != at;) {
        before = at;
        take();
    }
    CHECK(at == sent.size());
    CHECK(std::equal(sent.begin(), sent.end(), got.begin()));
}

TEST_CASE("short reads: of a file that the kernel makes as it is read, by io_uring and by threads") {
    const std::string path = "/proc/kallsyms";  // some pages, of which a call gives one
    std::ifstream whole(path, std::ios::binary);
    std::string text{std::istreambuf_iterator<char>(whole), {}};
    constexpr size_t kBytes = 65536;
    Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    std::string once(kBytes, 0);
    ssize_t n = fd.valid() ? ::pread(fd.get(), once.data(), once.size(), 0) : 0;
    if (text.size() < 2 * kBytes || n <= 0 || n == static_cast<ssize_t>(kBytes)) {
        MESSAGE("not tested: " << path << " gives " << n << " bytes of " << text.size());
        return;
    }
    std::unique_ptr<io::File> file = io::file_of(std::move(fd), false, 0);
    for (bool by_ring : {true, false}) {
        CAPTURE(by_ring);
        std::unique_ptr<io::Queue> queue = by_ring ? ring() : std::move(*io::thread_queue(2));
        if (queue == nullptr) continue;
        std::string into(kBytes, 0);
        queue->submit({Kind::kRead, file.get(), 1000, reinterpret_cast<std::byte*>(into.data()), kBytes, 8});
        std::vector<io::Done> done = done_of(*queue);
        REQUIRE(done.size() == 1);
        CHECK(done[0].error == 0);
        CHECK(done[0].bytes == kBytes);
        CHECK(into == text.substr(1000, kBytes));
    }
}
