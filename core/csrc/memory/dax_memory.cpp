#include "memory/dax_memory.hpp"

#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <optional>
#include <sstream>

#include "base/xxh3.hpp"

namespace moonpool {

namespace {

constexpr uint64_t kMagic = 0x3158'4144'4c50'4d00;  // "\0MPLDAX1"
constexpr uint64_t kGrainsMax = 16384;
constexpr uint64_t kTableAt = 4096;
static_assert(std::atomic<uint64_t>::is_always_lock_free);

// The bits of an owner's number, from the top: of the start of the machine, the pid namespace, the pid, and
// when the process began. The last two may be compared within one namespace only.
constexpr int kBootBits = 12, kSpaceBits = 10, kPidBits = 22, kBeganBits = 20;
static_assert(kBootBits + kSpaceBits + kPidBits + kBeganBits == 64);

uint64_t low(uint64_t value, int bits) { return value & ((uint64_t{1} << bits) - 1); }

uint64_t boot_number() {
    std::ifstream in("/proc/sys/kernel/random/boot_id");
    std::string text;
    in >> text;
    return low(xxh3_64(text.data(), text.size()), kBootBits);
}

uint64_t space_number() {
    struct stat info {};
    return ::stat("/proc/self/ns/pid", &info) == 0 ? low(info.st_ino, kSpaceBits) : 0;
}

// When a process of this namespace began, in ticks; nothing: there is none.
std::optional<uint64_t> began(uint64_t pid) {
    std::ifstream in("/proc/" + std::to_string(pid) + "/stat");
    std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    size_t name_end = text.rfind(')');
    if (name_end == std::string::npos) return std::nullopt;
    std::istringstream fields(text.substr(name_end + 1));
    std::string field;
    for (int i = 3; i < 22; ++i) fields >> field;
    uint64_t ticks = 0;
    return fields >> ticks ? std::optional(low(ticks, kBeganBits)) : std::nullopt;
}

uint64_t own_number() {
    auto pid = static_cast<uint64_t>(::getpid());
    uint64_t number = boot_number();
    number = number << kSpaceBits | space_number();
    number = number << kPidBits | low(pid, kPidBits);
    return number << kBeganBits | began(pid).value_or(0);
}

// Whether that process has surely ended. Of another pid namespace only a new start of the machine tells.
bool is_gone(uint64_t owner, uint64_t own) {
    constexpr int kProcessBits = kPidBits + kBeganBits;
    if (owner >> (kProcessBits + kSpaceBits) != own >> (kProcessBits + kSpaceBits)) return true;
    if (owner >> kProcessBits != own >> kProcessBits) return false;
    return began(low(owner >> kBeganBits, kPidBits)) != low(owner, kBeganBits);
}

// The table at the front of a device.
class Header {
   public:
    explicit Header(const DaxDevice& device) {
        while (device.bytes / grain_ > kGrainsMax || grain_ < device.align) grain_ *= 2;
        grains_ = device.bytes / grain_;
        // The grains that the table itself occupies are no one's.
        first_ = (bytes() + grain_ - 1) / grain_;
    }
    void set(std::byte* at) { at_ = at; }

    uint64_t bytes() const { return round_up_to_page(kTableAt + 16 * grains_); }
    uint64_t grain() const { return grain_; }
    uint64_t grains() const { return grains_; }
    uint64_t first() const { return first_; }
    std::atomic<uint64_t>& magic() const { return word(0); }
    std::atomic<uint64_t>& grain_size() const { return word(8); }
    std::atomic<uint64_t>& owner(uint64_t grain) const { return word(kTableAt + 8 * grain); }
    std::atomic<uint64_t>& nonce(uint64_t grain) const { return word(kTableAt + 8 * (grains_ + grain)); }

    // Two processes that begin at the same time write the same.
    Status begin() const {
        if (magic() == kMagic && grain_size() == grain_) return success();
        if (std::any_of(at_, at_ + kTableAt, [](std::byte b) { return b != std::byte{0}; }) &&
            !(magic() == 0 && grain_size() == grain_)) {
            return Error{
                Code::kInvalidArgument,
                "its first page has data that is not moonpool's; if it is of no use to you, clear it: "
                "write zeros there by a program that maps the device"};
        }
        for (uint64_t i = kTableAt; i < bytes(); i += 8) word(i) = 0;
        grain_size() = grain_;
        magic() = kMagic;
        return success();
    }

   private:
    std::atomic<uint64_t>& word(uint64_t at) const {
        return *reinterpret_cast<std::atomic<uint64_t>*>(at_ + at);
    }
    std::byte* at_ = nullptr;
    uint64_t grain_ = 2u << 20, grains_ = 0, first_ = 0;
};

Error on_device(const DaxDevice& device, Code code, const std::string& why) {
    return Error{code, "no memory of " + device.path() + " can be had: " + why};
}

Result<Mapping> map_front(const DaxDevice& device, uint64_t bytes) {
    if (device.align > kHugePageBytes) {
        return on_device(device, Code::kInvalidArgument,
                         "its alignment is " + std::to_string(device.align) +
                             " bytes, and 2 MiB is the most that is used; make it anew with -a 2M");
    }
    Result<Fd> fd = device.open();
    if (!fd) return fd.error();
    return Mapping::map(fd->get(), (bytes + device.align - 1) / device.align * device.align, true);
}

// A row of grains of no living process; from `from` on.
std::optional<uint64_t> take(const Header& header, uint64_t n, uint64_t own) {
    for (uint64_t first = header.first(); first + n <= header.grains();) {
        uint64_t taken = 0;
        while (taken < n) {
            std::atomic<uint64_t>& owner = header.owner(first + taken);
            uint64_t before = owner.load();
            if (before != 0 && !is_gone(before, own)) break;
            if (!owner.compare_exchange_strong(before, own)) break;
            ++taken;
        }
        if (taken == n) return first;
        for (uint64_t i = 0; i < taken; ++i) header.owner(first + i) = 0;
        first += taken + 1;
    }
    return std::nullopt;
}

}  // namespace

Result<std::unique_ptr<DaxMemory>> DaxMemory::create(const DaxDevice& device, uint64_t bytes) {
    Header header(device);
    if (header.first() >= header.grains()) {
        return on_device(
            device, Code::kTooLarge,
            "it has " + std::to_string(device.bytes) + " bytes, which its table of owners takes");
    }
    Result<Mapping> front = map_front(device, header.bytes());
    if (!front) return front.error();
    std::unique_ptr<DaxMemory> memory(new DaxMemory(device));
    memory->header_ = std::move(*front);
    header.set(memory->header_.data());
    if (Status begun = header.begin(); !begun)
        return on_device(device, Code::kInvalidArgument, begun.error().text);
    uint64_t n = bytes / header.grain() + (bytes % header.grain() != 0 ? 1 : 0);
    std::optional<uint64_t> first = take(header, n, own_number());
    if (!first) {
        return on_device(device, Code::kTooLarge,
                         "no " + std::to_string(bytes) + " bytes of it in a row are free");
    }
    // From here on the destructor gives them back.
    memory->first_ = *first;
    memory->grains_ = n;
    memory->place_ = {device.name, *first * header.grain(), 0};
    Result<Mapping> mapping = map_front(device, memory->place_.offset + n * header.grain());
    if (!mapping) return mapping.error();
    memory->mapping_ = std::move(*mapping);
    (void)memory->mapping_.protect(0, memory->place_.offset, false);
    std::memset(memory->data(), 0, n * header.grain());
    while (memory->place_.nonce == 0) {
        if (::getrandom(&memory->place_.nonce, sizeof(uint64_t), 0) != sizeof(uint64_t)) {
            return os_error("getrandom");
        }
    }
    header.nonce(*first) = memory->place_.nonce;
    return memory;
}

DaxMemory::~DaxMemory() {
    if (grains_ == 0) return;
    mapping_ = Mapping();
    Header header(device_);
    header.set(header_.data());
    // In a child of fork() they stay its parent's.
    const uint64_t own = own_number();
    for (uint64_t i = 0; i < grains_; ++i) {
        uint64_t owner = own;
        if (i == 0 && header.owner(first_) == own) header.nonce(first_) = 0;
        header.owner(first_ + i).compare_exchange_strong(owner, 0);
    }
}

Result<Mapping> DaxMemory::map_peers(const DaxPlace& place, uint64_t bytes, const std::string& root) {
    Result<DaxDevice> device = DaxDevice::find(place.device, root);
    if (!device) return device.error();
    Header header(*device);
    uint64_t first = place.offset / header.grain();
    if (place.nonce == 0 || place.offset % header.grain() != 0 || first < header.first() ||
        place.offset >= device->bytes || bytes == 0 || bytes > device->bytes - place.offset) {
        return Error{Code::kProtocol, "the peer named a place outside of the DAX device " + place.device};
    }
    Result<Mapping> mapping = map_front(*device, place.offset + bytes);
    if (!mapping) return mapping.error();
    header.set(mapping->data());
    if (header.magic() != kMagic || header.nonce(first) != place.nonce) {
        return Error{Code::kUnavailable, device->path() +
                                             " is another device here than at the peer: the number that the "
                                             "peer wrote into it is not there"};
    }
    (void)mapping->protect(0, place.offset, false);
    return mapping;
}

}  // namespace moonpool
