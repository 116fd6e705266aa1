// Enums that change by a table.
#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "base/fd.hpp"
#include "base/state.hpp"

using namespace moonpool;

namespace {

enum class Door : uint8_t { kOpen, kShut, kLocked };
constexpr Transitions<Door, 3> kDoor{"Door",
                                     {
                                         {Door::kOpen, "open", {Door::kShut}},
                                         {Door::kShut, "shut", {Door::kOpen, Door::kLocked}},
                                         {Door::kLocked, "locked", {Door::kShut}},
                                     }};
static_assert(kDoor.is_complete());
static_assert(kDoor.allows(Door::kShut, Door::kLocked) && !kDoor.allows(Door::kOpen, Door::kLocked));
static_assert(!kDoor.allows(Door::kOpen, Door::kOpen));
static_assert(sizeof(State<kDoor>) == sizeof(Door));

constexpr Transitions<Door, 3> kRowMissing{
    "", {{Door::kOpen, "", {Door::kShut, Door::kLocked}}, {Door::kShut, "", {}}}};
constexpr Transitions<Door, 3> kOutOfOrder{
    "", {{Door::kOpen, "", {Door::kShut, Door::kLocked}}, {Door::kLocked, "", {}}, {Door::kShut, "", {}}}};
constexpr Transitions<Door, 3> kUnreached{
    "", {{Door::kOpen, "", {Door::kShut}}, {Door::kShut, "", {}}, {Door::kLocked, "", {Door::kOpen}}}};
static_assert(!kRowMissing.is_complete() && !kOutOfOrder.is_complete() && !kUnreached.is_complete());

// What `function` writes to stderr before it ends its process; "": it returned.
template <class Function>
std::string last_words(Function function) {
    int ends[2];
    REQUIRE(::pipe(ends) == 0);
    Fd read_end, write_end;
    read_end.reset(ends[0]);
    write_end.reset(ends[1]);
    pid_t child = ::fork();
    if (child == 0) {
        ::dup2(ends[1], STDERR_FILENO);
        std::signal(SIGABRT, SIG_DFL);  // the test framework's handler would report it as a failure
        function();
        ::_exit(0);
    }
    write_end.reset();
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    char words[256];
    ssize_t n = ::read(ends[0], words, sizeof(words));
    return WIFSIGNALED(status) && n > 0 ? std::string(words, static_cast<size_t>(n)) : std::string();
}

}  // namespace

TEST_CASE("state: it begins in the first row, moves as the table says, and compares as its enum") {
    State<kDoor> door;
    CHECK(door == Door::kOpen);
    door.move_to(Door::kShut);
    door.move_to(Door::kLocked);
    CHECK(door == Door::kLocked);
    CHECK(std::string(door.name()) == "locked");
}

TEST_CASE("state: a transition that is not in the table ends the process and names both states") {
    REQUIRE(kStatesChecked);
    CHECK(last_words([] { State<kDoor>().move_to(Door::kShut); }) == "");
    CHECK(last_words([] { State<kDoor>().move_to(Door::kLocked); }) ==
          "Door: no transition from open to locked\n");
}
