// libfabric, opened at run time, and its domains: of each NIC one, of which endpoints are made and which has
// keys for memory. What is missing, in the library or on the host, is one sentence.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "transport/efa/abi.hpp"
#include "transport/nic/keys.hpp"
#include "transport/nic/near_ports.hpp"
#include "transport/transport.hpp"

namespace moonpool::transport::efa {

struct Fabric {
    int (*getinfo)(uint32_t version, const char* node, const char* service, uint64_t flags,
                   const fi::Info* hints, fi::Info** out) = nullptr;
    void (*freeinfo)(fi::Info* info) = nullptr;
    fi::Info* (*dupinfo)(const fi::Info* info) = nullptr;
    int (*open)(fi::FabricAttr* attr, fi::Fabric** out, void* context) = nullptr;
    const char* (*strerror)(int error) = nullptr;

    // Of an error as calls return it: negative.
    std::string text(ssize_t error) const { return strerror(static_cast<int>(error < 0 ? -error : error)); }
};

// Closes what libfabric gave.
struct CloseFid {
    template <class T>
    void operator()(T* object) const {
        auto* fid = reinterpret_cast<fi::Fid*>(object);
        (void)fid->ops->close(fid);
    }
};
template <class T>
using Owned = std::unique_ptr<T, CloseFid>;

// Opened once in a process, and never closed: it has threads and handlers of its own.
Result<const Fabric*> open_fabric(const FabricOptions& options);
// Whether a NIC of that provider is here; opens the library only where the kernel may have one.
Status has_nic(const FabricOptions& options);

class Domain final : public nic::KeyMaker {
   public:
    // Of all NICs, or of those that the options name. An error: none can be opened.
    static Result<std::vector<std::shared_ptr<Domain>>> open_all(const FabricOptions& options);
    static Result<std::vector<std::shared_ptr<Domain>>> open_all(const Fabric& library,
                                                                 const FabricOptions& options);
    ~Domain() override;
    Domain(const Domain&) = delete;

    const std::string& device_name() const override { return name_; }
    Result<Made> make_key(uint64_t address, uint64_t bytes) override;
    bool end_key(void* handle) override;
    // A provider that works in software looks into the key of a request while that lasts.
    bool ends_keys_in_use() const override { return false; }

    nic::NearPort near;  // set before it is used

    const Fabric& library() const { return library_; }
    fi::Info* info() const { return info_; }
    fi::Fabric* fabric() const { return fabric_.get(); }
    fi::Domain* domain() const { return domain_.get(); }
    // Whether peers name memory by its address here; else by how far it is from where its key begins.
    bool names_by_address() const { return (info_->domain_attr->mr_mode & fi::kMrVirtual) != 0; }

   private:
    Domain(const Fabric& library, fi::Info* info) : library_(library), info_(info) {}
    Status open();

    const Fabric& library_;
    fi::Info* const info_;
    std::string name_;
    Owned<fi::Fabric> fabric_;
    Owned<fi::Domain> domain_;
};

// Has them know what memory they are near to, by the topology below `machine`, and closes all but as many as
// an engine may have.
void keep_nearest(std::vector<std::shared_ptr<Domain>>& domains, const std::string& machine);

}  // namespace moonpool::transport::efa
