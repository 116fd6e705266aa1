// What counts as progress of a transfer over TCP, against its deadline.
#include <doctest/doctest.h>
#include <sys/socket.h>

#include <array>
#include <vector>

#include "transport/tcp/run.hpp"

using namespace moonpool;
using namespace moonpool::transport;

TEST_CASE("tcp: a question in the buffers of a socket gives its transfer no more time, bytes of a write do") {
    for (Direction direction : {Direction::kRead, Direction::kWrite}) {
        CAPTURE(static_cast<int>(direction));
        int ends[2];
        REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
        Fd peer(ends[1]);  // which answers nothing
        tcp::Channel channel(Fd(ends[0]), nullptr, 1, "a line", tcp::kFrameBytes);
        TransportCounters moved;
        Counters counters;
        tcp::Queue queue(moved, counters);
        tcp::Run run(channel, queue, nullptr);

        RegionTable table;
        std::vector<std::byte> bytes(4096);
        auto address = reinterpret_cast<uint64_t>(bytes.data());
        std::array<Region*, 1> locals = {table.add(address, bytes.size(), "", {})->get()};
        std::array<Slice, 1> slices = {Slice{address, 4096, bytes.size(), direction}};
        std::array<std::atomic<SliceState>, 1> states{};
        std::atomic<bool> closing{false};
        auto job = std::make_shared<Job>();
        job->slices = slices;
        job->states = states;
        job->locals = locals;
        job->regions = table.all();
        job->closing = &closing;
        job->waiting = 1;
        job->progress_ns = 1;  // all of its time was spent on another path
        std::shared_ptr<tcp::Task> task = queue.add(job, nullptr, nullptr);
        REQUIRE(run.step() == tcp::Run::Step::kMoved);
        if (direction == Direction::kWrite) {
            CHECK(job->progress_ns > 1);
            CHECK(run.check(now_ns()));
            CHECK_FALSE(task->ended());
        } else {
            CHECK(job->progress_ns == 1);
            CHECK(run.check(now_ns()));
            CHECK(task->ended());
        }
        run.fail(Error{Code::kUnavailable, "the test is over"});
        queue.close();
        REQUIRE(task->ended());
    }
}
