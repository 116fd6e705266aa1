#include "state.hpp"

#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace moonpool::soft {

State& state() {
    static auto* kept = new State;
    return *kept;
}

ThreadState& this_thread() {
    static thread_local ThreadState kept;
    return kept;
}

bool Opened::owner_ended() const {
    pollfd asked{process, POLLIN, 0};
    return ::poll(&asked, 1, 0) == 1;
}

void CardMemory::unmap(uint64_t address) const {
    if (adopted != nullptr) {
        ::munmap(adopted, 4096);
    } else {
        ::munmap(hidden, mapped(bytes));
    }
    ::munmap(reinterpret_cast<void*>(address), bytes);
    if (fd >= 0) ::close(fd);
    if (opened != nullptr) ::close(opened->process);
}

void State::reset(Policy chosen, uint64_t seed) {
    settle();
    policy = chosen;
    random.seed(seed);
    cards = 1;
    first_card = owner_ended = 0;
    version = 12080;
    capability = 90;
    hidden_names.clear();
    card_limit = pinned_limit = UINT64_MAX;
    broken = 0;
    hang_in = die_in = 0;
    failures.clear();
    refusals.clear();
    calls.clear();
    violations = 0;
    first_violation.clear();
    for (auto& [address, memory] : card_memory) memory.unmap(address);
    for (Module* module : modules) delete module;
    for (Context& context : contexts) context.retained = 0;
    last_card = nullptr;
    card_memory.clear();
    host_memory.clear();
    modules.clear();
    streams.clear();
    events.clear();
    all_streams.clear();
    all_events.clear();
}

void State::violation(const std::string& what) {
    if (violations++ == 0) first_violation = what;
    broken = device::cu::kIllegalAddress;
}

const CardMemory* State::find_card(uint64_t address, uint64_t* base) const {
    // A kernel mostly stays in one allocation.
    if (last_card != nullptr && address - last_card->first < last_card->second.bytes) {
        *base = last_card->first;
        return &last_card->second;
    }
    auto after = card_memory.upper_bound(address);
    if (after == card_memory.begin()) return nullptr;
    --after;
    if (address - after->first >= after->second.bytes) return nullptr;
    last_card = &*after;
    *base = after->first;
    return &after->second;
}

const HostMemory* State::find_host(uint64_t address, uint64_t* base) const {
    auto after = host_memory.upper_bound(address);
    if (after == host_memory.begin()) return nullptr;
    --after;
    if (address - after->first >= after->second.bytes) return nullptr;
    *base = after->first;
    return &after->second;
}

uint64_t State::card_bytes() const {
    uint64_t sum = 0;
    for (auto& [address, memory] : card_memory) sum += memory.opened != nullptr ? 0 : memory.bytes;
    return sum;
}

uint64_t State::pinned_bytes() const {
    uint64_t sum = 0;
    for (auto& [address, memory] : host_memory) sum += memory.managed ? 0 : memory.bytes;
    return sum;
}

char* State::reach(uint64_t address, uint64_t bytes, bool write, int card) {
    uint64_t base = 0;
    const char* why = "memory that is neither a card's nor pinned";  // a string costs each access of a kernel
    if (const CardMemory* memory = find_card(address, &base)) {
        if (card >= 0 && memory->card != card) {
            why = "memory of another card";
        } else if (memory->opened != nullptr && memory->page().freed != 0) {
            why = "memory that its owner, another process, has freed";
        } else if (address - base + bytes > memory->bytes) {
            why = "bytes behind the end of an allocation";
        } else if (card >= 0 && owner_ended != 0 && memory->opened != nullptr &&
                   memory->opened->owner_ended()) {
            broken = owner_ended;  // as a copy under way is
            return nullptr;
        } else {
            return memory->hidden + (address - base);
        }
    } else if (const HostMemory* host = find_host(address, &base)) {
        if (address - base + bytes > host->bytes) {
            why = "bytes behind the end of pinned memory";
        } else if (write && host->read_only) {
            why = "memory that was registered read-only";
        } else {
            return reinterpret_cast<char*>(address);
        }
    }
    char text[160];
    std::snprintf(text, sizeof(text), "%s of %llu bytes at %#llx: %s", write ? "write" : "read",
                  static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(address), why);
    violation(text);
    return nullptr;
}

void State::queue(Stream* stream, Operation operation) {
    if (hang_in > 0 && --hang_in == 0) operation.hangs = true;
    std::shuffle(operation.steps.begin(), operation.steps.end(), random);
    stream->queue.push_back(std::move(operation));
    ++stream->given;
    if (policy == Policy::kAtOnce) demand(stream, stream->given);
}

bool State::runnable(Stream* stream) const {
    if (stream->queue.empty() || stream->queue.front().hangs) return false;
    const Operation& first = stream->queue.front();
    return first.waits_for == nullptr || first.waits_for->ended >= first.waits_place;
}

// Once a card is broken its operations end without effect.
void State::run_one(Stream* stream) {
    Operation operation = std::move(stream->queue.front());
    stream->queue.pop_front();
    if (die_in > 0 && --die_in == 0) broken = die_code;
    for (auto& step : operation.steps) {
        if (broken == 0) step();
    }
    ++stream->ended;
}

bool State::demand(Stream* stream, uint64_t place) {
    while (stream->ended < place) {
        const Operation& first = stream->queue.front();
        if (first.hangs) return false;
        if (!runnable(stream) && !demand(first.waits_for, first.waits_place)) return false;
        run_one(stream);
    }
    return true;
}

void State::settle() {
    for (bool ran = true; ran;) {
        ran = false;
        for (auto& stream : all_streams) {
            for (; runnable(stream.get()); ran = true) run_one(stream.get());
        }
    }
}

void State::some() {
    if (policy != Policy::kShuffled) return;
    for (uint64_t n = below(4); n > 0; --n) {
        std::vector<Stream*> ready;
        for (auto& stream : all_streams) {
            if (runnable(stream.get()) && below(64) < stream->haste) ready.push_back(stream.get());
        }
        if (ready.empty()) return;
        Stream* stream = ready[below(ready.size())];
        Operation& first = stream->queue.front();
        if (first.steps.size() < 2 || below(2) == 0) {
            run_one(stream);
        } else if (broken == 0) {  // a step of it alone
            auto step = std::move(first.steps.back());
            first.steps.pop_back();
            step();
        }
    }
}

}  // namespace moonpool::soft
