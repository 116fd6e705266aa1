// A second process of a test: this program again, which runs one test case that is skipped otherwise, and
// talks with its parent in lines.
//
//     TEST_CASE("owner of some memory" * doctest::skip()) { Parent parent; ... parent.say("ready"); }
//     Child child("owner of some memory");  child.hear() == "ready";
#pragma once

#include <doctest/doctest.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

namespace moonpool::testing {

class Line {
   public:
    void say(const std::string& line) {
        std::string text = line + "\n";
        REQUIRE(::send(fd_, text.data(), text.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(text.size()));
    }
    // The next line; "" when the other process has ended.
    std::string hear() {
        std::string line;
        char c = 0;
        while (::read(fd_, &c, 1) == 1 && c != '\n') line.push_back(c);
        return line;
    }

   protected:
    int fd_ = -1;
};

class Parent : public Line {
   public:
    Parent() { fd_ = std::atoi(std::getenv("MOONPOOL_TEST_PARENT")); }
};

class Child : public Line {
   public:
    explicit Child(const std::string& test_case) {
        int ends[2];
        REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
        REQUIRE(::fcntl(ends[0], F_SETFD, FD_CLOEXEC) == 0);
        // All that allocates comes before fork(): another thread may be within malloc.
        std::string filter = "--test-case=" + test_case;
        std::string parent = "MOONPOOL_TEST_PARENT=" + std::to_string(ends[1]);
        std::vector<char*> environment = {parent.data()};
        for (char** entry = environ; *entry != nullptr; ++entry) environment.push_back(*entry);
        environment.push_back(nullptr);
        pid_ = ::fork();
        REQUIRE(pid_ >= 0);
        if (pid_ == 0) {
            ::execle("/proc/self/exe", "program", filter.c_str(), "--no-skip", "--minimal",
                     static_cast<char*>(nullptr), environment.data());
            ::_exit(127);
        }
        ::close(ends[1]);
        fd_ = ends[0];
    }
    ~Child() {
        if (pid_ > 0) kill();
        ::close(fd_);
    }
    Child(const Child&) = delete;

    pid_t pid() const { return pid_; }
    int fd() const { return fd_; }
    void kill() {
        ::kill(pid_, SIGKILL);
        reap();
    }
    // Waits for its end; whether its test case passed.
    bool reap() {
        int status = 0;
        REQUIRE(::waitpid(pid_, &status, 0) == pid_);
        pid_ = -1;
        return WIFEXITED(status) && WEXITSTATUS(status) == 0;
    }

   private:
    pid_t pid_ = -1;
};

}  // namespace moonpool::testing
