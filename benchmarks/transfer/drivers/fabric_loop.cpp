// No engine: the requests of benchmarks.transfer_paths, posted to libfabric and polled by a plain loop, with
// a second process at the other end that does nothing but poll. What a provider can do at most.
//
//   fabric_loop PROVIDER SECONDS BYTES   ->   "read 4096 128 0.25" a line: direction, size, batch, GB/s
#include <dlfcn.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "transport/efa/abi.hpp"

using namespace moonpool::transport::efa;

namespace {

constexpr uint32_t kApi = fi::version(1, 9);
constexpr size_t kRequests = 1024;

void check(bool good, const char* what, ssize_t code = 0) {
    if (good) return;
    std::fprintf(stderr, "fabric_loop: %s (%zd)\n", what, code);
    std::exit(1);
}

double now_s() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// What one process tells the other.
struct End {
    uint64_t key = 0, address = 0, by_address = 0;
    size_t name_bytes = 0;
    std::array<std::byte, 256> name{};
};

class Fabric {
   public:
    Fabric(const char* provider, size_t bytes) {
        void* library = ::dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL);
        check(library != nullptr, "there is no libfabric.so.1");
        auto getinfo =
            find<int (*)(uint32_t, const char*, const char*, uint64_t, const fi::Info*, fi::Info**)>(
                library, "fi_getinfo", "FABRIC_1.3");
        auto dupinfo = find<fi::Info* (*)(const fi::Info*)>(library, "fi_dupinfo", "FABRIC_1.3");
        auto open = find<int (*)(fi::FabricAttr*, fi::Fabric**, void*)>(library, "fi_fabric", "FABRIC_1.1");
        fi::Info* hints = dupinfo(nullptr);
        hints->caps = fi::kMsg | fi::kRma;
        hints->mode = fi::kContext | fi::kContext2;
        hints->ep_attr->type = fi::kReliableDatagram;
        hints->domain_attr->mr_mode = fi::kMrLocal | fi::kMrVirtual | fi::kMrAllocated | fi::kMrProviderKey;
        hints->fabric_attr->provider = ::strdup(provider);
        int code = getinfo(kApi, nullptr, nullptr, 0, hints, &info_);
        check(code == 0, "the provider has no reliable datagrams", code);
        code = open(info_->fabric_attr, &fabric_, nullptr);
        check(code == 0, "fi_fabric", code);
        code = fabric_->ops->domain(&fabric_->fid, info_, &domain_, nullptr);
        check(code == 0, "domain", code);
        fi::CqAttr queue{};
        queue.size = kRequests;
        queue.format = fi::kFormatContext;
        code = domain_->ops->cq_open(domain_, &queue, &cq_, nullptr);
        check(code == 0, "queue", code);
        fi::AvAttr addresses{};
        addresses.count = 1;
        code = domain_->ops->av_open(domain_, &addresses, &av_, nullptr);
        check(code == 0, "addresses", code);
        code = domain_->ops->endpoint(domain_, info_, &ep_, nullptr);
        check(code == 0, "endpoint", code);
        code = ep_->fid.ops->bind(&ep_->fid, &av_->fid, 0);
        if (code == 0) code = ep_->fid.ops->bind(&ep_->fid, &cq_->fid, fi::kTransmit | fi::kReceive);
        if (code == 0) code = ep_->fid.ops->control(&ep_->fid, fi::kEnable, nullptr);
        check(code == 0, "the endpoint is not enabled", code);
        void* pages = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        check(pages != MAP_FAILED, "memory");
        memory_ = static_cast<std::byte*>(pages);
        std::memset(memory_, 1, bytes);
        constexpr uint64_t kAccess = fi::kRead | fi::kWrite | fi::kRemoteRead | fi::kRemoteWrite;
        code = domain_->mr->reg(&domain_->fid, memory_, bytes, kAccess, 0, 7, 0, &mr_, nullptr);
        check(code == 0, "no key for memory", code);
    }

    End end() const {
        End own{mr_->key,
                reinterpret_cast<uint64_t>(memory_),
                (info_->domain_attr->mr_mode & fi::kMrVirtual) != 0,
                0,
                {}};
        own.name_bytes = own.name.size();
        check(ep_->cm->getname(&ep_->fid, own.name.data(), &own.name_bytes) == 0, "no address");
        return own;
    }
    void meet(const End& other) {
        other_ = other;
        check(av_->ops->insert(av_, other.name.data(), 1, &peer_, 0, nullptr) == 1, "the peer's address");
    }
    ssize_t post(bool write, size_t at, size_t bytes, void* context) {
        iovec local{memory_ + at, bytes};
        void* descriptor = mr_->descriptor;
        fi::RmaIov remote{(other_.by_address != 0 ? other_.address : 0) + at, bytes, other_.key};
        fi::RmaMessage message{&local, &descriptor, 1, peer_, &remote, 1, context, 0};
        return write ? ep_->rma->writemsg(ep_, &message, fi::kCompletion | fi::kDeliveryComplete)
                     : ep_->rma->readmsg(ep_, &message, fi::kCompletion);
    }
    // -> how many requests are done.
    size_t poll() {
        std::array<fi::CqEntry, 64> entries;
        ssize_t n = cq_->ops->read(cq_, entries.data(), entries.size());
        check(n >= 0 || n == -EAGAIN, "a request failed", n);
        if (n <= 0) ::sched_yield();  // the other process may be on this core
        return n > 0 ? static_cast<size_t>(n) : 0;
    }

   private:
    template <class T>
    static T find(void* library, const char* name, const char* version) {
        auto found = reinterpret_cast<T>(::dlvsym(library, name, version));
        check(found != nullptr, name);
        return found;
    }

    fi::Info* info_ = nullptr;
    fi::Fabric* fabric_ = nullptr;
    fi::Domain* domain_ = nullptr;
    fi::Cq* cq_ = nullptr;
    fi::Av* av_ = nullptr;
    fi::Ep* ep_ = nullptr;
    fi::Mr* mr_ = nullptr;
    std::byte* memory_ = nullptr;
    End other_;
    uint64_t peer_ = 0;
};

// A batch at a time, as callers do that wait for it.
double gb_per_s(Fabric& fabric, bool write, size_t size, size_t batch, size_t bytes, double seconds) {
    std::vector<std::array<uint64_t, 8>> contexts(batch);  // the provider's, while a request is under way
    size_t at = 0, moved = 0;
    const double began_s = now_s();
    double passed_s = 0;
    do {
        for (size_t posted = 0, done = 0; done < batch;) {
            while (posted < batch) {
                ssize_t code = fabric.post(write, at, size, contexts[posted].data());
                if (code == -EAGAIN) break;
                check(code == 0, "a request is not taken", code);
                ++posted;
                at = (at + size) % bytes;
            }
            done += fabric.poll();
        }
        moved += batch * size;
        passed_s = now_s() - began_s;
    } while (passed_s < seconds);
    return static_cast<double>(moved) / passed_s / 1e9;
}

}  // namespace

int main(int count, char** words) {
    check(count == 4, "fabric_loop PROVIDER SECONDS BYTES");
    const double seconds = std::atof(words[2]);
    const size_t bytes = std::strtoull(words[3], nullptr, 10);
    std::array<int, 2> line{};
    check(::socketpair(AF_UNIX, SOCK_STREAM, 0, line.data()) == 0, "socketpair");
    const pid_t child = ::fork();
    check(child >= 0, "fork");
    const int own_line = line[child == 0];
    ::close(line[child != 0]);  // so that each sees the other's end
    if (child == 0) ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    Fabric fabric(words[1], bytes);
    End own = fabric.end(), other;
    check(::write(own_line, &own, sizeof(own)) == sizeof(own), "the other process");
    check(::recv(own_line, &other, sizeof(other), MSG_WAITALL) == sizeof(other), "the other process");
    fabric.meet(other);
    while (child == 0) (void)fabric.poll();
    for (bool write : {false, true}) {
        for (auto [size, batch] : {std::pair<size_t, size_t>{4 << 10, 128}, {64 << 10, 1}, {1 << 20, 1}}) {
            (void)gb_per_s(fabric, write, size, batch, bytes, seconds / 4);
            std::printf("%s %zu %zu %.4f\n", write ? "write" : "read", size, batch,
                        gb_per_s(fabric, write, size, batch, bytes, seconds));
        }
    }
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    std::fflush(stdout);
    ::_exit(0);
}
