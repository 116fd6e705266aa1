// libFuzzer: batches of KV events from a stranger, into an index that knows things already.
//
// An input is a batch; its first byte chooses the holder and whether it is a node of the pool. Whatever it
// was, the index stays sound, and within its bounds.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "conductor/prefix_index.hpp"

using namespace moonpool;

namespace {

constexpr uint32_t kBlocksMax = 2000;
constexpr uint64_t kSoundEvery = 1024;  // inputs between two checks

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const std::unique_ptr<PrefixIndex> index =
        std::move(*PrefixIndex::create({.block_tokens = 2, .blocks_max = kBlocksMax, .holders_max = 16}));
    static uint64_t inputs = 0;
    if (size == 0) return 0;
    (void)index->ingest(data[0] & 15, {data + 1, size - 1}, (data[0] & 16) != 0);
    std::vector<BlockKey> keys(4);
    (void)index->match(keys);
    if ((data[0] & 32) != 0) (void)index->dispatched(data[0] & 15, keys, static_cast<double>(inputs), 5);
    index->expire(static_cast<double>(inputs));
    if (++inputs % kSoundEvery == 0 && (!index->check_integrity() || index->stats().entries > kBlocksMax)) {
        std::fprintf(stderr, "fuzz_events: the index is not sound\n");
        std::abort();
    }
    return 0;
}
