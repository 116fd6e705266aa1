// The process behind a Unix socket: told from its id, from a process that only made the connection, and from
// one that has ended.
#include <doctest/doctest.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <string>

#include "base/peer_process.hpp"
#include "process.hpp"

using namespace moonpool;
using namespace moonpool::testing;

namespace {

// In the abstract namespace, which leaves no file.
struct Name {
    sockaddr_un address{};
    socklen_t size = 0;

    explicit Name(const std::string& name) {
        address.sun_family = AF_UNIX;
        std::memcpy(address.sun_path + 1, name.data(), name.size());
        size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    }
    const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }
};

Fd listener(const std::string& name) {
    Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    Name at(name);
    REQUIRE(::bind(fd.get(), at.get(), at.size) == 0);
    REQUIRE(::listen(fd.get(), 8) == 0);
    return fd;
}

// -1: refused.
Fd connected(const std::string& name) {
    Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    Name at(name);
    return ::connect(fd.get(), at.get(), at.size) == 0 ? std::move(fd) : Fd();
}

std::string name_of(pid_t pid) { return "moonpool-peer-process-" + std::to_string(pid); }

// 0: a process in a pid namespace of its own sees the listener's process, which has no id there; 77: this
// test may make no namespace.
int look_from_another_namespace(const std::string& name, int ended) {
    if (::unshare(CLONE_NEWPID) != 0) return 77;
    pid_t inner = ::fork();
    if (inner == 0) {
        Fd fd = connected(name);
        if (!fd.valid()) ::_exit(2);
        if (pid_behind(fd.get()) != 0) ::_exit(3);
        Fd process = process_behind(fd.get());
        if (!process.valid()) ::_exit(78);  // before Linux 6.5
        if (has_ended(process)) ::_exit(4);
        char byte = 0;
        if (::write(ended, &byte, 1) != 1) ::_exit(5);
        if (::read(ended, &byte, 1) != 1) ::_exit(6);  // the listener's process has ended
        ::_exit(has_ended(process) ? 0 : 7);
    }
    int status = 0;
    if (inner < 0 || ::waitpid(inner, &status, 0) != inner || !WIFEXITED(status)) return 8;
    return WEXITSTATUS(status);
}

}  // namespace

TEST_CASE("peer process: one that a test kills" * doctest::skip()) {
    Parent parent;
    Fd fd = listener(name_of(::getpid()));
    parent.say("listens");
    (void)parent.hear();
}

TEST_CASE("peer process: it is found behind a connection, runs while it stands still, and then has ended") {
    Child child("peer process: one that a test kills");
    REQUIRE(child.hear() == "listens");
    const pid_t pid = child.pid();
    Fd fd = connected(name_of(pid));
    REQUIRE(fd.valid());
    CHECK(pid_behind(fd.get()) == pid);
    Fd process = process_behind(fd.get());
    REQUIRE(process.valid());
    CHECK_FALSE(has_ended(process));
    REQUIRE(::kill(pid, SIGSTOP) == 0);
    int status = 0;
    REQUIRE(::waitpid(pid, &status, WUNTRACED) == pid);
    CHECK_FALSE(has_ended(process));
    // Killed, and not reaped: its id is still its own.
    REQUIRE(::kill(pid, SIGKILL) == 0);
    siginfo_t info{};
    REQUIRE(::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOWAIT) == 0);
    CHECK(has_ended(process));
    child.reap();
    CHECK(has_ended(process));
    Fd later = process_behind(fd.get());
    CHECK((!later.valid() || has_ended(later)));
}

TEST_CASE("peer process: the ends of a socket pair are its own process's") {
    int ends[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    Fd here(ends[0]), there(ends[1]);
    CHECK(pid_behind(here.get()) == ::getpid());
    Fd process = process_behind(here.get());
    REQUIRE(process.valid());
    CHECK_FALSE(has_ended(process));
}

TEST_CASE("peer process: there is none behind a socket of another kind, or behind none") {
    Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    CHECK(pid_behind(fd.get()) == 0);
    CHECK_FALSE(process_behind(fd.get()).valid());
    CHECK(pid_behind(-1) == 0);
    CHECK_FALSE(process_behind(-1).valid());
}

TEST_CASE("peer process: one of another pid namespace is told to run, and to have ended") {
    Child child("peer process: one that a test kills");
    REQUIRE(child.hear() == "listens");
    int ends[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    pid_t looks = ::fork();
    REQUIRE(looks >= 0);
    if (looks == 0) {
        ::close(ends[0]);
        ::_exit(look_from_another_namespace(name_of(child.pid()), ends[1]));
    }
    Fd ours(ends[0]);
    ::close(ends[1]);
    char byte = 0;
    if (::read(ours.get(), &byte, 1) == 1) {
        child.kill();
        REQUIRE(::write(ours.get(), &byte, 1) == 1);
    }
    int status = 0;
    REQUIRE(::waitpid(looks, &status, 0) == looks);
    REQUIRE(WIFEXITED(status));
    const int told = WEXITSTATUS(status);
    if (told == 77 || told == 78) {
        const std::string why = told == 77 ? "no right to make a namespace" : "a kernel before 6.5";
        MESSAGE("not here: " << why);
        return;
    }
    CHECK(told == 0);
}
