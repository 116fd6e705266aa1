// State: an enum value that changes only as a table of transitions allows.
//
//     enum class Door : uint8_t { kOpen, kShut, kLocked };
//     inline constexpr Transitions<Door, 3> kDoor{"Door", {
//         {Door::kOpen, "open", {Door::kShut}},
//         {Door::kShut, "shut", {Door::kOpen, Door::kLocked}},
//         {Door::kLocked, "locked", {Door::kShut}},
//     }};
//     static_assert(kDoor.is_complete());
//     State<kDoor> door;           // the first row
//     door.move_to(Door::kShut);
//
// Without NDEBUG (sanitizer builds, all native tests) move_to() ends the process on a transition that is not
// in the table, and names both states; with NDEBUG it is an assignment. Threads: as of the plain enum.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <type_traits>

namespace moonpool {

#ifdef NDEBUG
inline constexpr bool kStatesChecked = false;
#else
inline constexpr bool kStatesChecked = true;
#endif

// One row per value of the enum, in the order of its numbers, which count from 0.
template <class Enum, size_t kCount>
class Transitions {
    static_assert(kCount <= 64);

   public:
    using Value = Enum;
    struct Row {
        Enum state;
        const char* name;  // a string literal
        std::initializer_list<Enum> next;
    };

    constexpr Transitions(const char* of, std::initializer_list<Row> rows) : of_(of) {
        for (const Row& row : rows) {
            in_order_ = in_order_ && count_ < kCount && static_cast<size_t>(row.state) == count_;
            if (!in_order_) return;
            names_[count_] = row.name;
            for (Enum next : row.next) next_[count_] |= bit(next);
            ++count_;
        }
    }

    // Whether a State may move from one to the other. To itself: only where the table says so.
    constexpr bool allows(Enum from, Enum to) const {
        return (next_[static_cast<size_t>(from)] & bit(to)) != 0;
    }
    constexpr const char* name(Enum state) const { return names_[static_cast<size_t>(state)]; }
    constexpr const char* of() const { return of_; }
    constexpr Enum first() const { return Enum{}; }

    // For a static_assert: each value has its row, and each can be reached from the first.
    constexpr bool is_complete() const {
        uint64_t reached = 1;
        for (size_t pass = 0; pass < kCount; ++pass) {
            for (size_t i = 0; i < kCount; ++i) {
                if ((reached >> i & 1) != 0) reached |= next_[i];
            }
        }
        return in_order_ && count_ == kCount && reached == (~uint64_t{0} >> (64 - kCount));
    }

   private:
    static constexpr uint64_t bit(Enum state) { return uint64_t{1} << static_cast<size_t>(state); }

    const char* of_;
    size_t count_ = 0;
    bool in_order_ = true;
    std::array<const char*, kCount> names_{};
    std::array<uint64_t, kCount> next_{};
};

// kTable: an inline constexpr Transitions. Begins in its first row.
template <const auto& kTable>
class State {
   public:
    using Value = typename std::remove_cvref_t<decltype(kTable)>::Value;

    constexpr operator Value() const { return value_; }  // so that it compares and switches as the enum does
    constexpr const char* name() const { return kTable.name(value_); }

    constexpr void move_to(Value next) {
        if constexpr (kStatesChecked) {
            if (!kTable.allows(value_, next)) fail(next);
        }
        value_ = next;
    }

   private:
    [[noreturn]] void fail(Value next) const {
        std::fprintf(stderr, "%s: no transition from %s to %s\n", kTable.of(), name(), kTable.name(next));
        std::abort();
    }

    Value value_ = kTable.first();
};

}  // namespace moonpool
