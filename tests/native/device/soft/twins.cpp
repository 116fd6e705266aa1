#include "twins.hpp"

#include <cstdint>
#include <iterator>
#include <type_traits>

#include "state.hpp"

namespace {

struct Place {
    unsigned block = 0, blocks = 0, thread = 0, threads = 0;
    int card = 0;
};
thread_local Place place;

// An access that is refused goes to scrap memory: the kernel runs on, as that of a card does for a while.
template <class T>
T& checked(const volatile void* address) {
    static thread_local std::remove_const_t<T> scrap;
    char* reached = moonpool::soft::state().reach(reinterpret_cast<uint64_t>(address), sizeof(T),
                                                  !std::is_const_v<T>, place.card);
    if (reached != nullptr && reinterpret_cast<uint64_t>(reached) % alignof(T) != 0) {
        moonpool::soft::state().violation("an access of a kernel that is not aligned");
        reached = nullptr;
    }
    return reached != nullptr ? *reinterpret_cast<T*>(reached) : scrap;
}
template <class T>
T& checked(unsigned long long address) {
    return checked<T>(reinterpret_cast<const volatile void*>(address));
}

#define KERNEL static
#define DEVICE static inline
#define ROLLED
#define ALIGNED(bytes) alignas(bytes)
#define BLOCK place.block
#define BLOCKS place.blocks
#define THREAD place.thread
#define THREADS place.threads
#define AT(type, address) (checked<type>(address))
#include "device/kernels/objects.cu"

void run_objects(unsigned block, unsigned blocks, unsigned threads, int card, void** a) {
    place = {block, blocks, 0, threads, card};
    for (; place.thread < threads && moonpool::soft::state().broken == 0; ++place.thread) {
        moonpool_objects(*static_cast<Row**>(a[0]), *static_cast<unsigned**>(a[1]),
                         *static_cast<Object**>(a[2]), *static_cast<unsigned*>(a[3]),
                         *static_cast<unsigned*>(a[4]), *static_cast<unsigned long long*>(a[5]),
                         *static_cast<unsigned*>(a[6]));
    }
}

const moonpool::soft::Twin kTwins[] = {{"moonpool_objects", {8, 8, 8, 4, 4, 8, 4}, run_objects}};

}  // namespace

namespace moonpool::soft {

const Twin* find_twin(const std::string& name) {
    for (const Twin& twin : kTwins) {
        if (name == twin.name) return &twin;
    }
    return nullptr;
}

}  // namespace moonpool::soft
