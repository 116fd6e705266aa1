// PoolDirectory: a process's way to the directory of its pool, whatever the number of masters. A pool of one
// range has one DirectoryClient, to which everything is passed on. With several each key's question goes to
// the master of its range, LOCATE and FORGET to all of them at once; the answers come back in the order of
// the keys, and nodes have the numbers of MemberViews.
//
// A range whose master does not answer makes its own keys unknown, and no others. Any thread may call.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/fork.hpp"
#include "base/mutex.hpp"
#include "base/result.hpp"
#include "directory/directory_client.hpp"
#include "directory/member_views.hpp"
#include "directory/ranges.hpp"
#include "directory/requests.hpp"

namespace moonpool {

class PoolDirectory {
   public:
    // options.master: with semicolons between the ranges.
    explicit PoolDirectory(const DirectoryClientOptions& options);
    PoolDirectory(const PoolDirectory&) = delete;

    uint32_t ranges() const { return static_cast<uint32_t>(clients_.size()); }
    // Which of these keys are of one range: their places, range by range. One group where there is one range.
    std::vector<std::vector<size_t>> by_range(std::span<const Hash128> hashes) const;

    // As DirectoryClient has them. An answer says of which ranges it knows nothing (LocateAnswer::unknown);
    // it fails when that is so of all that were asked.
    Result<LocateAnswer> locate(std::span<const Hash128> hashes, const LocateOptions& options = {});
    Result<std::shared_ptr<const Members>> members(bool fresh = false);
    // By the first range whose master answers.
    Result<std::vector<NodeId>> place(uint64_t bytes, uint16_t n, const PlaceOptions& options = {});
    Result<uint32_t> forget(std::span<const Hash128> hashes, std::span<const NodeId> unreached = {});

    // The keys of one call are of one range: there is no order between two.
    Result<OrderAnswer> order(std::span<const Hash128> hashes, const Incarnation* placing,
                              bool unique = false);
    Result<std::vector<Version>> ordered(const OrderDone& done,
                                         const std::function<void()>& meanwhile = nullptr);

    // Of each range the last version that its master had given, as of its last answer.
    RangeVersions newest() const;

    bool connected() const;  // to one master, at least
    const std::string& master() const { return master_; }
    void close();

   private:
    DirectoryClient& of(uint32_t range) { return *clients_[range]; }
    bool is_one();
    void hear(uint32_t range, const std::shared_ptr<const Members>& list);
    using Meanwhile = std::function<void()>;
    static void ask_at_once(size_t n, const std::function<void(size_t, const Meanwhile&)>& ask, size_t i = 0);
    void translate(std::span<const Holder> holders, const Members& list, Located& out);
    Result<std::vector<NodeId>> place_at(uint32_t range, uint64_t bytes, uint16_t n,
                                         const PlaceOptions& options);

    const std::string master_;
    std::vector<std::unique_ptr<DirectoryClient>> clients_;  // of each range
    ForkGuard fork_;
    std::once_flag dialing_;              // all ranges are dialed
    std::atomic<uint32_t> places_at_{0};  // the range that answered the last place()
    Mutex mutex_;                         // never held while a master is asked
    MemberViews views_ GUARDED_BY(mutex_);
};

}  // namespace moonpool
