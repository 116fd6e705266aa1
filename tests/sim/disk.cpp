#include "disk.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "ssd/record.hpp"
#include "ssd/set_block.hpp"

namespace moonpool::sim {

namespace {

constexpr uint64_t kPage = io::kBlockBytes, kSector = 512;

}  // namespace

class SimDisk::OpenedFile final : public ssd::File {
   public:
    explicit OpenedFile(SimDisk& disk) : disk_(disk), size_(disk.image_.size()) {}

    io::ReadResult read(uint64_t offset, std::byte* to, size_t bytes) override {
        if (!disk_.alive_ || offset + bytes > disk_.image_.size()) return {EIO};
        bool may_fail = offset >= ssd::kSegmentsBegin;
        if (may_fail && disk_.world_.random.below(10000) < disk_.faults_.fails) {
            disk_.failed_at_open_ = true;
            return {EIO};
        }
        std::memcpy(to, disk_.image_.data() + offset, bytes);
        return {0, bytes};
    }
    int write(uint64_t offset, const std::byte* from, size_t bytes) override {
        if (!disk_.alive_) return EIO;
        disk_.write(offset, {from, from + bytes});
        return 0;
    }
    int sync() override {
        if (!disk_.alive_) return EIO;
        disk_.sync(disk_.written_);
        return 0;
    }
    int reserve(uint64_t bytes) override {
        disk_.grow(bytes);
        return 0;
    }
    int lock() override { return 0; }
    uint64_t size() const override { return size_; }

   private:
    SimDisk& disk_;
    uint64_t size_;
};

class SimDisk::Queue final : public io::Queue {
   public:
    Queue(SimDisk& disk, std::function<void()> on_wake, OnSync on_sync)
        : disk_(disk), on_wake_(std::move(on_wake)), on_sync_(std::move(on_sync)) {
        disk_.queue_ = this;
    }
    ~Queue() override {
        disk_.queue_ = nullptr;
        disk_.in_flight_.clear();
    }

    void submit(const io::Operation& operation) override {
        if (!disk_.alive_) return done_.push_back({operation.tag, EIO, 0});
        disk_.submit(operation);
    }
    void reap(std::vector<io::Done>& done, int wait_ms) override {
        if (done_.empty() && wait_ms != 0 && !disk_.in_flight_.empty())
            disk_.end(disk_.in_flight_.begin()->first);
        done.insert(done.end(), done_.begin(), done_.end());
        done_.clear();
    }
    void wake() override { on_wake_(); }
    uint32_t depth() const override { return UINT32_MAX; }
    const char* name() const override { return "simulated"; }

    std::function<void()> on_sync() { return on_sync_(); }
    void ended(const io::Done& done) {
        done_.push_back(done);
        wake();
    }

   private:
    SimDisk& disk_;
    std::function<void()> on_wake_;
    OnSync on_sync_;
    std::vector<io::Done> done_;
};

ssd::OpenFile SimDisk::opener() {
    alive_ = true;
    failed_at_open_ = false;
    bool full = faults_.full != 0 && world_.random.below(100) < faults_.full;
    full_after_ = full ? written_ + world_.random.below(60) : UINT64_MAX;
    return [this](const std::string&) -> Result<std::unique_ptr<ssd::File>> {
        return std::unique_ptr<ssd::File>(std::make_unique<OpenedFile>(*this));
    };
}

std::unique_ptr<io::Queue> SimDisk::queue(std::function<void()> on_wake, OnSync on_sync) {
    return std::make_unique<Queue>(*this, std::move(on_wake), std::move(on_sync));
}

void SimDisk::submit(const io::Operation& operation) {
    InFlight each{operation, {}, written_, {}};
    using Kind = io::Operation::Kind;
    if (operation.kind == Kind::kWrite) each.bytes = {operation.data, operation.data + operation.bytes};
    if (operation.kind == Kind::kSync) each.synced = queue_->on_sync();
    Micros takes =
        operation.kind == Kind::kSync ? world_.random.between(100, 2000) : world_.random.between(30, 300);
    if (faults_.slow_ms != 0 && world_.random.one_in(4)) takes += world_.random.below(faults_.slow_ms * kMs);
    uint64_t id = begun_++;
    in_flight_.emplace(id, std::move(each));
    world_.at(world_.now() + takes, nullptr, [this, id] { end(id); });
}

void SimDisk::end(uint64_t id) {
    auto node = in_flight_.extract(id);
    if (node.empty()) return;
    const InFlight& each = node.mapped();
    int error = carry_out(each);
    queue_->ended({each.operation.tag, error, error == 0 ? each.operation.bytes : 0});
}

int SimDisk::carry_out(const InFlight& each) {
    const io::Operation& operation = each.operation;
    if (operation.kind == io::Operation::Kind::kSync) {
        sync(each.written);
        if (each.synced) each.synced();
        return 0;
    }
    bool fails = faults_.fails != 0 && world_.random.below(1000) < faults_.fails;
    if (operation.kind == io::Operation::Kind::kRead) {
        if (fails || operation.offset + operation.bytes > image_.size()) return EIO;
        std::memcpy(operation.data, image_.data() + operation.offset, operation.bytes);
        return 0;
    }
    if (written_ >= full_after_) return ENOSPC;
    if (!fails || world_.random.one_in(2)) write(operation.offset, each.bytes, fails);
    return fails ? EIO : 0;
}

void SimDisk::write(uint64_t offset, const std::vector<std::byte>& bytes, bool some_pages) {
    ++written_;
    grow(offset + bytes.size());
    for (size_t at = 0; at < bytes.size(); at += kPage) {
        if (some_pages && world_.random.one_in(2)) continue;
        const std::byte* from = bytes.data() + at;
        std::memcpy(image_.data() + offset + at, from, kPage);
        uint64_t page = (offset + at) / kPage;
        unsynced_[page].push_back({written_, {from, from + kPage}});
        if (is_early(page, from)) std::memcpy(safe_.data() + page * kPage, from, kPage);
    }
}

void SimDisk::sync(uint64_t written) {
    if (planted_.tail_early || planted_.applied_early) return;
    for (auto it = unsynced_.begin(); it != unsynced_.end();) {
        std::vector<Version>& versions = it->second;
        auto end = std::ranges::find_if(versions, [&](const Version& v) { return v.number > written; });
        if (end != versions.begin())
            std::memcpy(safe_.data() + it->first * kPage, std::prev(end)->bytes.data(), kPage);
        versions.erase(versions.begin(), end);
        it = versions.empty() ? unsynced_.erase(it) : std::next(it);
    }
}

// What a mistake puts on the disk before what it vouches for is safe.
bool SimDisk::is_early(uint64_t page, const std::byte* bytes) const {
    const bool in_area = page * kPage < ssd::kSegmentsBegin;
    if (planted_.applied_early) return in_area;
    if (!planted_.tail_early || in_area) return planted_.tail_early;
    constexpr size_t kKindAt = 42;  // docs/ssd.md
    return std::memcmp(bytes, "M_SSDSEG", 8) == 0 ||
           (std::memcmp(bytes, "MPR1", 4) == 0 && bytes[kKindAt] == std::byte{2});
}

void SimDisk::cut_off(bool power_failed) {
    for (auto& [id, each] : std::exchange(in_flight_, {})) {
        const bool writes = each.operation.kind == io::Operation::Kind::kWrite;
        uint64_t fate = writes ? world_.random.below(3) : 0;
        if (fate != 0) write(each.operation.offset, each.bytes, fate == 1);
        queue_->ended({each.operation.tag, EIO, 0});  // its log waits for all while it closes
    }
    alive_ = false;
    if (power_failed && faults_.torn) lose_unsynced();
}

void SimDisk::lose_unsynced() {
    for (auto& [page, versions] : unsynced_) {
        uint64_t which = world_.random.below(versions.size() + 1);
        if (which == versions.size()) continue;
        std::byte* to = safe_.data() + page * kPage;
        const bool torn = world_.random.one_in(4);
        for (uint64_t at = 0; at < kPage; at += kSector) {
            if (!torn || world_.random.one_in(2))
                std::memcpy(to + at, versions[which].bytes.data() + at, kSector);
        }
    }
    unsynced_.clear();
    image_ = safe_;
}

void SimDisk::grow(uint64_t bytes) {
    if (image_.size() >= bytes) return;
    image_.resize(bytes);
    safe_.resize(bytes);
}

}  // namespace moonpool::sim
