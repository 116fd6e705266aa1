// The secrets of a cluster, and both sides of a handshake while one secret replaces the other.
#include <doctest/doctest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "wire/dial.hpp"
#include "wire/listener.hpp"
#include "wire/secrets.hpp"

using namespace moonpool;

namespace {

const std::string kOld = "the old secret of this cluster", kNew = "the new secret of this cluster";
using Lines = std::vector<std::string>;

// A token file that is replaced whole, as editors and Kubernetes do.
class TokenFile {
   public:
    explicit TokenFile(const std::string& text) {
        char folder[] = "/tmp/moonpool-secrets-XXXXXX";
        REQUIRE(::mkdtemp(folder) != nullptr);
        folder_ = folder;
        replace(text);
    }
    ~TokenFile() { std::filesystem::remove_all(folder_); }
    void replace(const std::string& text, mode_t mode = 0600) {
        std::string draft = folder_ + "/draft";
        std::ofstream(draft) << text;
        REQUIRE(::chmod(draft.c_str(), mode) == 0);
        std::filesystem::rename(draft, path());
    }
    std::string path() const { return folder_ + "/token"; }

   private:
    std::string folder_;
};

// A port that proves and believes what `token` has.
class Port {
   public:
    explicit Port(Secrets token) {
        ListenerOptions options;
        options.addresses = {"127.0.0.1:0"};
        options.token = std::move(token);
        options.incarnation = random_incarnation();
        options.journal = journal_;
        auto made = Listener::create(std::move(options));
        REQUIRE(made.ok());
        listener_ = std::move(*made);
        listener_->offer("store", {[](std::string_view) { return std::vector<std::byte>{}; },
                                   [](AuthenticatedConnection) {}});
        REQUIRE(listener_->start().ok());
    }
    Result<Dialed> dial(Secrets token) const {
        return moonpool::dial(
            {listener_->addresses().front(), std::move(token), "default", "store", 5000, ""});
    }
    uint64_t refusals() const { return listener_->counters().auth_failures_total; }
    std::string noted(const std::string& kind) const {
        for (const Note& note : journal_->take()) {
            if (note.kind == kind) return note.text;
        }
        return "";
    }

   private:
    std::shared_ptr<Journal> journal_ = std::make_shared<Journal>();
    std::unique_ptr<Listener> listener_;
};

Secrets fixed(const std::string& text) { return std::move(*Secrets::of_text(text, "a text")); }
Secrets followed(const TokenFile& file) { return std::move(*Secrets::of_file(file.path())); }

}  // namespace

TEST_CASE("secrets: the lines of a text are one secret or two") {
    auto in = [](const std::string& text) { return std::move(*secrets_in(text, "it")); };
    CHECK(in(" " + kOld + "\n") == Lines{kOld});
    CHECK(in(kNew + "\r\n\n  " + kOld + "\n") == Lines{kNew, kOld});
    CHECK(in("short") == Lines{"short"});
    // As they stand: what a wrapped base64 of three lines is, and random bytes with line ends among them.
    std::string wrapped = kOld + "\n" + kOld + "\n" + kNew;
    CHECK(in(wrapped) == Lines{wrapped});
    std::string random = "\x01 some random bytes \n\xff and some others \x80";
    CHECK(in(random) == Lines{random});

    CHECK(secrets_in(kNew + "\nslip", "it").error().text.find("one has 4 bytes") != std::string::npos);
    CHECK(secrets_in(" \n", "it").error().text == "it is empty");
    CHECK(!secrets_in(std::string(4097, 'x'), "it").ok());
}

TEST_CASE("secrets: a file is followed, and one that cannot be used changes nothing") {
    TokenFile file(kOld);
    Secrets secrets = followed(file);
    Secrets copy = secrets;
    CHECK(*secrets.now() == Lines{kOld});
    file.replace(kNew + "\n" + kOld);
    CHECK(*copy.now() == Lines{kNew, kOld});
    CHECK(secrets.take_trouble().empty());

    Secrets known = Secrets::following(file.path() + "-gone", {kNew, kOld});
    CHECK(*known.now() == Lines{kNew, kOld});
    for (const auto& [text, mode] : {std::pair("", 0600), std::pair("too short", 0600),
                                     std::pair("a secret that others can read", 0644)}) {
        file.replace(text, static_cast<mode_t>(mode));
        CHECK(*secrets.now() == Lines{kNew, kOld});
        CHECK(secrets.take_trouble().find("the secrets from before are in use") != std::string::npos);
        CHECK(*secrets.now() == Lines{kNew, kOld});
        CHECK(copy.take_trouble().empty());  // told once
    }
    std::filesystem::remove(file.path());
    CHECK(*secrets.now() == Lines{kNew, kOld});
    file.replace(kNew, 0644);
    CHECK(*secrets.now() == Lines{kNew, kOld});
    CHECK(!secrets.take_trouble().empty());
    REQUIRE(::chmod(file.path().c_str(), 0600) == 0);
    CHECK(*secrets.now() == Lines{kNew});
    CHECK(secrets.take_trouble().empty());
}

TEST_CASE("secrets: two sides meet by any secret that both have") {
    Port port(fixed(kNew + "\n" + kOld));
    CHECK(port.dial(fixed(kOld)).ok());
    CHECK(port.dial(fixed(kNew)).ok());
    CHECK(port.dial(fixed(kOld + "\n" + kNew)).ok());
    CHECK(port.refusals() == 0);
    CHECK(port.dial(fixed("a secret of another cluster")).error().code == Code::kAuth);
    CHECK(port.refusals() == 1);

    Port before(fixed(kOld));
    CHECK(before.dial(fixed(kNew + "\n" + kOld)).ok());  // the first is refused, the second is not
    CHECK(before.refusals() == 1);
    CHECK(before.dial(fixed(kNew)).error().code == Code::kAuth);
}

TEST_CASE("secrets: one replaces the other in any order of two hosts, and no call fails") {
    TokenFile here(kOld), there(kOld);
    Port port(followed(here));
    Secrets caller = followed(there);
    const std::string both = kOld + "\n" + kNew, turned = kNew + "\n" + kOld;
    // Each step ends on both hosts before the next begins; within one either host is first.
    for (const std::string& step : {both, turned, kNew}) {
        CHECK(port.dial(caller).ok());
        there.replace(step);
        CHECK(port.dial(caller).ok());
        here.replace(step);
        CHECK(port.dial(caller).ok());
    }
    CHECK(port.refusals() == 0);
    CHECK(port.dial(fixed(kOld)).error().code == Code::kAuth);

    here.replace("");
    CHECK(port.dial(caller).ok());
    CHECK(port.noted("token").find("is empty; the secrets from before are in use") != std::string::npos);
}
