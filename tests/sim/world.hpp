// World: simulated time, the queue of events, and one stream of random numbers. Process: what runs in it, may
// stand still, end and start again, and has a clock of its own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace moonpool::sim {

using Micros = uint64_t;
inline constexpr Micros kMs = 1000, kSecond = 1000 * kMs;

class Random {
   public:
    explicit Random(uint64_t seed) : engine_(seed) {}

    uint64_t below(uint64_t n) { return engine_() % n; }
    uint64_t between(uint64_t low, uint64_t high) { return low + below(high - low + 1); }
    bool one_in(uint64_t n) { return n != 0 && below(n) == 0; }  // 0: never

   private:
    std::mt19937_64 engine_;
};

class Process;

class World {
   public:
    explicit World(uint64_t seed) : random(seed) {}

    Micros now() const { return now_; }
    // Runs f then. to: of that process and its present life: it is put off while the process stands still,
    // and dropped when that life has ended.
    void at(Micros when, Process* to, std::function<void()> f);
    void run_until(Micros end);
    uint64_t events() const { return sequence_; }

    Random random;

   private:
    struct Event {
        Micros at;
        uint64_t sequence;  // events of the same time run in the order in which they were made
        Process* to;
        uint64_t life;
        std::function<void()> run;
    };
    struct Later {
        bool operator()(const Event& a, const Event& b) const {
            return a.at != b.at ? a.at > b.at : a.sequence > b.sequence;
        }
    };

    Micros now_ = 0;
    uint64_t sequence_ = 0;
    std::vector<Event> heap_;
};

class Process {
   public:
    Process(World& world, std::string name, uint32_t host)
        : world_(world), name_(std::move(name)), host_(host) {}
    virtual ~Process() = default;
    Process(const Process&) = delete;

    const std::string& name() const { return name_; }
    uint32_t host() const { return host_; }
    uint64_t life() const { return life_; }
    bool running() const { return running_; }
    bool stopped() const { return stopped_; }
    // Or it was a while ago: what waited for it has just been carried out.
    bool was_stopped(Micros within) const {
        return stopped_ || (went_on_at_ && *went_on_at_ + within > world_.now());
    }

    // Its clock, which runs a little faster or slower than the world's, and may jump.
    uint64_t now_ms() const {
        return static_cast<uint64_t>(static_cast<double>(world_.now()) * rate_ / 1000) + offset_ms_;
    }
    void set_clock(double rate, uint64_t offset_ms) {
        rate_ = rate;
        offset_ms_ = offset_ms;
    }
    void jump_clock(uint64_t ms) { offset_ms_ += ms; }
    // The time of day, as its host has it.
    uint64_t unix_ms() const { return 1700000000000 + world_.now() / kMs + unix_offset_ms_; }
    void set_unix_offset(uint64_t ms) { unix_offset_ms_ = ms; }

    void start() {
        if (running_) return;
        running_ = true;
        ++life_;
        on_start();
    }
    void end() {
        if (!running_) return;
        on_end();
        running_ = stopped_ = false;
        ++life_;
        waiting_.clear();
    }
    void stop() { stopped_ = running_; }
    void go_on() {
        if (std::exchange(stopped_, false)) went_on_at_ = world_.now();
        for (auto& f : std::exchange(waiting_, {})) {
            if (running_) f();
        }
    }
    void later(Micros delay, std::function<void()> f) { world_.at(world_.now() + delay, this, std::move(f)); }

   protected:
    virtual void on_start() = 0;
    virtual void on_end() = 0;

    World& world_;

   private:
    friend class World;
    std::string name_;
    uint32_t host_;
    uint64_t life_ = 0;
    bool running_ = false, stopped_ = false;
    std::optional<Micros> went_on_at_{};
    double rate_ = 1;
    uint64_t offset_ms_ = 0, unix_offset_ms_ = 0;
    std::vector<std::function<void()>> waiting_;  // while it stands still
};

inline void World::at(Micros when, Process* to, std::function<void()> f) {
    heap_.push_back({when, sequence_++, to, to == nullptr ? 0 : to->life_, std::move(f)});
    std::push_heap(heap_.begin(), heap_.end(), Later());
}

inline void World::run_until(Micros end) {
    while (!heap_.empty() && heap_.front().at <= end) {
        std::pop_heap(heap_.begin(), heap_.end(), Later());
        Event event = std::move(heap_.back());
        heap_.pop_back();
        now_ = event.at;
        if (event.to != nullptr && event.to->life_ != event.life) continue;
        if (event.to != nullptr && event.to->stopped_) {
            event.to->waiting_.push_back(std::move(event.run));
        } else {
            event.run();
        }
    }
    now_ = end;
}

}  // namespace moonpool::sim
