// A file of this host, and memory of cards: the disk and the card move bytes without this process's memory.
// What it leaves waiting goes through pinned memory by the next link, which also says what is wrong.
#pragma once

#include <memory>
#include <string>

#include "base/mutex.hpp"
#include "io/opened_file.hpp"
#include "transport/counters.hpp"
#include "transport/cufile/library.hpp"
#include "transport/link.hpp"

namespace moonpool::transport::cufile {

class Link final : public transport::Link {
   public:
    Link(const Library& library, std::shared_ptr<io::OpenedFile> file, TransportCounters& counters)
        : library_(library), file_(std::move(file)), counters_(counters) {}
    ~Link() override;

    std::string path() const override { return "cufile " + file_->path(); }
    bool reaches(MemoryKind kind, std::string* why) const override;
    bool copies_by_card() const override { return true; }
    bool is_for_cards() const override { return true; }
    bool runs_on_caller(const Job&) const override { return false; }
    Status run(Job& job) override;
    void close() override { closed_ = true; }

   private:
    Result<void*> handle();
    Status move(Job& job, const Slice& slice, Region& local, void* handle);

    const Library& library_;
    std::shared_ptr<io::OpenedFile> file_;
    TransportCounters& counters_;
    std::atomic<bool> closed_{false};
    Mutex mutex_;
    void* handle_ GUARDED_BY(mutex_) = nullptr;  // from the first slice of a card on
};

}  // namespace moonpool::transport::cufile
