// A file of this host: its bytes go between the disk and registered memory.
#pragma once

#include <memory>
#include <string>

#include "transport/file/pump.hpp"
#include "transport/link.hpp"

namespace moonpool::transport::file {

class Link final : public transport::Link {
   public:
    Link(std::shared_ptr<Pump> pump, std::shared_ptr<io::OpenedFile> file, TransportCounters& counters)
        : pump_(std::move(pump)), served_(new Served{std::move(file), counters}) {}

    std::string path() const override { return "file " + served_->file->path(); }
    bool reaches(MemoryKind kind, std::string* why) const override;
    bool runs_on_caller(const Job&) const override { return false; }
    Status run(Job& job) override;
    bool post(const std::shared_ptr<Job>& job, const Finished& finished) override {
        pump_->post(job, served_, finished);
        return true;
    }
    void close() override { served_->closed = true; }

   private:
    std::shared_ptr<Pump> pump_;
    std::shared_ptr<Served> served_;
};

}  // namespace moonpool::transport::file
