// The half of shared memory that serves: tells initiators of this host what is registered, and hands them the
// descriptors of allocated memory.
#pragma once

#include "transport/host/server.hpp"

namespace moonpool::transport::shm {

class Target : public host::Server {
   public:
    explicit Target(const Context& context);

   private:
    static Result<host::Passed> list_regions(const RegionTable& table, uint64_t generation, Reader question,
                                             Writer& answer);
    static Result<host::Passed> map_region(const RegionTable& table, Reader question, Writer& answer);

    Result<host::Passed> answer(const RegionTable& table, Kind kind, Reader question, Writer& answer);
};

}  // namespace moonpool::transport::shm
