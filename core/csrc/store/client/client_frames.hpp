// What the files of Client and NodeClient share: sizes, refusals, and how the items of a call are dealt out
// to frames.
#pragma once

#include <algorithm>
#include <span>
#include <string>
#include <string_view>

#include "store/client/holders.hpp"
#include "store/client/node_client.hpp"

namespace moonpool {

// Whether a node is away, as far as its caller can tell; another may still have what was asked for.
inline bool no_answer(const Error& error) {
    return error.code == Code::kUnavailable || error.code == Code::kTimeout || error.code == Code::kProtocol;
}

inline Error too_small(std::string_view name, uint64_t have, uint64_t need) {
    return Error{Code::kInvalidArgument, "the buffer for key " + std::string(name) + " holds " +
                                             std::to_string(have) + " bytes, the object has " +
                                             std::to_string(need)};
}

inline Error corrupt(std::string_view name) {
    return Error{Code::kCorrupt, "the bytes of key " + std::string(name) + " do not match their checksum"};
}

// How many items of a call go into one frame: by count and by bytes.
inline constexpr uint64_t kLookupHead = 64;  // bytes, generously

class FrameBudget {
   public:
    FrameBudget(const Session& session, uint64_t head) : session_(session), head_(head) { reset(); }
    bool fits(uint64_t item_bytes) const {
        return keys_ < session_.frame_keys_max() && bytes_ + item_bytes <= session_.frame_bytes_max();
    }
    void add(uint64_t item_bytes) {
        ++keys_;
        bytes_ += item_bytes;
    }
    void reset() {
        keys_ = 0;
        bytes_ = head_;
    }

   private:
    const Session& session_;
    uint64_t head_, bytes_ = 0;
    uint32_t keys_ = 0;
};

// Calls send(begin, end) for runs of names that fit one frame each; stops at the first that is not ok or says
// stop. beside_bytes: of each name in the frame, beside it.
template <class Send>
Status in_frames(const Session& session, std::span<const std::string_view> names, uint32_t multiple,
                 Send send, uint64_t beside_bytes = 0) {
    FrameBudget budget(session, kLookupHead);
    size_t begin = 0;
    for (size_t i = 0; i < names.size(); i += multiple) {
        uint64_t bytes = 0;
        size_t end = std::min(names.size(), i + multiple);
        for (size_t j = i; j < end; ++j) bytes += 2 + names[j].size() + beside_bytes;
        if (kLookupHead + bytes > session.frame_bytes_max()) {
            return Error{Code::kInvalidArgument, "the names of one block have " + std::to_string(bytes) +
                                                     " bytes, over the limit of a frame, " +
                                                     std::to_string(session.frame_bytes_max())};
        }
        if (i != begin && !(budget.fits(bytes) && end - begin <= session.frame_keys_max())) {
            Result<bool> more = send(begin, i);
            if (!more) return more.error();
            if (!*more) return success();
            begin = i;
            budget.reset();
        }
        budget.add(bytes);
    }
    if (begin == names.size()) return success();
    Result<bool> more = send(begin, names.size());
    return more ? success() : Status(more.error());
}

// Whether a frame says more of its rows than a node of the release before knows. Such a node keeps them as
// any other object.
inline bool has_marks(const Session& session, std::span<const PutItem> items) {
    return session.knows(kFeatureMarks) && std::ranges::any_of(items, [](const PutItem& item) {
               return !item.group.empty() || item.soft_ms != 0;
           });
}

inline NewKey key_of(const PutItem& item, const PutHow& how) {
    Version version = item.version != kNoVersion ? item.version : how.known_of(item.name);
    return {item.name, item.parent, item.group, item.soft_ms, version};
}

// Whether a put at that node says which removals it comes after. They have an order where there is a master.
inline bool has_versions(const Session& session) {
    return session.knows(kFeatureVersions) && !session.master().empty();
}

// Flags of COMMIT and PUT.
inline uint8_t commit_flags(const Session& session, std::span<const PutItem> items, const PutHow& how) {
    return static_cast<uint8_t>((how.replace ? kCommitReplace : 0) |
                                (has_marks(session, items) ? kCommitMarks : 0) |
                                (has_versions(session) ? kCommitVersions : 0) |
                                (!how.replace && session.knows(kFeatureSizes) ? kCommitSizes : 0));
}

inline CommitHead commit_head(const Session& session, uint8_t flags, size_t rows) {
    return {session.space(), flags, static_cast<uint32_t>(rows)};
}

inline void write_names(Writer& w, std::span<const std::string_view> names) {
    for (std::string_view name : names) w.text16(name);
}

}  // namespace moonpool
