// Two passes over the segments, each by up to 8 threads (one, where the log is stepped), and one thread
// between and behind them.
//
//   1. header and footer of each segment: two blocks
//      between: which segments count (numbers from the tail on)
//   2. the summary of each sealed segment; of one without a valid footer, all of it
//      behind: records that were removed, or lie in segments that do not count, leave the index
//
// Of two records of one hash the one of the higher version counts, then that of the higher sequence; of
// copies of one record that of the later segment. A segment that cannot be read hides removals, so that
// nothing older than the run of segments without a gap is believed (oldest_believed): content may be lost,
// but what was removed does not come back.
//
// Runs once, in Log::open, before the log's thread exists. It writes nothing but missing summaries; nothing
// depends on whether those writes arrive.
//
// The invariant that it restores: an object is in the index only when its record is whole in a segment that
// counts, no removal names its sequence, and no newer record has its key.
#include "ssd/recovery.hpp"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <unordered_set>

#include "base/crc32c.hpp"
#include "base/mutex.hpp"

namespace moonpool::ssd {

namespace {

constexpr uint64_t kReadBytes = 1u << 20;

struct FreeMemory {
    void operator()(std::byte* p) const { std::free(p); }
};
using Aligned = std::unique_ptr<std::byte[], FreeMemory>;

Aligned aligned(uint64_t bytes) {
    return Aligned(static_cast<std::byte*>(std::aligned_alloc(kBlockBytes, round_up_to_block(bytes))));
}

// The hash of a key is that of space identity and name, one after the other.
Hash128 hash_of(const Record& record) {
    std::string whole(record.space);
    whole.append(record.name);
    return xxh3_128(whole.data(), whole.size());
}

class Scanner {
   public:
    Scanner(File& file, const Superblock& superblock, uint32_t slots, Index& index, const SpaceOf& space,
            uint32_t threads)
        : file_(file),
          superblock_(superblock),
          slots_(slots),
          index_(index),
          space_(space),
          threads_(threads),
          headers_(slots),
          footers_(slots),
          numbers_(slots, 0),
          records_(slots, 0),
          lost_(slots, false) {}

    Recovery run(uint32_t records_max) {
        each_slot([this](uint32_t slot) { read_ends(slot); });
        choose_segments();
        each_slot([this](uint32_t slot) { read_records(slot); });
        MutexLock lock(mutex_);
        tell_twins_apart();
        floor_ = std::max(floor_, tail_);
        result_.tail_is_due = blind_ || oldest_believed() > floor_;
        floor_ = std::max(floor_, oldest_believed());
        forget_dead(records_max);
        index_.sort(numbers_);  // they came by the place of their segments, and by several threads
        for (uint32_t slot = 0; slot < slots_; ++slot) {
            if (lost_[slot]) ++result_.damaged;
            if (numbers_[slot] < floor_ || lost_[slot]) numbers_[slot] = 0;
        }
        result_.numbers = std::move(numbers_);
        // A segment without a readable header may have any of the next numbers.
        result_.next_number = newest_ + 1 + (blind_ ? slots_ : 0);
        result_.bytes_read = bytes_read_;
        return std::move(result_);
    }

   private:
    // A number comes twice when the write of a header failed and is on the disk all the same: that segment
    // has no records, and is free.
    void tell_twins_apart() REQUIRES(mutex_) {
        std::unordered_map<uint64_t, uint32_t> slots;
        for (uint32_t slot = 0; slot < slots_; ++slot) {
            if (numbers_[slot] == 0) continue;
            auto [it, first] = slots.try_emplace(numbers_[slot], slot);
            if (first) continue;
            uint32_t empty = records_[slot] == 0 ? slot : it->second;
            if (records_[empty] != 0) lost_[empty] = true;  // not of ours
            it->second = empty == slot ? it->second : slot;
            numbers_[empty] = 0;
        }
    }

    // Walks from the newest segment down as long as the numbers have no gap. A gap is a segment that was
    // lost, and its removals with it: what is older may have been removed there. A gap below the floor does
    // no harm, since nothing there counts.
    uint64_t oldest_believed() const REQUIRES(mutex_) {
        if (blind_) return newest_ + 1;
        std::vector<uint64_t> present;
        for (uint32_t slot = 0; slot < slots_; ++slot) {
            if (numbers_[slot] != 0 && !lost_[slot]) present.push_back(numbers_[slot]);
        }
        std::sort(present.rbegin(), present.rend());
        uint64_t expected = newest_;
        for (uint64_t number : present) {
            if (number != expected) break;
            --expected;
        }
        return expected + 1;
    }

    template <class F>
    // The threads take slots from one counter: segments differ in how long they take, by their being sealed
    // or not.
    void each_slot(F f) {
        std::atomic<uint32_t> next{0};
        auto work = [&] {
            for (uint32_t slot; (slot = next.fetch_add(1)) < slots_;) f(slot);
        };
        std::vector<std::thread> threads;
        for (uint32_t i = 1; i < std::min(threads_, slots_); ++i) threads.emplace_back(work);
        work();
        for (std::thread& thread : threads) thread.join();
    }

    uint64_t begin_of(uint32_t slot) const { return kSegmentsBegin + slot * superblock_.segment_bytes; }

    bool read(uint64_t offset, std::byte* to, uint64_t bytes) {
        while (bytes != 0) {
            uint64_t piece = std::min(bytes, kReadBytes);
            if (file_.read(offset, to, piece).error != 0) return false;
            bytes_read_ += piece;
            offset += piece;
            to += piece;
            bytes -= piece;
        }
        return true;
    }

    void read_ends(uint32_t slot) {
        Aligned block = aligned(kBlockBytes);
        if (read(begin_of(slot), block.get(), kBlockBytes)) {
            headers_[slot] = decode_segment_header(superblock_.id, {block.get(), kBlockBytes});
        } else {
            MutexLock lock(mutex_);
            lost_[slot] = true;
            blind_ = true;  // it may be the newest
        }
        if (read(begin_of(slot) + superblock_.segment_bytes - kBlockBytes, block.get(), kBlockBytes)) {
            footers_[slot] = decode_footer(superblock_.id, {block.get(), kBlockBytes});
        }
    }

    void choose_segments() {
        newest_ = superblock_.first_number - 1;
        floor_ = superblock_.first_number;
        for (uint32_t slot = 0; slot < slots_; ++slot) {
            uint64_t number = 0;
            if (footers_[slot]) number = footers_[slot]->number;  // when the header is damaged
            if (headers_[slot]) number = headers_[slot]->number;
            numbers_[slot] = number;
            newest_ = std::max(newest_, number);
        }
        // The highest tail that any header names. Removal records may name a higher one; those are found in
        // the second pass only, so that it reads some segments in vain.
        for (const auto& header : headers_) {
            if (header) floor_ = std::max(floor_, header->tail);
        }
    }

    void read_records(uint32_t slot) {
        uint64_t number = numbers_[slot];
        // When a header could not be read at all, that segment may be the newest, with removals of
        // anything: nothing is believed, and nothing need be read.
        if (number < floor_ || blind_) return;
        std::optional<Footer> footer = footers_[slot];
        bool sealed = footer && footer->number == number;
        if (sealed) {
            uint64_t begin = uint64_t{footer->summary_block} * kBlockBytes;
            uint64_t bytes = round_up_to_block(footer->summary_bytes);
            if (begin + bytes <= superblock_.segment_bytes) {
                Aligned summary = aligned(bytes);
                if (read(begin_of(slot) + begin, summary.get(), bytes)) {
                    auto records = decode_summary(superblock_.id, *footer, {summary.get(), bytes});
                    if (records) return add(slot, *records);
                }
            }
        }
        Aligned segment = aligned(superblock_.segment_bytes);
        if (!read(begin_of(slot), segment.get(), superblock_.segment_bytes)) {
            MutexLock lock(mutex_);
            lost_[slot] = true;
            return;
        }
        std::span<const std::byte> bytes(segment.get(), superblock_.segment_bytes);
        std::vector<FoundRecord> records = scan_segment(superblock_.id, number, bytes);
        add(slot, records);
        if (!sealed) seal(slot, number, records);
        MutexLock lock(mutex_);
        ++result_.scanned;
        // A footer that promises a summary which is not there: the disk has lost something that was
        // written.
        if (sealed) ++result_.damaged;
    }

    // So that the next start need not scan it again. Nothing depends on it.
    void seal(uint32_t slot, uint64_t number, const std::vector<FoundRecord>& records) {
        SummaryWriter summary;
        uint64_t end = kBlockBytes;
        for (const FoundRecord& found : records) {
            summary.add(superblock_.id, found.block, found.record, found.removals);
            end = std::max(end, uint64_t{found.block} * kBlockBytes + found.record.bytes());
        }
        uint64_t bytes = round_up_to_block(summary.bytes());
        // Records that lie in a torn segment as the scan found them may leave less room than the writer
        // would have.
        if (end + bytes + kBlockBytes > superblock_.segment_bytes) return;
        Aligned out = aligned(bytes + kBlockBytes);
        std::memset(out.get(), 0, bytes);
        if (bytes != 0) std::memcpy(out.get(), summary.data().data(), summary.bytes());
        Footer footer{number, static_cast<uint32_t>(end / kBlockBytes),
                      static_cast<uint32_t>(summary.bytes()),
                      crc32c(0, summary.data().data(), summary.bytes()), summary.count()};
        encode_footer(superblock_.id, footer, out.get() + bytes);
        if (bytes != 0 && file_.write(begin_of(slot) + end, out.get(), bytes) != 0) return;
        uint64_t last = begin_of(slot) + superblock_.segment_bytes - kBlockBytes;
        (void)!file_.write(last, out.get() + bytes, kBlockBytes);
    }

    // Called by several threads, in any order of segments: what wins is decided by sequence and segment
    // number, not by which comes first. Removals are gathered and applied at the end, since an object's
    // removal may be read before the object.
    std::tuple<uint64_t, uint64_t, uint64_t> rank(const Entry& e) const {
        return {e.version, e.sequence, numbers_[e.place.slot]};
    }

    void add(uint32_t slot, const std::vector<FoundRecord>& records) {
        records_[slot] = records.size();
        for (const FoundRecord& found : records) {
            const Record& record = found.record;
            if (record.kind == RecordKind::kRemovals) {
                MutexLock lock(mutex_);
                if (!found.removals.empty()) tail_ = std::max(tail_, found.removals.front());
                for (size_t i = 1; i < found.removals.size(); ++i) removed_.insert(found.removals[i]);
                result_.sequence_max = std::max(result_.sequence_max, record.sequence);
                continue;
            }
            uint64_t end = uint64_t{found.block} * kBlockBytes;
            // A checksum is no proof of sense: a record must lie within its segment, else a read would
            // reach into another one. Sequence 0 marks free entries of the index.
            if (record.size > superblock_.segment_bytes || record.sequence == 0) continue;
            if (end + record.bytes() > superblock_.segment_bytes) continue;
            Entry entry;
            entry.sequence = record.sequence;
            entry.version = record.version;
            entry.hash = hash_of(record);
            entry.size = record.size;
            entry.record_bytes = record.bytes();
            entry.crc = record.crc;
            entry.data_offset = record.data_offset();
            entry.place = Place{slot, found.block};
            entry.set_text(record.name, record.parent);
            MutexLock lock(mutex_);
            result_.sequence_max = std::max(result_.sequence_max, record.sequence);
            entry.space = space_(record.space);
            uint32_t old = index_.find(entry.hash);
            if (old != kNoEntry) {
                Entry& other = index_.entry(old);
                bool newer = rank(entry) > rank(other);
                Entry& loser = newer ? other : entry;
                // The winner may turn out to be removed, and then the one that was written later counts.
                if (loser.sequence > (newer ? entry : other).sequence) {
                    overtaken_.push_back(std::move(loser));
                }
                if (!newer) continue;
                index_.erase(old);
            }
            index_.insert(std::move(entry));
        }
    }

    // Behind both passes. More records than the index may hold (the option was lowered) are removed without
    // regard to age: a removal of what the index does not know would not be written, and the option may be
    // raised again.
    void forget_dead(uint32_t records_max) REQUIRES(mutex_) {
        for (uint32_t at = 0; at < index_.slots(); ++at) {
            const Entry& e = index_.entry(at);
            if (e.sequence != 0 && is_dead(e)) index_.erase(at);
        }
        for (uint32_t at = 0; at < index_.slots() && index_.count() > records_max; ++at) {
            uint64_t sequence = index_.entry(at).sequence;
            if (sequence == 0) continue;
            result_.unnamed.push_back(sequence);
            index_.erase(at);
        }
        std::ranges::sort(overtaken_, std::greater{}, [this](const Entry& e) { return rank(e); });
        for (Entry& e : overtaken_) {
            if (is_dead(e)) continue;
            uint32_t at = index_.find(e.hash);
            if (at == kNoEntry && index_.count() < records_max) {
                e.older = e.newer = kNoEntry;
                index_.insert(std::move(e));
            } else if (at == kNoEntry || index_.entry(at).sequence != e.sequence) {
                result_.unnamed.push_back(e.sequence);
            }
        }
    }

    bool is_dead(const Entry& e) const REQUIRES(mutex_) {
        uint32_t slot = e.place.slot;
        return removed_.contains(e.sequence) || numbers_[slot] < floor_ || lost_[slot];
    }

    File& file_;
    const Superblock& superblock_;
    uint32_t slots_;
    Index& index_ GUARDED_BY(mutex_);
    const SpaceOf& space_;
    const uint32_t threads_;

    // Written by one thread for each slot, or between the two passes; read after that.
    std::vector<std::optional<SegmentHeader>> headers_;
    std::vector<std::optional<Footer>> footers_;
    std::vector<uint64_t> numbers_;  // of each slot's segment, 0: none
    std::vector<uint64_t> records_;  // how many were found in each
    uint64_t floor_ = 0;             // segments of lower numbers are void
    uint64_t newest_ = 0;
    std::atomic<bool> blind_{false};  // a segment's header cannot be read
    std::atomic<uint64_t> bytes_read_{0};

    mutable Mutex mutex_;
    std::vector<bool> lost_ GUARDED_BY(mutex_);  // slots that cannot be read
    std::unordered_set<uint64_t> removed_ GUARDED_BY(mutex_);
    uint64_t tail_ GUARDED_BY(mutex_) = 0;
    std::vector<Entry> overtaken_ GUARDED_BY(mutex_);  // written later than what won by its version
    Recovery result_ GUARDED_BY(mutex_);
};

}  // namespace

Recovery recover(File& file, const Superblock& superblock, uint32_t slots, uint32_t records_max, Index& index,
                 const SpaceOf& space, uint32_t threads) {
    return Scanner(file, superblock, slots, index, space, threads).run(records_max);
}

}  // namespace moonpool::ssd
