// Log::Parts: what runs a Log. One thread owns all but `state`; callers reach it by the inboxes of the state,
// and no thread holds the state's mutex during I/O.
//
//   callers --state.write_inbox--> SegmentWriter --.
//   callers --state.read_inbox---> RecordReader  --+--> LogIo --> file
//                 Reclaimer, by both of them ------'
#pragma once

#include "base/fork.hpp"
#include "base/service_thread.hpp"
#include "ssd/log_io.hpp"
#include "ssd/log_state.hpp"
#include "ssd/reclaimer.hpp"
#include "ssd/record_reader.hpp"
#include "ssd/recovery.hpp"
#include "ssd/segment_writer.hpp"
#include "ssd/segments.hpp"
#include "ssd/set_block.hpp"

namespace moonpool::ssd {

struct Log::Parts {
    Parts(LogOptions options, std::unique_ptr<File> file, const Superblock& superblock)
        : state(std::move(options), superblock), io(state, std::move(file)) {
        writer.set_make_room([this] { return reclaimer.free_one_at_once(); });
    }
    ~Parts();
    Parts(const Parts&) = delete;

    Status start();  // recovers what is on the disk, and starts the thread
    void close();

    // On the thread, or the stepping caller's.
    void run();
    std::optional<int> turn();  // -> for how many ms it may wait for I/O then; none: the log is closed
    void step(bool wait);
    bool take_inbox();  // -> whether the log is closing
    bool finished();
    void tell_gone();
    void write_area();

    LogState state;
    LogIo io;
    SegmentTable segments{state};
    RecordReader reader{state, io};
    SegmentWriter writer{state, io, segments};
    Reclaimer reclaimer{state, io, segments, reader, writer};
    Recovery recovery;  // written before the thread starts, as is `direct`
    bool direct = true;
    std::vector<std::byte> area;
    ForkGuard fork;
    ServiceThread thread;
};

}  // namespace moonpool::ssd
