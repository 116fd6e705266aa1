// Saves from a card while the pool does not answer: blocks are free when the ring has them, loads still find
// slots, and close() has an end. And a driver that refuses to say whether copies are over.
#include <doctest/doctest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "device_kv_bed.hpp"

using namespace moonpool;
using namespace moonpool::testing;

namespace {

// A node that takes connections and never answers. ~SilentNode ends them.
struct SilentNode {
    std::filesystem::path path =
        std::filesystem::temp_directory_path() / ("moonpool-silent-" + std::to_string(::getpid()) + ".sock");
    int listener = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    SilentNode() {
        std::filesystem::remove(path);
        sockaddr_un name{};
        name.sun_family = AF_UNIX;
        path.string().copy(name.sun_path, sizeof(name.sun_path) - 1);
        REQUIRE(::bind(listener, reinterpret_cast<const sockaddr*>(&name), sizeof(name)) == 0);
        REQUIRE(::listen(listener, 16) == 0);
    }
    ~SilentNode() {
        std::filesystem::remove(path);
        ::close(listener);
    }
    bool is_asked(std::chrono::milliseconds within) const {
        pollfd caller{listener, POLLIN, 0};
        return ::poll(&caller, 1, static_cast<int>(within.count())) == 1;
    }
    ClientOptions options() const {
        ClientOptions options;
        options.socket_path = path;
        options.token = "a token";
        options.timeout_ms = 60'000;
        return options;
    }
};

// A save of the first `count` objects of a cache.
struct Saving {
    Objects objects;
    std::vector<std::string_view> names;
    std::future<void> staged;
    std::future<Result<PutReport>> report;

    Saving(DeviceKv& kv, Client& client, const KvShape& shape, size_t count, Mark after)
        : objects(shape, 'w') {
        objects.names.resize(count * kNameBytes);
        objects.blocks.resize(count);
        objects.columns.resize(count);
        names = objects.views();
        auto all_staged = std::make_shared<std::promise<void>>();
        auto over = std::make_shared<std::promise<Result<PutReport>>>();
        staged = all_staged->get_future();
        report = over->get_future();
        kv.start_save(client, {names, {}, 0, objects.blocks, objects.columns, std::move(after)},
                      {.staged = [all_staged] { all_staged->set_value(); },
                       .ended = [over](Result<PutReport> result) { over->set_value(std::move(result)); }});
    }
    bool is_staged(std::chrono::milliseconds within) {
        return staged.wait_for(within) == std::future_status::ready;
    }
    bool is_over() { return report.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }
};

using namespace std::chrono_literals;

}  // namespace

TEST_CASE("device kv: the blocks of a save are free before the pool has answered, and loads find slots") {
    Node node;
    each_policy([&](Bed& bed) {
        Random random(90);
        Client client(node.options());
        REQUIRE(client.connect());
        Cache cache(bed);
        std::shared_ptr<DeviceKv> kv = cache.open(kSmall);
        Objects objects(kShape, 'v');
        cache.write(random);
        Mark computed = must(kv->mark(cache.stream()));
        must(save(*kv, client, objects, computed));
        std::vector<unsigned char> truth = cache.host.bytes();

        auto silent = std::make_unique<SilentNode>();
        Client unanswered(silent->options());
        // Chunks of one object; saves may hold 4 of the 8 slots, one of them by the put that waits.
        Saving small(*kv, unanswered, kShape, 3, computed);
        Saving next(*kv, unanswered, kShape, 1, computed);
        CHECK(small.is_staged(20s));
        CHECK(next.is_staged(20s));
        CHECK_FALSE(small.is_over());
        Saving large(*kv, unanswered, kShape, 8, computed);
        CHECK(all_ok(load(*kv, client, objects, kShape.heads, computed)));
        CHECK_FALSE(small.is_over());
        CHECK_FALSE(large.is_staged(0ms));
        CHECK(cache.read() == truth);
        silent.reset();
        CHECK(large.is_staged(20s));
        for (Saving* saving : {&small, &next, &large}) {
            auto report = must(saving->report.get());
            CHECK(report.refusal != "");
            for (PutOutcome outcome : report.outcomes) CHECK(outcome == PutOutcome::kRefused);
        }
        REQUIRE(client.remove(objects.views()));
    });
}

TEST_CASE("device kv: close() puts what is in the ring until its limit, and refuses the rest") {
    each_policy([&](Bed& bed) {
        Random random(91);
        Cache cache(bed);
        std::shared_ptr<DeviceKv> kv = cache.open(kSmall);
        cache.write(random);
        auto silent = std::make_unique<SilentNode>();
        Client unanswered(silent->options());
        Saving saving(*kv, unanswered, kShape, 4, must(kv->mark(cache.stream())));
        CHECK(saving.is_staged(20s));
        CHECK(silent->is_asked(20s));
        std::future<Status> closed = std::async(std::launch::async, [&] { return kv->close(0); });
        CHECK(closed.wait_for(50ms) == std::future_status::timeout);  // the put under way
        silent.reset();
        (void)closed.get();
        auto report = must(saving.report.get());
        CHECK(report.refusal == "the engine closed before its save was in the pool");
        for (PutOutcome outcome : report.outcomes) CHECK(outcome == PutOutcome::kRefused);
    });
}

TEST_CASE("device kv: a driver that never says whether copies are over ends what is under way") {
    Node node;
    if (is_real()) return;
    for (bool in_save : {true, false}) {
        for (std::string name : {"cuEventQuery", "cuEventRecord"}) {
            CAPTURE(in_save);
            CAPTURE(name);
            Bed bed(Policy::kLate);
            {
                Random random(92);
                Client client(node.options());
                REQUIRE(client.connect());
                Cache cache(bed);
                DeviceKvOptions options = kSmall;
                options.refused_ms = 100;
                std::shared_ptr<DeviceKv> kv = cache.open(options);
                Objects objects(kShape, 'r');
                cache.write(random);
                Mark computed = must(kv->mark(cache.stream()));
                must(save(*kv, client, objects, computed));
                constexpr int kNoHandle = 400;  // neither "lost" nor "not ready"
                soft_device().soft_refuse(name.c_str(), kNoHandle);
                if (in_save) {
                    auto report = must(save(*kv, client, objects, computed));
                    CHECK(report.refusal.find("does not say") != std::string::npos);
                } else {
                    LoadReport report = load(*kv, client, objects, kShape.heads, computed);
                    CHECK_FALSE(all_ok(report));
                    CHECK(report.error.find("does not say") != std::string::npos);
                }
                soft_device().soft_refuse(name.c_str(), 0);
                CHECK(kv->lost().find("does not say") != std::string::npos);
                CHECK(load(*kv, client, objects, kShape.heads, computed).error == kv->lost());
                CHECK_FALSE(save(*kv, client, objects, computed).ok());
                CHECK_FALSE(kv->close(1000).ok());
                REQUIRE(client.remove(objects.views()));
                soft_device().soft_settle();  // into memory that was kept
            }
            char text[200];
            CHECK_MESSAGE(soft_device().soft_violations(text, sizeof(text)) == 0, text);
            bed.forget();
        }
    }
}
