#include "transport/cufile/transport.hpp"

#include "transport/cufile/link.hpp"

namespace moonpool::transport::cufile {

std::string Transport::viable(const Context&) {
    Result<const Library*> library = Library::get();
    return library ? "" : library.error().text;
}

Result<std::shared_ptr<transport::Link>> Transport::connect(const PeerInfo& peer,
                                                            const std::shared_ptr<Control>&, int) {
    Result<const Library*> library = Library::get();
    if (!library) return library.error();
    if (!peer.file->direct() || peer.file->blocks().fd() < 0) {
        return Error{Code::kUnavailable, "the file system knows no O_DIRECT"};
    }
    return std::shared_ptr<transport::Link>(std::make_shared<Link>(**library, peer.file, counters_));
}

}  // namespace moonpool::transport::cufile
