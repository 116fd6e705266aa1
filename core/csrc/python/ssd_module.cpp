// _native.SsdLog: the log of one directory, for its benchmark and for an operator that looks into one. Calls
// wait for the disk; the node uses the log without Python.

#include <pybind11/stl.h>

#include <chrono>

#include "base/crc32c.hpp"
#include "base/mutex.hpp"
#include "python/arguments.hpp"
#include "python/module.hpp"
#include "python/raise.hpp"
#include "ssd/log.hpp"
#include "store/shared/space.hpp"

namespace moonpool::python {

namespace {

// Many calls of the log whose ends are awaited together.
class Gather {
   public:
    explicit Gather(size_t n) : outcomes_(n, ssd::Outcome::kRefused) {}

    ssd::Done begin(size_t at) {
        MutexLock lock(mutex_);
        ++open_;
        return [this, at](ssd::Outcome outcome) {
            MutexLock lock(mutex_);
            outcomes_[at] = outcome;
            --open_;
            changed_.notify_all();
        };
    }
    void not_begun() {
        MutexLock lock(mutex_);
        --open_;
    }
    void wait_until_open_at_most(size_t n) {
        MutexLock lock(mutex_);
        changed_.wait(lock, [&]() REQUIRES(mutex_) { return open_ <= n; });
    }
    size_t done() const {
        size_t n = 0;
        for (ssd::Outcome outcome : outcomes_) n += outcome == ssd::Outcome::kDone;
        return n;
    }
    const std::vector<ssd::Outcome>& outcomes() const { return outcomes_; }

   private:
    Mutex mutex_;
    CondVar changed_;
    std::vector<ssd::Outcome> outcomes_;
    size_t open_ GUARDED_BY(mutex_) = 0;
};

class PySsdLog {
   public:
    PySsdLog(std::string directory, uint64_t bytes, uint64_t segment_bytes, uint32_t depth, std::string io) {
        ssd::LogOptions options;
        options.directory = std::move(directory);
        options.bytes = bytes;
        options.segment_bytes = segment_bytes;
        options.depth = depth;
        options.io = std::move(io);
        options.queue_max = 4 * depth;
        depth_ = depth;
        py::gil_scoped_release nogil;
        Result<std::unique_ptr<ssd::Log>> log = ssd::Log::open(std::move(options));
        py::gil_scoped_acquire gil;
        log_ = unwrap(std::move(log), "ssd");
        space_ = log_->space(std::string("default") + '\0' + '\0');
    }

    // -> how many were written. At most depth I/Os are in flight, and as many objects again wait.
    size_t write(const std::vector<std::string>& names, const py::buffer& source, uint64_t each) {
        py::buffer_info info = source.request();
        std::span<const std::byte> bytes(static_cast<const std::byte*>(info.ptr),
                                         static_cast<size_t>(info.size * info.itemsize));
        check_size(bytes.size(), names.size(), each);
        py::gil_scoped_release nogil;
        Gather gather(names.size());
        for (size_t i = 0; i < names.size(); ++i) {
            gather.wait_until_open_at_most(2 * depth_ - 1);
            std::span<const std::byte> part = bytes.subspan(i * each, each);
            uint32_t crc = crc32c(0, part.data(), part.size());
            if (!log_->write(key(names[i]), "", {part}, crc, gather.begin(i))) gather.not_begun();
        }
        gather.wait_until_open_at_most(0);
        return gather.done();
    }

    size_t read(const std::vector<std::string>& names, const py::buffer& target, uint64_t each) {
        py::buffer_info info = target.request(true);
        std::span<std::byte> bytes(static_cast<std::byte*>(info.ptr),
                                   static_cast<size_t>(info.size * info.itemsize));
        check_size(bytes.size(), names.size(), each);
        py::gil_scoped_release nogil;
        Gather gather(names.size());
        for (size_t i = 0; i < names.size(); ++i) {
            gather.wait_until_open_at_most(2 * depth_ - 1);
            if (!log_->read(key(names[i]), bytes.subspan(i * each, each), gather.begin(i)))
                gather.not_begun();
        }
        gather.wait_until_open_at_most(0);
        return gather.done();
    }

    bool remove(const std::string& name) {
        py::gil_scoped_release nogil;
        return log_->remove(key(name));
    }

    bool sync() {
        py::gil_scoped_release nogil;
        Gather gather(1);
        log_->sync(gather.begin(0));
        gather.wait_until_open_at_most(0);
        return gather.done() == 1;
    }

    void close() {
        py::gil_scoped_release nogil;
        log_->close();
    }

    std::map<std::string, uint64_t> metrics() const {
        std::map<std::string, uint64_t> rows;
        for (auto& [name, value] : log_->counters()) rows.emplace(name, value);
        return rows;
    }
    std::string io() const { return log_->io_name(); }
    std::string io_reason() const { return log_->io_reason(); }
    bool check_integrity() const { return log_->check_integrity(); }

   private:
    ssd::Key key(std::string_view name) const { return ssd::Key{space_, hasher_(name), name}; }

    static void check_size(size_t bytes, size_t n, uint64_t each) {
        if (each == 0 || n > bytes / each)
            throw py::value_error("the buffer is shorter than all objects together");
    }

    std::unique_ptr<ssd::Log> log_;
    uint32_t depth_ = 1;
    uint32_t space_ = 0;
    KeyHasher hasher_{"default", "", ""};
};

}  // namespace

void bind_ssd(py::module_& m) {
    py::class_<PySsdLog>(m, "SsdLog")
        .def(py::init<std::string, uint64_t, uint64_t, uint32_t, std::string>(), py::arg("directory"),
             py::arg("bytes"), py::kw_only(), py::arg("segment_bytes") = 0, py::arg("depth") = 32,
             py::arg("io") = "auto")
        .def("write", &PySsdLog::write, py::arg("names"), py::arg("source"), py::arg("each"))
        .def("read", &PySsdLog::read, py::arg("names"), py::arg("target"), py::arg("each"))
        .def("remove", &PySsdLog::remove, py::arg("name"))
        .def("sync", &PySsdLog::sync)
        .def("close", &PySsdLog::close)
        .def("metrics", &PySsdLog::metrics)
        .def_property_readonly("io", &PySsdLog::io)
        .def_property_readonly("io_reason", &PySsdLog::io_reason)
        .def("check_integrity", &PySsdLog::check_integrity);
}

}  // namespace moonpool::python
