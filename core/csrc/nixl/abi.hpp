// The binary interface between NIXL and its backend plugins, version 1 of it, as the wheel of 1.5.1 has it.
// The wheel ships no headers, so these are declarations of our own, with the wheel's names and order: of what
// NIXL calls (virtual functions) and of what it looks into (members). docs/nixl.md says how they were checked
// against the wheel's own plugins. Other NIXLs have the same version 1 and other classes: host.hpp.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

inline constexpr int kNixlPluginApi = 1;

using NixlParams = std::unordered_map<std::string, std::string>;
using NixlMessages = std::vector<std::pair<std::string, std::string>>;  // (agent, message)

enum NixlMemory { kNixlDram, kNixlVram, kNixlBlock, kNixlObject, kNixlFile };
enum NixlOperation { kNixlRead, kNixlWrite };
enum NixlStatus {
    kNixlInProgress = 1,
    kNixlSuccess = 0,
    kNixlInvalid = -2,
    kNixlBackendError = -3,
    kNixlNotFound = -4,
    kNixlNotSupported = -9,
    kNixlDisconnected = -10,
};

// What a plugin keeps for a piece of memory, and for a transfer.
struct NixlMetadata {
    explicit NixlMetadata(bool is_private) : is_private_(is_private) {}
    virtual ~NixlMetadata() = default;

   protected:
    bool is_private_;
};
struct NixlRequest {
    virtual ~NixlRequest() = default;
};

struct NixlRange {
    uintptr_t address;
    size_t length;
    uint64_t device;
};
struct NixlNamedRange : NixlRange {
    std::string blob;
};
struct NixlLocatedRange : NixlRange {
    NixlMetadata* metadata;
};

// NIXL makes them; plugins read them.
template <class T>
struct NixlList {
    virtual ~NixlList() = default;
    NixlMemory memory;
    std::vector<T> items;
};
using NixlRanges = NixlList<NixlLocatedRange>;

struct NixlOptions {
    std::string message;
    bool has_message = false;
    std::string custom;
};

// The beginning of what an engine is made from.
struct NixlSetup {
    std::string agent;
    std::string type;
    NixlParams* params;
};

class NixlEngine {
   public:
    explicit NixlEngine(const NixlSetup& setup)
        : type_(setup.type), params_(*setup.params), agent_(setup.agent) {}
    NixlEngine(const NixlEngine&) = delete;

    virtual ~NixlEngine() = default;
    virtual bool supports_remote() const = 0;
    virtual bool supports_local() const = 0;
    virtual bool supports_messages() const = 0;
    virtual std::vector<NixlMemory> memories() const = 0;
    virtual NixlStatus register_memory(const NixlNamedRange& range, const NixlMemory& memory,
                                       NixlMetadata*& out) = 0;
    virtual NixlStatus deregister_memory(NixlMetadata* metadata) = 0;
    virtual NixlStatus connect(const std::string& agent) = 0;
    virtual NixlStatus disconnect(const std::string& agent) = 0;
    virtual NixlStatus unload(NixlMetadata* metadata) = 0;
    virtual NixlStatus prepare(const NixlOperation& operation, const NixlRanges& local,
                               const NixlRanges& remote, const std::string& agent, NixlRequest*& request,
                               const NixlOptions* options) const = 0;
    virtual NixlStatus post(const NixlOperation& operation, const NixlRanges& local, const NixlRanges& remote,
                            const std::string& agent, NixlRequest*& request,
                            const NixlOptions* options) const = 0;
    virtual NixlStatus check(NixlRequest* request) const = 0;
    virtual NixlStatus release(NixlRequest* request) const = 0;
    virtual NixlStatus view_remote(const void*, void*&, const NixlOptions*) const {
        return kNixlNotSupported;
    }
    virtual NixlStatus view_local(const NixlRanges&, void*&, const NixlOptions*) const {
        return kNixlNotSupported;
    }
    virtual void release_view(void*) const {}
    virtual NixlStatus public_data(const NixlMetadata*, std::string&) const { return kNixlBackendError; }
    virtual NixlStatus connection_info(std::string&) const { return kNixlBackendError; }
    virtual NixlStatus load_connection(const std::string&, const std::string&) { return kNixlBackendError; }
    virtual NixlStatus load_remote(const NixlNamedRange&, const NixlMemory&, const std::string&,
                                   NixlMetadata*&) {
        return kNixlBackendError;
    }
    virtual NixlStatus load_local(NixlMetadata*, NixlMetadata*&) { return kNixlBackendError; }
    virtual NixlStatus messages(NixlMessages&) { return kNixlBackendError; }
    virtual NixlStatus send_message(const std::string&, const std::string&) const {
        return kNixlBackendError;
    }
    virtual NixlStatus query(const NixlList<NixlNamedRange>&, std::vector<std::optional<NixlParams>>&) const {
        return kNixlNotSupported;
    }
    virtual NixlStatus estimate(const NixlOperation&, const NixlRanges&, const NixlRanges&,
                                const std::string&, NixlRequest* const&, std::chrono::microseconds&,
                                std::chrono::microseconds&, int&, const void*) const {
        return kNixlNotSupported;
    }

   private:
    std::string type_;
    NixlParams params_;
    std::vector<std::byte> events_;  // of telemetry; empty
    std::mutex events_mutex_;

   protected:
    bool broken_ = false;  // NIXL throws the engine away
    const std::string agent_;
    const bool telemetry_ = false;
};
// 0xd0 on x86-64, where a mutex has 40 bytes; on aarch64 it has 48.
static_assert(sizeof(NixlEngine) == 0xd0 - 40 + sizeof(std::mutex));
static_assert(sizeof(NixlLocatedRange) == 32 && sizeof(NixlNamedRange) == 56);

struct NixlPlugin {
    int api;
    NixlEngine* (*create)(const NixlSetup*);
    void (*destroy)(NixlEngine*);
    const char* (*name)();
    const char* (*version)();
    NixlParams (*options)();
    std::vector<NixlMemory> (*memories)();
};
