// Index: which objects a log holds, where they lie, and what each segment still holds of worth. Pure; the
// log's mutex guards it.
//
// Invariants (check_integrity):
//   - every live entry is found under its hash, and is in the list of its segment, exactly once;
//   - a live entry is in the list of its owner, exactly once, in the order in which records were written;
//   - a segment's live bytes are the sum of its entries' record bytes; the newest of its list is the last
//     that was written.
// An entry costs about 200 bytes and the texts of name and parent.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/xxh3.hpp"

namespace moonpool::ssd {

inline constexpr uint32_t kNoEntry = UINT32_MAX;

struct Place {
    uint32_t slot = 0;   // which segment of the file
    uint32_t block = 0;  // of the record, in it

    friend bool operator==(const Place&, const Place&) = default;
};

struct Entry {
    uint64_t sequence = 0;  // 0: free
    uint64_t version = 0;
    Hash128 hash;
    uint64_t size = 0;
    uint64_t record_bytes = 0;
    uint32_t crc = 0;
    uint32_t data_offset = 0;  // in the record
    uint32_t space = 0;
    Place place;
    uint32_t older = kNoEntry;  // list of the segment
    uint32_t newer = kNoEntry;
    uint32_t owner_older = kNoEntry;  // list of the owner of its space
    uint32_t owner_newer = kNoEntry;
    uint16_t name_bytes = 0;
    uint16_t parent_bytes = 0;
    bool used = false;  // read or asked for since it was written
    std::unique_ptr<char[]> text;

    std::string_view name() const { return {text.get(), name_bytes}; }
    std::string_view parent() const { return {text.get() + name_bytes, parent_bytes}; }
    void set_text(std::string_view name, std::string_view parent);
};

class Index {
   public:
    explicit Index(uint32_t segments) : segments_(segments) {}

    uint32_t find(uint32_t space, const Hash128& hash, std::string_view name) const;
    // With that hash, of whatever name.
    uint32_t find(const Hash128& hash) const;

    uint32_t insert(Entry entry);  // no entry has that hash
    void erase(uint32_t at);
    void move(uint32_t at, Place place);  // its record was copied there
    // Puts all lists into the order in which the records were written: by the number of their segment's
    // content, and by block. After entries came in another order. O(n log n).
    void sort(const std::vector<uint64_t>& numbers);

    Entry& entry(uint32_t at) { return entries_[at]; }
    const Entry& entry(uint32_t at) const { return entries_[at]; }
    uint32_t slots() const { return static_cast<uint32_t>(entries_.size()); }  // every live entry is below it

    uint32_t oldest(uint32_t segment) const { return segments_[segment].oldest; }
    uint64_t live_bytes(uint32_t segment) const { return segments_[segment].live_bytes; }
    uint64_t live_bytes() const { return live_bytes_; }
    uint64_t object_bytes() const { return object_bytes_; }
    uint64_t count() const { return by_hash_.size(); }
    // Whose a space is; before an entry of it comes, and the same while there are some.
    void set_owner(uint32_t space, uint32_t owner);
    uint32_t oldest_of(uint32_t owner) const {
        return owner < owners_.size() ? owners_[owner].oldest : kNoEntry;
    }
    uint64_t bytes_of(uint32_t owner) const {  // of its records
        return owner < owners_.size() ? owners_[owner].live_bytes : 0;
    }
    uint32_t count_in(uint32_t space) const { return space < in_space_.size() ? in_space_[space] : 0; }

    bool check_integrity() const;

   private:
    struct Segment {
        uint32_t oldest = kNoEntry, newest = kNoEntry;
        uint64_t live_bytes = 0;
    };
    struct HashOf {
        size_t operator()(const Hash128& hash) const { return hash.low; }
    };
    Segment& owner_of(const Entry& e) { return owners_[owner_of_space_[e.space]]; }
    bool check_owners() const;
    void link(uint32_t at);
    void unlink(uint32_t at);

    std::vector<Segment> segments_;
    std::vector<Entry> entries_;
    std::vector<uint32_t> free_;
    std::unordered_map<Hash128, uint32_t, HashOf> by_hash_;
    std::vector<uint32_t> in_space_;
    std::vector<uint32_t> owner_of_space_;
    std::vector<Segment> owners_{1};  // 0: of spaces of which none was said
    uint64_t live_bytes_ = 0, object_bytes_ = 0;
};

}  // namespace moonpool::ssd
