#include "transport/shm/target.hpp"

#include "transport/frames.hpp"

namespace moonpool::transport::shm {

Target::Target(const Context& context)
    : Server(context, "moonpool-engine-", false,
             [this, table = context.regions](Kind kind, Reader question, Writer& answered) {
                 return answer(*table, kind, question, answered);
             }) {}

Result<host::Passed> Target::answer(const RegionTable& table, Kind kind, Reader question, Writer& answered) {
    if (kind == Kind::kEngineRegions) return list_regions(table, generation(), question, answered);
    if (kind == Kind::kShmMap) return map_region(table, question, answered);
    return Error{Code::kProtocol, "no question of shared memory"};
}

Result<host::Passed> Target::list_regions(const RegionTable& table, uint64_t generation, Reader question,
                                          Writer& answered) {
    std::optional<RegionsQuestion> asked = decode_regions_question(question);
    if (!asked) return Error{Code::kProtocol, "an unreadable question"};
    answered.number(generation);
    if (asked->edition) {
        encode_changes(answered, table.changes(*asked->edition), asked->version);
    } else {
        encode_regions(answered, table.all()->list(), asked->version);
    }
    return host::Passed{};
}

Result<host::Passed> Target::map_region(const RegionTable& table, Reader question, Writer& answered) {
    auto id = question.number<uint64_t>();
    if (!question.done()) return Error{Code::kProtocol, "an unreadable question"};
    std::shared_ptr<Region> region = table.by_id(id);
    if (region == nullptr || region->memory == nullptr) {
        return Error{Code::kInvalidArgument, "that region is not registered any more"};
    }
    // The region may be deregistered before the initiator has mapped it: the generation has changed then, and
    // the gate refuses it.
    answered.number(region->memory->size());
    // A device is opened by the initiator itself, which the number behind it proves to be the same one.
    if (const DaxPlace* place = region->memory->dax_place()) {
        answered.text16(place->device);
        answered.number(place->offset);
        answered.number(place->nonce);
        return host::Passed{.owner = region->memory};
    }
    return host::Passed{.fd = region->memory->fd(), .owner = region->memory};
}

}  // namespace moonpool::transport::shm
