// What threads tell an operator, and whether a loop turns.
#include <doctest/doctest.h>

#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/journal.hpp"
#include "base/liveness_probe.hpp"

using namespace moonpool;

TEST_CASE("journal: a flood of one kind is cut, counted, and hides no other kind") {
    Journal journal;
    for (int i = 0; i < 1000; ++i) {
        journal.note(Level::kWarning, "auth_refused", "10.0.0.7:1", "wrong token " + std::to_string(i));
    }
    journal.note(Level::kInfo, "joined", "10.0.0.1:7700", "has joined");
    std::vector<Note> notes = journal.take();
    REQUIRE(notes.size() >= Journal::kBurst + 1);
    CHECK(notes.size() < 500);  // one a second more
    CHECK(notes.front().text == "wrong token 0");
    CHECK(notes.back().kind == "joined");
    CHECK(notes.back().left_out == 0);
    CHECK(journal.left_out_total() == 1001 - notes.size());
    CHECK(journal.take().empty());
}

TEST_CASE("journal: a peer's words are cut") {
    Journal journal;
    journal.note(Level::kInfo, "x", "", std::string(1 << 20, 'a'));
    CHECK(journal.take().front().text.size() == 1024);
}

TEST_CASE("probe: a loop that answers, one that does not, and what waits for it") {
    LivenessProbe probe;
    std::mutex mutex;
    std::vector<std::function<void()>> posted;
    auto post = [&] {
        std::lock_guard lock(mutex);
        posted.push_back([&] { probe.answer(); });
    };
    auto ago = LivenessProbe::Clock::now();
    CHECK(!probe.ask(post, ago));
    CHECK(!probe.ask(post, ago));
    CHECK(posted.size() == 1);  // a loop that is blocked for long collects no more
    for (auto& f : posted) f();
    posted.clear();
    std::thread turning([&] {
        for (int answered = 0; answered < 2;) {
            std::vector<std::function<void()>> due;
            {
                std::lock_guard lock(mutex);
                due.swap(posted);
            }
            for (auto& f : due) f();
            answered += static_cast<int>(due.size());
            std::this_thread::yield();
        }
    });
    auto later = [] { return LivenessProbe::Clock::now() + std::chrono::seconds(60); };
    CHECK(probe.ask(post, later()));
    CHECK(probe.ask(post, later()));
    turning.join();
}
